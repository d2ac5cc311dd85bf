"""Who owns which KV block. Pure bookkeeping: the KV itself lives in an engine, addressed through these tables."""

from __future__ import annotations

import heapq

from saguaro.errors import CapacityError


class BlockPool:
    """The blocks of one engine's KV pool. Lowest number first, so that a sequence's blocks tend to be consecutive."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # a heap

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, columns: int) -> int:
        """Blocks that hold `columns` KV columns."""
        return -(-columns // self.block_size)

    def take(self, count: int) -> list[int]:
        """Raises CapacityError, and takes nothing, when fewer than `count` blocks are free."""
        if count > len(self._free):
            raise CapacityError(
                f"the KV pool has {len(self._free)} of {self.num_blocks} blocks free and {count} are needed: "
                "lower the number of running sequences or raise kv_tokens"
            )
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


class BlockTable:
    """The blocks of one sequence in column order. Grows for a round, and is truncated to what was committed."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []

    def can_grow(self, columns: int) -> bool:
        """Whether the pool has what `grow(columns)` would take."""
        return self._missing(columns) <= self._pool.free_blocks

    def grow(self, columns: int) -> None:
        """Make room for `columns` columns. Raises CapacityError and changes nothing when the pool is short."""
        self.blocks.extend(self._pool.take(self._missing(columns)))

    def truncate(self, columns: int) -> None:
        """Give back the blocks after the one that holds the last of `columns` columns. 0 frees the whole table."""
        keep = self._pool.blocks_for(columns)
        self._pool.give(self.blocks[keep:])
        del self.blocks[keep:]

    def _missing(self, columns: int) -> int:
        return max(0, self._pool.blocks_for(columns) - len(self.blocks))
