"""What an engine is: one model on one process group, run over flat batches of rows with a paged KV pool.

An engine executes. It knows nothing of requests, sampling or speculation: block tables and positions come from outside,
and it keeps no state but its weights and the KV pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from saguaro.errors import EngineError
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.fan_out_mask import FanOutMask

# Logits of one context in forwards of different shape: from rounding in the activations' dtype.
LOGIT_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class ForwardBatch:
    """N rows of S sequences, rows of one sequence adjacent.

    Causal (`fan_out` is None): the row at position i sees columns 0..i of its sequence. Under a fan-out a row sees
    what `FanOutMask.visible` says. Each row's KV is written to its slot before anything is read.
    """

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, absolute (RoPE)
    slots: Tensor  # [N] int64, where the row's KV is written: block * block_size + offset
    rows: tuple[int, ...]  # [S] rows of each sequence
    block_tables: tuple[tuple[int, ...], ...]  # [S] blocks of each sequence, in column order
    fan_out: FanOutMask | None
    logit_rows: Tensor  # [L] int64, rows whose logits are wanted


@dataclass(frozen=True)
class ForwardOutput:
    """Logits of the wanted rows, over the token ids of the tokenizer (padding of the vocabulary is cut off)."""

    logits: Tensor  # [L, vocab_size] float32 (float64 for a float64 engine)


class Sizes(Protocol):
    """What a request and a deployment have to fit."""

    @property
    def vocab_size(self) -> int:
        """Token ids the tokenizer knows; ids at or above it are never produced."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        ...

    @property
    def block_size(self) -> int:
        """KV slots in a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool, which the running sequences share."""
        ...


class Engine(Sizes, Protocol):
    """One model. Raises EngineError when it cannot run, CapacityError when the KV pool does not fit."""

    @property
    def logit_tolerance(self) -> float:
        """How far one context's logits may differ between forwards of different shape.

        Two tokens closer than this are a near-tie: which one is best may depend on what else is in the batch.
        """
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether `forward` returns as soon as a device is at work, and reading the logits is what waits for it."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass."""
        ...


def check_positions(batch: ForwardBatch, max_model_len: int) -> None:
    """Raises EngineError for a row behind the longest context."""
    last = int(batch.positions.max())
    if last >= max_model_len:
        raise EngineError(
            f"a row of the batch is at position {last}, but the engine's contexts end at {max_model_len} tokens. "
            "Shorten the sequence, or build the engine with a larger max_model_len."
        )


def slots_of(table: Sequence[int], columns: range, block_size: int) -> list[int]:
    """KV slot of each of neighbouring columns of a block table, found block by block."""
    slots: list[int] = []
    while len(slots) < len(columns):
        block, offset = divmod(columns[len(slots)], block_size)
        first = table[block] * block_size + offset
        slots += range(first, first + min(block_size - offset, len(columns) - len(slots)))
    return slots


def causal_batch(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    logit_counts: Sequence[int],
    block_size: int,
) -> ForwardBatch:
    """Rows that continue each sequence at position `starts[s]`; logits for its last `logit_counts[s]` rows."""
    return CausalRows(tuple(map(len, tokens)), starts, tables, logit_counts, block_size).batch(tokens)


class CausalRows:
    """A `causal_batch` but for its tokens, of which sequence s has `rows[s]`."""

    def __init__(
        self,
        rows: tuple[int, ...],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        logit_counts: Sequence[int],
        block_size: int,
    ) -> None:
        columns = [range(start, start + count) for start, count in zip(starts, rows, strict=True)]
        slots = (slots_of(table, those, block_size) for table, those in zip(tables, columns, strict=True))
        wanted = (range(end - count, end) for end, count in zip(accumulate(rows), logit_counts, strict=True))
        self.rows = rows
        self._positions = _int64(chain.from_iterable(columns))
        self._slots = _int64(chain.from_iterable(slots))
        self._tables = tuple(map(tuple, tables))
        self._logit_rows = _int64(chain.from_iterable(wanted))

    def batch(self, tokens: Sequence[Sequence[int]]) -> ForwardBatch:
        return ForwardBatch(
            token_ids=_int64(chain.from_iterable(tokens)),
            positions=self._positions,
            slots=self._slots,
            rows=self.rows,
            block_tables=self._tables,
            fan_out=None,
            logit_rows=self._logit_rows,
        )


