"""From a recipe to an engine directory: get the weights, choose the builder, write aside, rename into place."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from saguaro.build.model_shape import find_shape
from saguaro.build.models import pull, source_sha256
from saguaro.build.plan import Plan
from saguaro.build.recipe import Recipe, find_recipe
from saguaro.build.store import locked, progress_bar, require_space, size_text, writing
from saguaro.build.tensorrt_plan import plan_tensorrt
from saguaro.build.trtllm_plan import plan_trtllm
from saguaro.engines.manifest import QUANTISED, Manifest
from saguaro.engines.trtllm_config import check_version
from saguaro.errors import ConfigError, EngineError
from saguaro.plugins import cpp

__all__ = ["build", "engine_directory", "find_recipe", "plan"]

log = logging.getLogger(__name__)

_STAGING: Final = ".building-"
_SPARE: Final = 64 << 20  # bytes for the tokenizer and what the file system adds


def build(recipe: Recipe, store: Path, *, progress: bool = True) -> Path:
    """The recipe's engine directory, built if it is not there; its model is pulled if needed.

    An interrupted or failed build leaves nothing that could be loaded. Raises ConfigError, ModelError, EngineError or
    CapacityError, saying what does not fit.
    """
    if recipe.engine == "tensorrt" and find_spec("tensorrt") is None:
        raise EngineError(
            f"recipe {recipe.name}: TensorRT is not installed here. Build it in NVIDIA's image, on the GPU of the "
            "draft (docs/deployment/build.md), or use engine: pytorch."
        )
    if recipe.engine == "trtllm":
        if recipe.tiny is not None:
            raise ConfigError(f"recipe {recipe.name}: tiny is not for the engine trtllm; name a model.")
        check_version()
    if recipe.dtype in QUANTISED:
        for kernel in ("quantised_linear", "fan_out_attention"):
            cpp.load(kernel)  # what cannot be compiled here is said before gigabytes are fetched
    paths = [] if recipe.model is None else pull(recipe.model, store)
    directory = engine_directory(recipe, store)
    with locked(store, directory.name), writing(store):
        if _is_complete(directory):
            return directory
        spent = None
        with _staging(directory, store) as staging:
            source = _source_sha256(recipe, store)
            if recipe.simulated is not None:
                _build_simulated(recipe, staging, source)
            elif recipe.engine == "trtllm":
                from saguaro.build.trtllm import build_trtllm  # late, as below

                spent = build_trtllm(recipe, paths[0], staging, store, source)
            else:
                _build_from_weights(recipe, paths, staging, store, source, progress)
        if spent is not None:
            shutil.rmtree(spent)
    log.info("%s is built in %s", recipe.name, directory)
    return directory


def plan(recipe: Recipe, store: Path) -> Plan:
    """What building the recipe would do and take. Needs no weights and no GPU; `store` may hold its model.

    Raises ConfigError for an engine whose build is not planned, an unknown model or a recipe that does not suit it,
    CapacityError when the engine would not fit its GPU.
    """
    if recipe.engine not in ("trtllm", "tensorrt") or recipe.model is None:
        raise ConfigError(
            f"recipe {recipe.name}: there is nothing to plan for the engine {recipe.engine}"
            f"{'' if recipe.model else ' without a model'}; plans are for trtllm and tensorrt. Build it."
        )
    shape = find_shape(recipe.model, store)
    return plan_trtllm(recipe, shape) if recipe.engine == "trtllm" else plan_tensorrt(recipe, shape)


def engine_directory(recipe: Recipe, store: Path) -> Path:
    """Where the recipe's engine is, or will be. Loads nothing. Raises ModelError when its model is not pulled yet."""
    return store / "engines" / f"{recipe.name}-{recipe.digest(_source_sha256(recipe, store))[:12]}"


def _source_sha256(recipe: Recipe, store: Path) -> str:
    if made := recipe.tiny or recipe.simulated:
        return hashlib.sha256(json.dumps(dataclasses.asdict(made), sort_keys=True).encode()).hexdigest()
    return source_sha256(str(recipe.model), store)


def _build_from_weights(
    recipe: Recipe, paths: list[Path], staging: Path, store: Path, source: str, progress: bool
) -> None:
    # Late, because torch takes seconds to import and a directory that is there needs none of it.
    from saguaro.build.pytorch import PytorchBuild
    from saguaro.build.tiny import TinyWeights
    from saguaro.build.weights import open_weights

    started = time.monotonic()
    weights = TinyWeights(recipe.tiny) if recipe.tiny is not None else open_weights(paths[0])
    work: Any
    if recipe.engine == "tensorrt":
        from saguaro.build.tensorrt import TensorrtBuild

        work = TensorrtBuild(recipe, weights, timings=store / "timing")
    else:
        work = PytorchBuild(recipe, weights)
    require_space(staging, work.size + _SPARE, f"the engine {recipe.name}")
    bar = progress_bar(f"building {recipe.name}", work.size) if progress else nullcontext(lambda size: None)
    with bar as advance:
        work.write(staging, source, advance)
    log.info("built %s, %s, in %.0f s", recipe.name, size_text(work.size), time.monotonic() - started)


def _build_simulated(recipe: Recipe, staging: Path, source: str) -> None:
    from saguaro.build.simulated import write

    write(recipe, staging, source)


def _is_complete(directory: Path) -> bool:
    if not directory.exists():
        return False
    try:
        Manifest.load(directory)
    except EngineError as error:
        log.warning("%s; building it again", error)
        return False
    return True


@contextmanager
def _staging(directory: Path, store: Path) -> Iterator[Path]:
    """An empty folder beside `directory` that takes its place in the end, or is removed on any failure.

    Called with the directory's lock held.
    """
    engines = directory.parent
    engines.mkdir(parents=True, exist_ok=True)
    _remove_stale(engines, directory.name, store)
    staging = engines / f"{_STAGING}{directory.name}-{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
        if directory.exists():
            shutil.rmtree(directory)
        staging.replace(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_stale(engines: Path, own: str, store: Path) -> None:
    """Remove what killed builds left: nobody holds the lock of their directory any more (we hold our own)."""
    for left_over in engines.glob(f"{_STAGING}*"):
        name = left_over.name.removeprefix(_STAGING).rpartition("-")[0]
        if name == own:
            shutil.rmtree(left_over)
            continue
        with locked(store, name, wait=False) as held:
            if held:
                shutil.rmtree(left_over)
