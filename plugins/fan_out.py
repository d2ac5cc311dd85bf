"""The fan-out, stated once; its attention mask is in `fan_out_mask`.

A *trunk* is the K+1 tokens under verification. For every acceptance length k a fan-out guesses F_k bonus tokens; each
guess starts a *branch*, forked at trunk row k. A sequence's KV columns are laid out as

    prefix (P committed tokens) | trunk (K+1) | depth 0: one column per branch | depth 1 | ...

so that two integers per row, its fork and its branch, say everything about what it may see. Plain Python: whoever
reads a deployment needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class FanOut:
    """How many bonus tokens are guessed for each acceptance length: counts = (F_0, ..., F_K)."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or any(count < 0 for count in self.counts):
            raise ValueError(f"a fan-out needs K+1 counts of 0 or more, got {self.counts}")

    @property
    def lookahead(self) -> int:
        """K: the number of draft tokens in the trunk this fan-out is laid over."""
        return len(self.counts) - 1

    @cached_property
    def forks(self) -> tuple[int, ...]:
        """Fork row of each branch; branches are numbered by fork, then by rank of the guess."""
        return tuple(k for k, count in enumerate(self.counts) for _ in range(count))

    @property
    def branches(self) -> int:
        """ΣF_k."""
        return len(self.forks)
