"""How a model's tensors are cut over tensor-parallel ranks, and the files they are written to.

The cut follows the plan the model's own configuration states (`base_model_tp_plan`). The embedding and the output head
are not in it and stay whole on every rank: a rank that wants only its share of the head reads those rows of it.
Files are written tensor by tensor, so memory does not grow with the model.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from saguaro.engines.checkpoint import weights_file
from saguaro.engines.manifest import FileRecord
from saguaro.errors import ConfigError

_NAMES: Final = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT: Final = 64  # of the data in the file: engines map it


@dataclass(frozen=True)
class Split:
    """How one tensor is cut: along `dim` (None: not at all), between `units` pieces that stay whole (heads, rows)."""

    dim: int | None = None
    units: int = 1
    first_only: bool = False  # a bias that is added to the sum over ranks: rank 0 has it, the others zeros

    def cut(self, tensor: Tensor, rank: int, tp: int) -> Tensor:
        """The share of one rank; with fewer units than ranks, neighbouring ranks share one (replicated KV heads)."""
        if self.first_only and rank > 0:
            return torch.zeros_like(tensor)
        if self.dim is None:
            return tensor
        each = tensor.shape[self.dim] // self.units
        taken = max(1, self.units // tp)
        return tensor.narrow(self.dim, rank * self.units // tp * each, taken * each)

    def shape(self, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
        """Shape of one rank's share of a tensor of this shape."""
        if self.dim is None:
            return shape
        share = shape[self.dim] // self.units * max(1, self.units // tp)
        return (*shape[: self.dim], share, *shape[self.dim + 1 :])


class ShardPlan:
    """The cut of a whole model over `tp` ranks. Raises ConfigError when the model cannot be cut that way."""

    def __init__(self, config: Any, tp: int) -> None:
        self.tp = tp
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._rows = int(config.intermediate_size)
        self.rules: dict[str, str] = {}  # pattern of a module's name -> colwise, rowwise or whole
        if tp == 1:
            return
        possible = [n for n in range(2, self._heads + 1) if self._divides(n)]
        if tp not in possible:
            raise ConfigError(
                f"tp: {tp} ranks cannot share {self._heads} attention heads, {self._kv_heads} KV heads and "
                f"{self._rows} feed-forward rows evenly; possible: {', '.join(str(n) for n in (1, *possible))}."
            )
        plan = {f"model.{pattern}": str(rule) for pattern, rule in config.base_model_tp_plan.items()}
        self.rules = {pattern: rule for pattern, rule in plan.items() if rule in ("colwise", "rowwise")}
        self.rules |= {"model.embed_tokens": "whole", "lm_head": "whole"}

    def _divides(self, tp: int) -> bool:
        kv_fits = self._kv_heads % tp == 0 or tp % self._kv_heads == 0
        return self._heads % tp == 0 and self._rows % tp == 0 and kv_fits

    def split(self, name: str) -> Split:
        """The cut of one tensor, by its name in the model."""
        module, _, kind = name.rpartition(".")
        rule = next((rule for pattern, rule in self.rules.items() if fnmatch.fnmatchcase(module, pattern)), "whole")
        if rule == "whole":
            return Split()
        if module.endswith((".k_proj", ".v_proj")):
            units = self._kv_heads
        else:
            units = self._heads if ".self_attn." in module else self._rows
        if rule == "colwise":
            return Split(0, units)
        return Split(1, units) if kind == "weight" else Split(first_only=True)

    def file(self, rank: int) -> str:
        """Name of a rank's weight file."""
        return weights_file(rank, self.tp)

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of one rank's shares; all ranks have the same."""
        return {name: self.split(name).shape(shape, self.tp) for name, shape in shapes.items()}


class SafetensorsWriter:
    """Writes a safetensors file whose shapes are known, one tensor after another in their order, and hashes it."""

    def __init__(self, path: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._dtype = dtype
        self._shapes = dict(shapes)
        self._digest = hashlib.sha256()
        self._size = 0
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNMENT)
        self._file = path.open("wb")
        self._put(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor; its name, shape and dtype must be those announced."""
        expected = next(iter(self._shapes), None)
        if (name, tuple(tensor.shape), tensor.dtype) != (expected, self._shapes.get(name), self._dtype):
            raise ValueError(f"expected tensor {expected} next, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        del self._shapes[name]
        self._put(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> FileRecord:
        """Make the file durable."""
        if self._shapes:
            raise ValueError(f"{len(self._shapes)} tensors were not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._digest.hexdigest())

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
