"""TensorRT's real Python bindings on a machine without TensorRT, by a native library that does nothing.

The bindings' wheel (development extra) is the vendor's: every class, enum, signature and check of arguments in it is
real, and `tensorrt.plugin`, which checks and drives our plugins, is plain Python inside it. What it lacks is the native
library behind it. Three libraries that hold the nine symbols it needs, all returning null, are compiled here, so that
the import works. No native object can be made with them: no builder, network, engine or plugin registry.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "10.14"
_LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
_SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getPluginRegistry",
    "getNvOnnxParserVersion",
    "initLibNvInferPlugins",
)


def load_tensorrt() -> Any:
    """The module `tensorrt`; where it cannot be had, the calling test file is skipped and says why."""
    if "tensorrt" in sys.modules:
        return sys.modules["tensorrt"]
    if importlib.util.find_spec("tensorrt") is None:
        _alias_bindings()
    trt = importlib.import_module("tensorrt")
    if not trt.__version__.startswith(VERSION + "."):
        _skip(f"the contract is that of TensorRT {VERSION}, but {trt.__version__} is installed")
    return trt


def _alias_bindings() -> None:
    """Make `tensorrt` the bare bindings, as the vendor's front-end package (which needs the libraries) does."""
    if importlib.util.find_spec("tensorrt_bindings") is None:
        _skip("the package tensorrt-cu13-bindings is not installed: `make setup` installs it (x86-64 Linux only)")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        _skip("there is no C compiler to make the stub of TensorRT's native library with")
    with tempfile.TemporaryDirectory(prefix="tensorrt-stub-") as folder:
        _load_stubs(Path(folder), compiler)
    bindings = importlib.import_module("tensorrt_bindings")
    # Its plugin package imports `tensorrt` itself, so that name comes first.
    sys.modules["tensorrt"] = bindings
    importlib.import_module("tensorrt_bindings.plugin")
    for name in [name for name in sys.modules if name.startswith("tensorrt_bindings.")]:
        sys.modules["tensorrt" + name.removeprefix("tensorrt_bindings")] = sys.modules[name]


def _load_stubs(folder: Path, compiler: str) -> None:
    source = folder / "stub.c"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in _SYMBOLS))
    for name in _LIBRARIES:
        library = folder / f"lib{name}.so.10"
        subprocess.run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source],
            check=True,
            capture_output=True,
            timeout=60,
        )
        # By its name in the library, the loader takes this one for the one the bindings ask for.
        ctypes.CDLL(os.fspath(library), mode=ctypes.RTLD_GLOBAL)


def _skip(reason: str) -> None:
    pytest.skip(f"TensorRT's bindings are not tested: {reason}", allow_module_level=True)
