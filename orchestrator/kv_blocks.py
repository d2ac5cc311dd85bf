"""Who owns which KV block, and what its content is. Pure bookkeeping: the KV itself lies in an engine."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Rows
from hashlib import blake2b

from saguaro.errors import CapacityError

_ROOT = b""  # the parent of a sequence's first block


class BlockPool:
    """The blocks of one engine's KV pool, counted by how many tables hold them.

    A block may be *published* under a digest of the tokens whose KV it holds, and is then shared by every table that
    looks the digest up. A published block that no table holds is free and stays cached until a table needs the space.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._blank = list(range(num_blocks))  # free and not published; a heap, so that tables tend to be consecutive
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and published, least recently used first
        self._published: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Published blocks, held or free."""
        return len(self._published)

    def blocks_for(self, columns: int) -> int:
        """Blocks that hold `columns` KV columns."""
        return -(-columns // self.block_size)

    def take(self, count: int) -> list[int]:
        """Blocks for one writer. Raises CapacityError, and takes nothing, when fewer than `count` are free."""
        if count > self.free_blocks:
            raise CapacityError(
                f"the KV pool has {self.free_blocks} of {self.num_blocks} blocks free and {count} are needed: "
                "lower the number of running sequences or raise kv_tokens"
            )
        blocks = [heapq.heappop(self._blank) if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def give(self, blocks: Rows[int]) -> None:
        """Let go of a table's blocks, in column order: of those that stay cached the last one is evicted first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._digest:
                self._idle[block] = None
            else:
                heapq.heappush(self._blank, block)

    def publish(self, block: int, digest: bytes) -> None:
        """Offer a block under its digest. If another one has the same content already, that one stays the answer."""
        if digest not in self._published:
            self._published[digest] = block
            self._digest[block] = digest

    def share(self, digest: bytes) -> int | None:
        """One more holder for the block published under this digest, or None. Nobody may write into it."""
        block = self._published.get(digest)
        if block is not None:
            self._holders[block] += 1
            self._idle.pop(block, None)
        return block

    def forget(self) -> None:
        """Publish nothing any more: the engine behind the pool has lost its KV."""
        for block in self._idle:
            heapq.heappush(self._blank, block)
        self._idle.clear()
        self._published.clear()
        self._digest.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._published[self._digest.pop(block)]
        return block


class BlockTable:
    """The blocks of one sequence in column order. Grows for a round, and is truncated to what was committed.

    Blocks published or adopted are never written again, because their columns hold committed tokens.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self.blocks: list[int] = []
        self._digests: list[bytes] = []  # of the leading blocks, as far as published or adopted

    @property
    def columns(self) -> int:
        """Columns there is room for."""
        return len(self.blocks) * self._block_size

    def can_grow(self, columns: int, beside: int = 0) -> bool:
        """Whether the pool has what `grow(columns)` would take, and `beside` blocks for others."""
        return self._missing(columns) + beside <= self._pool.free_blocks

    def grow(self, columns: int) -> None:
        """Make room for `columns` columns. Raises CapacityError and changes nothing when the pool is short."""
        if missing := self._missing(columns):
            self.blocks.extend(self._pool.take(missing))

    def stretch(self, columns: int) -> int:
        """Make room for `columns` columns, or as many as the pool has; returns how many of them there is room for."""
        if missing := self._missing(columns):
            self.blocks.extend(self._pool.take(min(missing, self._pool.free_blocks)))
        return min(columns, self.columns)

    def truncate(self, columns: int) -> None:
        """Give back the blocks after the one that holds the last of `columns` columns. 0 frees the whole table.

        Raises ValueError for a cut inside a published block, which others may be reading.
        """
        keep = -(-columns // self._block_size)
        if keep and columns < min(keep, len(self._digests)) * self._block_size:
            raise ValueError(f"cannot truncate to column {columns}: block {keep - 1} of the table is published")
        if keep >= len(self.blocks):
            return
        self._pool.give(self.blocks[keep:])
        del self.blocks[keep:]
        del self._digests[keep:]

    def publish(self, tokens: Rows[int], columns: int) -> None:
        """Offer the full blocks among the first `columns` columns, whose KV must be that of these very tokens."""
        for index in range(len(self._digests), columns // self._block_size):
            self._digests.append(self._block_digest(tokens, index))
            self._pool.publish(self.blocks[index], self._digests[-1])

    def adopt(self, tokens: Rows[int]) -> int:
        """Fill an empty table with the blocks that hold the longest cached prefix; returns its length in columns.

        The block of the last token is left out even if it is cached: that token must be computed, for its logits, and
        a shared block cannot be written.
        """
        for index in range((len(tokens) - 1) // self._block_size):
            digest = self._block_digest(tokens, index)
            block = self._pool.share(digest)
            if block is None:
                break
            self.blocks.append(block)
            self._digests.append(digest)
        return self.columns

    def _block_digest(self, tokens: Rows[int], index: int) -> bytes:
        """Of block `index`: its own tokens and, through its parent's digest, everything before them."""
        size = self._block_size
        parent = self._digests[index - 1] if index else _ROOT
        own = array("q", tokens[index * size : (index + 1) * size]).tobytes()
        return blake2b(parent + own, digest_size=32).digest()

    def _missing(self, columns: int) -> int:
        return max(0, -(-columns // self._block_size) - len(self.blocks))
