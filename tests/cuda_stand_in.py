"""What stands in for a GPU where there is none: a stream whose graphs do their work again, and attention by tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor

from saguaro.engines import pytorch
from saguaro.engines.pytorch import PytorchEngine
from saguaro.plugins.attention import plan_attention
from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import RowTensors


@dataclass
class Stream:
    """A stand-in for `Cuda`. `log` has what was done: "upload", "capture" or "replay"."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[str] = field(default_factory=list)
    _entered: int = 0
    _capturing: bool = False

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        self._entered += 1
        yield
        self._entered -= 1

    def upload(self, source: Tensor, target: Tensor) -> None:
        assert self._entered
        assert not self._capturing, "an upload that is captured repeats old values"
        assert (source.dtype, source.shape) == (target.dtype, target.shape)
        self.log.append("upload")
        target.copy_(source)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        assert self._entered
        self.log.append("capture")
        self._capturing = True
        enqueue()
        self._capturing = False

        def replay() -> None:
            assert self._entered
            self.log.append("replay")
            enqueue()

        return replay


@dataclass(frozen=True)
class TensorPlan:
    """The attention of rows that are known by their tensors alone. Rows of no sequence get NaN: nothing is written."""

    rows: RowTensors

    def attend(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float) -> Tensor:
        output = torch.full_like(query, torch.nan)
        for table, fields in zip(self.rows.block_table, self.rows.sequences.tolist(), strict=True):
            prefix, trunk, branches, steps, first, count = fields
            if count == 0:
                continue
            assert count <= self.rows.most_rows
            own = slice(first, first + count)
            mask: Tensor | FanOutMask = self.rows.fork[own].long()
            columns = int(self.rows.fork[own].max()) + 1
            if steps:
                sizes = (torch.tensor([number]) for number in (prefix, trunk, branches, count))
                mask = FanOutMask(*sizes, self.rows.fork[own].long(), self.rows.branch[own].long(), steps - 1)
                columns = prefix + trunk + branches * steps
            assert columns <= self.rows.most_columns
            block_size = key_pool.shape[1]
            blocks = table[: -(-columns // block_size)].tolist()
            # The pool's last block is for padding: no table may name it.
            plan = plan_attention([count], [blocks], block_size, len(key_pool) - 1, mask)
            output[own] = plan.attend(query[own], key_pool, value_pool, scale)
        return output


def engine_on(stream: Stream, model: object, *, graphs: bool = True, **sizes: int) -> PytorchEngine:
    """The pytorch engine as on CUDA."""
    with patch.object(pytorch, "_graph_planner", lambda device: TensorPlan):
        return PytorchEngine(model, cuda=stream, graphs=graphs, **sizes)  # type: ignore[arg-type]
