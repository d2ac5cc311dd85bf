"""A table of exact next-token probabilities as an engine: what the tests of everything above it run on.

The KV pool holds (token, position) instead of keys and values, and a row's context is rebuilt only from the slots that
its mask lets it see. A wrong block table, slot, position or mask therefore gives a wrong context or an error, never by
luck the right logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from saguaro.engines.base import ForwardBatch, ForwardOutput, slots_of
from saguaro.errors import EngineError
from saguaro.plugins.attention import visible_columns

Table = Callable[[tuple[int, ...]], Sequence[float | Fraction]]

_UNWRITTEN = -1


class ScriptedEngine:
    """`table(context)` gives the probability of each token id after the context; logits are log p in float64."""

    asynchronous = False

    def __init__(self, table: Table, vocab_size: int, max_model_len: int, block_size: int, num_blocks: int) -> None:
        self._table = table
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.logit_tolerance = 0.0
        # In numpy, which takes a fraction of torch's time for so few numbers.
        self._tokens = np.full(num_blocks * block_size, _UNWRITTEN)
        self._positions = np.full(num_blocks * block_size, _UNWRITTEN)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass. Raises EngineError for a row that does not see positions 0..n-1, once each."""
        self._check(batch)
        slots = batch.slots.numpy()
        self._tokens[slots] = batch.token_ids
        self._positions[slots] = batch.positions
        contexts = self._contexts(batch)
        rows = [self._log_probs(contexts[row]) for row in batch.logit_rows.tolist()]
        return ForwardOutput(torch.tensor(rows, dtype=torch.float64).view(len(rows), self.vocab_size))

    def _check(self, batch: ForwardBatch) -> None:
        for name, given, limit in (
            ("token id", batch.token_ids, self.vocab_size),
            ("position", batch.positions, self.max_model_len),
            ("slot", batch.slots, self.num_blocks * self.block_size),
        ):
            values = given.numpy()
            wrong = values[(values < 0) | (values >= limit)].tolist()
            if wrong:
                raise EngineError(f"the batch holds {name} {wrong[0]}; this engine's lie in 0..{limit - 1}.")
        if len(set(batch.slots.tolist())) != len(batch.slots):
            raise EngineError("two rows of the batch are written to the same KV slot. Their block tables overlap.")

    def _contexts(self, batch: ForwardBatch) -> list[tuple[int, ...]]:
        """The tokens each row sees, in the order of their positions; the row's own token is the last."""
        contexts = []
        mask = batch.positions if batch.fan_out is None else batch.fan_out
        row = 0
        for count, table in zip(batch.rows, batch.block_tables, strict=True):
            columns = torch.arange(len(table) * self.block_size)
            slots = np.array(slots_of(table, range(len(columns)), self.block_size), dtype=np.int64)
            for seen in visible_columns(mask, torch.arange(row, row + count)[:, None], columns).numpy():
                contexts.append(self._context(batch, row, slots[seen]))
                row += 1
        return contexts

    def _context(self, batch: ForwardBatch, row: int, seen: NDArray[np.int64]) -> tuple[int, ...]:
        seen = seen[self._positions[seen].argsort()]
        positions = self._positions[seen].tolist()
        last = int(batch.positions[row])
        if positions != list(range(last + 1)) or seen[-1] != batch.slots[row]:
            raise EngineError(
                f"row {row} of the batch should see positions 0..{last} once each, the last in its own slot "
                f"{int(batch.slots[row])}; it sees positions {positions} in slots {seen.tolist()} "
                f"({_UNWRITTEN}: never written). A block table, slot, position or mask is wrong."
            )
        return tuple(self._tokens[seen].tolist())

    def _log_probs(self, context: tuple[int, ...]) -> list[float]:
        probs = self._table(context)
        if len(probs) != self.vocab_size or min(probs) < 0 or not math.isclose(sum(probs), 1):
            raise EngineError(
                f"the table gives {list(probs)} after {list(context)}, which are not {self.vocab_size} probabilities "
                "that sum to 1."
            )
        return [math.log(p) if p > 0 else -math.inf for p in probs]


def markov_table(rows: Sequence[Sequence[float | Fraction]]) -> Table:
    """The table in which only the last token matters: `rows[token]` are the probabilities after it."""
    weights = [[float(p) for p in row] for row in rows]
    return lambda context: weights[context[-1]]
