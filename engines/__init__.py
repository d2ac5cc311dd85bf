"""Engines by name. Each is imported when one is loaded: none needs the packages of another."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from saguaro.engines.manifest import Manifest
from saguaro.engines.schema import nearest
from saguaro.errors import EngineError

if TYPE_CHECKING:  # whoever reads a manifest needs no torch
    from saguaro.engines.base import Engine

# Name in the manifest -> module:class. The class has `load(directory, **options) -> Engine`.
ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "pytorch": "saguaro.engines.pytorch:PytorchEngine",
        "simulated": "saguaro.engines.simulated:SimulatedEngine",
        "tensorrt": "saguaro.engines.tensorrt.engine:TensorrtEngine",
    }
)


def load_engine(directory: Path, *, deterministic: bool = False, graphs: bool = True, **options: Any) -> Engine:
    """The engine of an engine directory; `options` are its class's, such as `block_size` and `num_blocks`.

    `deterministic`: a row's logits are not to depend on the batch. Without `graphs` no CUDA graph is captured. Raises
    EngineError when the directory names an engine that cannot do that, or cannot be loaded this way, and what its
    `load` raises.
    """
    name = Manifest.load(directory).engine
    if name not in ENGINES:
        raise EngineError(
            f"{directory}: was built for the engine {name!r}{nearest(name, ENGINES)}, which cannot be loaded here; "
            f"known: {', '.join(ENGINES)}. Build it for one of them."
        )
    module, _, attribute = ENGINES[name].partition(":")
    try:
        load = getattr(import_module(module), attribute).load
    except ModuleNotFoundError as error:
        raise EngineError(
            f"{directory}: was built for the engine {name!r}, which needs the package {error.name}, and that is not "
            "installed here."
        ) from error
    if deterministic:
        if "deterministic" not in signature(load).parameters:
            raise EngineError(
                f"{directory}: speculation.deterministic is set, but the logits of the engine {name!r} depend on what "
                "else is in the batch. Take the key out, or build the target for the engine 'pytorch'."
            )
        options["deterministic"] = True
    if not graphs:
        if "graphs" not in signature(load).parameters:
            raise EngineError(
                f"{directory}: cuda_graphs is false, which is of the engine 'pytorch', but it was built for {name!r}. "
                "Take the key out."
            )
        options["graphs"] = False
    engine: Engine = load(directory, **options)
    return engine
