"""Files that people run and tests look into."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(file: str) -> ModuleType:
    """A file, named from the repository's root, as a module; what it does to `sys.path` is undone."""
    path = ROOT / file
    spec = spec_from_file_location(f"script_{path.stem}", path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = module_from_spec(spec)  # where its dataclasses look for their names
    searched = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = searched
    return module
