"""Which token lies in each KV slot: how whoever drafts knows the text of a sequence it is only sent the end of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saguaro.engines.base import slots_of
from saguaro.orchestrator.protocol import DraftRow

Text = NDArray[np.int64]


class TokenMemory:
    """Follows the draft's KV pool: a slot whose KV is valid has its token here. Shared by all drafters."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_in_slot = np.zeros(num_blocks * block_size, dtype=np.int64)

    def write(self, slots: ArrayLike, tokens: ArrayLike) -> None:
        self._token_in_slot[slots] = tokens

    def read(self, table: Sequence[int], count: int) -> Text:
        """[count] The first tokens that a block table leads to."""
        blocks = np.asarray(table[: -(-count // self._block_size)], dtype=np.int64)
        return self._token_in_slot.reshape(-1, self._block_size)[blocks].ravel()[:count]

    def store(self, row: DraftRow, tokens: Sequence[int]) -> None:
        """Write a sequence's tokens from `row.start` on."""
        self.write(slots_of(row.table, range(row.start, row.start + len(tokens)), self._block_size), tokens)

    def text(self, row: DraftRow) -> Text:
        """Every committed token of a row, those it was just sent included."""
        return np.append(self.read(row.table, row.start), row.tokens)
