"""The attention mask of a fan-out (see `fan_out`), stated once: no mask is stored, it is the predicate `visible`.

This module knows nothing of how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class FanOutMask:
    """What each row of one branch-decoding step sees, for a batch of S sequences and N rows.

    Rows are grouped by sequence, each for one of its branches; a branch that grows no more has none. At step `depth`
    the branch of a row already has `depth` own tokens in the KV pool and writes one more.
    """

    prefix: Tensor  # [S] committed tokens before the trunk
    trunk: Tensor  # [S] trunk rows, K+1
    branches: Tensor  # [S] ΣF_k: columns of a depth
    rows: Tensor  # [S] of these that have a row
    fork: Tensor  # [N] fork row of the branch
    branch: Tensor  # [N] number of the branch within its sequence
    depth: int

    def at(self, depth: int) -> FanOutMask:
        """The mask of the same rows at another depth. What does not depend on it is worked out once for all."""
        mask = replace(self, depth=depth)
        vars(mask).update(sequence=self.sequence, context=self.context)
        return mask

    @cached_property
    def sequence(self) -> Tensor:
        """[N] sequence each row belongs to."""
        return torch.arange(len(self.rows), device=self.rows.device).repeat_interleave(self.rows)

    @cached_property
    def context(self) -> Tensor:
        """[N] shared columns a row sees: the prefix and the trunk up to its fork."""
        return self.prefix[self.sequence] + self.fork + 1

    @property
    def positions(self) -> Tensor:
        """[N] absolute token position (RoPE), which has nothing to do with the column."""
        return self.context + self.depth

    def own_columns(self, depth: int | Tensor) -> Tensor:
        """[N] column of each row's own token at the given depth; [D, N] for depths [D, 1]."""
        sequence = self.sequence
        return self.prefix[sequence] + self.trunk[sequence] + depth * self.branches[sequence] + self.branch

    @cached_property
    def path(self) -> Tensor:
        """[N, depth+1] columns of each row's own tokens, oldest first."""
        return self.own_columns(torch.arange(self.depth + 1, device=self.fork.device)[:, None]).T

    def visible(self, row: Tensor, column: Tensor, window: int = 0) -> Tensor:
        """The mask: whether `row` (0..N-1) sees `column` of its sequence's block table. Broadcasts.

        With a sliding `window`, a row at position p sees positions above p - window only; 0 is none.
        Golden case (paper, figure 8): prefix P, K=3, F=4, depth 2: a row forked at k sees P + (k+1) + 3 columns.
        """
        sequence = self.sequence[row]
        offset = column - self.prefix[sequence] - self.trunk[sequence]
        branches = self.branches[sequence]
        age = offset // branches
        own = (offset >= 0) & (offset % branches == self.branch[row]) & (age <= self.depth)
        seen = (column < self.context[row]) | own
        if window:
            position = torch.where(offset >= 0, self.context[row] + age, column)
            seen &= position > self.positions[row] - window
        return seen

    def dense(self, columns: int, window: int = 0) -> Tensor:
        """[N, columns] bool: the mask written out, for tests and for engines that can only take one."""
        return self.visible(torch.arange(len(self.fork))[:, None], torch.arange(columns), window)

    def packed(self, columns: int, window: int = 0) -> Tensor:
        """[N, ceil(columns / 32)] int32: the mask in bits. Column c is bit c % 32 of word c // 32, lowest bit first."""
        dense = self.dense(columns, window)
        padded = torch.nn.functional.pad(dense, (0, -columns % 32))
        words = padded.view(len(dense), -(-columns // 32), 32).long()
        return (words << torch.arange(32)).sum(-1).to(torch.int32)
