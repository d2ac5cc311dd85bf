"""A build before it is run: settings and their reasons, commands, files, memory. Pure data, from a recipe and a shape.

What makes plans (`trtllm_plan`, `tensorrt_plan`) reads nothing and needs no GPU; what runs one decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saguaro.build.gpu_memory import MemoryPlan
from saguaro.build.model_shape import ModelShape
from saguaro.build.recipe import Recipe


@dataclass(frozen=True)
class Setting:
    """One choice the engine is built with."""

    flag: str  # as the command line spells it
    value: str | int | bool  # True: a flag without a value
    reason: str = ""  # empty when the value is the default
    field: str | None = (
        None  # of BuildConfig, `plugin_config.` before those of PluginConfig; None: of the command alone
    )


@dataclass(frozen=True)
class Step:
    """One process of a build, which makes one folder.

    Words of the command may hold $MODEL, $CHECKPOINT, $ENGINE (folders), $TIMING_CACHE (a file), $EXAMPLES
    (TensorRT-LLM's example folder) and $PYTHON: where they are is known when the step is run.
    """

    name: str
    makes: Literal["CHECKPOINT", "ENGINE"]
    command: tuple[str, ...]
    reason: str
    timeout_s: float


@dataclass(frozen=True)
class PlannedFile:
    """What a step makes, once for each rank: `name` is a format string of the rank."""

    made: Literal["CHECKPOINT", "ENGINE"]
    name: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """All that will happen, and what it will take."""

    recipe: Recipe
    shape: ModelShape
    max_model_len: int
    settings: tuple[Setting, ...]
    steps: tuple[Step, ...]
    files: tuple[PlannedFile, ...]
    memory: MemoryPlan
    host_bytes: int  # largest need of main memory while building; an estimate
    warnings: tuple[str, ...] = ()

    @property
    def disk_bytes(self) -> int:
        """All files of all ranks."""
        return self.recipe.tp * sum(file.bytes for file in self.files)
