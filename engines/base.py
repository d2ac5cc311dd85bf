"""What an engine is: one model on one process group, run over flat batches of rows with a paged KV pool.

An engine executes. It knows nothing of requests, sampling or speculation: block tables and positions come from outside,
and it keeps no state but its weights and the KV pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


def slots_of(table: Sequence[int], columns: Sequence[int], block_size: int) -> list[int]:
    """KV slot of each column of a block table."""
    return [table[column // block_size] * block_size + column % block_size for column in columns]


def causal_batch(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    logit_counts: Sequence[int],
    block_size: int,
) -> ForwardBatch:
    """Rows that continue each sequence at position `starts[s]`; logits for its last `logit_counts[s]` rows."""
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for ids, start, table, wanted in zip(tokens, starts, tables, logit_counts, strict=True):
        columns = range(start, start + len(ids))
        positions.extend(columns)
        slots.extend(slots_of(table, columns, block_size))
        logit_rows.extend(range(len(positions) - wanted, len(positions)))
    return ForwardBatch(
        token_ids=torch.tensor([token for ids in tokens for token in ids], dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        rows=tuple(len(ids) for ids in tokens),
        block_tables=tuple(tuple(table) for table in tables),
        fan_out=None,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )


class FanOutSteps:
    """The steps of branch decoding: row i of a sequence feeds branch i's token, depth after depth.

    `prefixes[s]` counts the columns before the trunk. What the steps have in common is worked out once, in numpy, which
    takes a tenth of torch's time for so little.
    """

    def __init__(
        self, fan_outs: Sequence[FanOut], prefixes: Sequence[int], tables: Sequence[Sequence[int]], block_size: int
    ) -> None:
        self._rows = tuple(fan_out.branches for fan_out in fan_outs)
        self._tables = tuple(tuple(table) for table in tables)
        self._block_size = block_size
        prefix, trunk, branches = np.array([prefixes, [len(fan_out.counts) for fan_out in fan_outs], self._rows])
        sequence = np.repeat(np.arange(len(fan_outs)), self._rows)
        branch = np.concatenate([np.arange(count) for count in self._rows])
        # Of each row: its column at depth 0, how far on that of the next depth is, and where its block table begins.
        self._column = (prefix + trunk)[sequence] + branch
        self._stride = branches[sequence]
        self._table = np.cumsum([0, *map(len, self._tables)])[:-1][sequence]
        self._blocks = np.array([block for table in self._tables for block in table])
        self._mask = FanOutMask(
            prefix=torch.from_numpy(prefix),
            trunk=torch.from_numpy(trunk),
            branches=torch.from_numpy(branches),
            fork=torch.tensor([fork for fan_out in fan_outs for fork in fan_out.forks], dtype=torch.int64),
            branch=torch.from_numpy(branch),
            depth=0,
        )
        self._every_row = torch.arange(len(branch))

    def batch(self, tokens: Tensor, depth: int) -> ForwardBatch:
        """The step at `depth` with the rows' tokens [N]. Every row's logits are wanted."""
        mask = self._mask.at(depth)
        block, offset = np.divmod(self._column + depth * self._stride, self._block_size)
        return ForwardBatch(
            token_ids=tokens,
            positions=mask.positions,
            slots=torch.from_numpy(self._blocks[self._table + block] * self._block_size + offset),
            rows=self._rows,
            block_tables=self._tables,
            fan_out=mask,
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
    return FanOutSteps(fan_outs, prefixes, tables, block_size).batch(tokens, depth)
