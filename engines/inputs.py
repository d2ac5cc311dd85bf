"""The small inputs of a forward: what a `ForwardBatch` holds as int32 tensors, cut, padded and laid out in one buffer.

A compiled or captured forward has as many rows and sequences as it was made for, at most; a larger batch is cut into
parts that run one after the other. The rows of a part come in the batch's order, and each of them sees only columns
that were written before or by rows of its own part, so that nothing changes but the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.engines.base import ForwardBatch
from saguaro.plugins.rows import MASK, RowTensors

# By name, all int32. A letter is a size: N rows, L of them with logits, S sequences, W blocks of a table.
INPUTS: Mapping[str, tuple[int | str, ...]] = {
    "token_ids": ("N",),
    "positions": ("N",),
    "slots": ("N",),
    "logit_rows": ("L",),
    **MASK,
}
# What fills up an input: a row of padding is of no sequence, and its KV is written nowhere.
_PADDING = {"slots": -1}
_ALIGNED = 64  # int32s, 256 bytes: what TensorRT asks of a tensor's address


@dataclass(frozen=True)
class Part:
    """Rows of a batch that are computed in one forward."""

    inputs: dict[str, Tensor]  # of INPUTS, as large as the part needs
    wanted: list[int]  # which of the batch's logits these are

    @property
    def rows(self) -> int:
        return len(self.inputs["token_ids"])


def parts(batch: ForwardBatch, rows: RowTensors, most: Mapping[str, int]) -> Iterator[Part]:
    """The batch, whose rows are `rows`, in order and in parts of at most N rows and S sequences."""
    ends = torch.tensor(batch.rows).cumsum(0)
    start, total = 0, len(batch.token_ids)
    while start < total:
        first = int(torch.searchsorted(ends, start, right=True))  # sequence of the row `start`
        end = min(start + most["N"], int(ends[min(first + most["S"], len(ends)) - 1]))
        last = int(torch.searchsorted(ends, end))  # sequence of the row before `end`
        yield _part(batch, rows, range(start, end), slice(first, last + 1), most["W"])
        start = end


def _part(batch: ForwardBatch, rows: RowTensors, part: range, of: slice, width: int) -> Part:
    sequences = rows.sequences[of].clone()
    first, count = sequences[:, 4], sequences[:, 5]  # SEQUENCE_FIELDS
    ends = (first + count).clamp(max=part.stop)
    first.clamp_(min=part.start)
    count.copy_(ends - first)
    first.sub_(part.start)
    inside = (batch.logit_rows >= part.start) & (batch.logit_rows < part.stop)
    own = slice(part.start, part.stop)
    inputs = {
        "token_ids": batch.token_ids[own],
        "positions": batch.positions[own],
        "slots": batch.slots[own],
        "logit_rows": batch.logit_rows[inside] - part.start,
        "block_table": rows.block_table[of, :width],  # what is behind is read by no row
        "sequences": sequences,
        "fork": rows.fork[own],
        "branch": rows.branch[own],
    }
    return Part(inputs, inside.nonzero()[:, 0].tolist())


class Layout:
    """Where `inputs` (names and shapes) of given sizes lie in one int32 buffer, one after the other."""

    def __init__(self, sizes: Mapping[str, int], inputs: Mapping[str, tuple[int | str, ...]] = INPUTS) -> None:
        self.shapes = {
            name: tuple(n if isinstance(n, int) else sizes[n] for n in shape) for name, shape in inputs.items()
        }
        self.offsets: dict[str, int] = {}  # in int32s
        self.size = 0  # likewise
        for name, shape in self.shapes.items():
            self.offsets[name] = self.size
            self.size += math.ceil(math.prod(shape) / _ALIGNED) * _ALIGNED

    def pack(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[size] int32 on the host: the inputs in their places, padded to the sizes."""
        packed = torch.zeros(self.size, dtype=torch.int32)
        for name, shape in self.shapes.items():
            place = packed[self.offsets[name] :][: math.prod(shape)].view(shape)
            if name in _PADDING:
                place.fill_(_PADDING[name])
            if name in inputs:
                place[tuple(slice(n) for n in inputs[name].shape)] = inputs[name]
        return packed