def _int64(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, np.int64))  # several times as fast as torch.tensor


class FanOutSteps:
    """The steps of branch decoding at `depths`: a row feeds the last token of its branch, depth after depth.

    `prefixes[s]` counts the columns before the trunk. All but the tokens is worked out once for all depths, in numpy,
    which takes a tenth of torch's time for so little. Raises EngineError for a block table that is too short.
    """

    def __init__(
        self,
        fan_outs: Sequence[FanOut],
        prefixes: Sequence[int],
        tables: Sequence[Sequence[int]],
        block_size: int,
        depths: range,
    ) -> None:
        self._rows = tuple(fan_out.branches for fan_out in fan_outs)
        self._tables = tuple(tuple(table) for table in tables)
        self._depths = depths
        prefix, trunk, branches = np.array([prefixes, [len(fan_out.counts) for fan_out in fan_outs], self._rows])
        sequence = np.repeat(np.arange(len(fan_outs)), self._rows)
        branch = np.concatenate([np.arange(count) for count in self._rows])
        fork = np.concatenate([np.repeat(np.arange(len(fan_out.counts)), fan_out.counts) for fan_out in fan_outs])
        depth = np.array(depths)[:, None]
        columns = (prefix + trunk)[sequence] + branch + depth * branches[sequence]  # [depths, N]
        block, offset = np.divmod(columns, block_size)
        lengths = np.array([len(table) for table in self._tables])
        if (block >= lengths[sequence]).any():
            raise EngineError(f"a block table is too short for {int(columns.max()) + 1} columns of trunk and branches")
        blocks = np.array([block for table in self._tables for block in table], dtype=np.int64)
        first = np.cumsum(lengths) - lengths  # of each table among them
        slots = blocks[first[sequence] + block] * block_size + offset
        context = prefix[sequence] + fork + 1
        # One call each instead of one for each depth.
        self._slots = torch.from_numpy(slots).unbind()
        self._positions = torch.from_numpy(context + depth).unbind()
        tensors = {
            "prefix": prefix,
            "trunk": trunk,
            "branches": branches,
            "rows": branches,
            "fork": fork,
            "branch": branch,
        }
        self._mask = FanOutMask(**{name: torch.from_numpy(each) for name, each in tensors.items()}, depth=depths.start)
        vars(self._mask).update(sequence=torch.from_numpy(sequence), context=torch.from_numpy(context))
        self._every_row = torch.arange(len(branch))

    def keep(self, rows: Sequence[int]) -> FanOutSteps:
        """The same steps for some of the rows, in rising order: the columns of the other branches stay as they are."""
        kept, mask = copy(self), self._mask
        index = torch.tensor(rows, dtype=torch.int64)
        counts = mask.sequence[index].bincount(minlength=len(self._rows))
        kept._rows = tuple(counts.tolist())
        kept._slots = torch.stack(self._slots)[:, index].unbind()
        kept._positions = torch.stack(self._positions)[:, index].unbind()
        kept._mask = replace(mask, rows=counts, fork=mask.fork[index], branch=mask.branch[index])
        vars(kept._mask).update(sequence=mask.sequence[index], context=mask.context[index])
        kept._every_row = torch.arange(len(index))
        return kept

    def batch(self, tokens: Tensor, depth: int) -> ForwardBatch:
        """The step at `depth` with the rows' tokens [N]. Every row's logits are wanted."""
        step = depth - self._depths.start
        return ForwardBatch(
            token_ids=tokens,
            positions=self._positions[step],
            slots=self._slots[step],
            rows=self._rows,
            block_tables=self._tables,
            fan_out=self._mask.at(depth),
            logit_rows=self._every_row,
        )


def fan_out_batch(
    tokens: Tensor,
    fan_outs: Sequence[FanOut],
    prefixes: Sequence[int],
    tables: Sequence[Sequence[int]],
    depth: int,
    block_size: int,
) -> ForwardBatch:
    """A single one of the `FanOutSteps`."""
    return FanOutSteps(fan_outs, prefixes, tables, block_size, range(depth, depth + 1)).batch(tokens, depth)
