"""What a drafter is: something that answers hypothetical outcomes.

Filling the speculation cache is `draft` over predicted outcomes, a miss is `draft` over the one that happened. A
drafter says how every token was drawn, so that verification has one path and stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.types import Outcome, Speculation
from saguaro.plugins.fan_out import FanOut


@dataclass(frozen=True)
class Trunk:
    """What outcomes fork from: the token at column `prefix` and the draft tokens after it.

    An outcome (k, t*) continues it after its first k draft tokens.
    """

    row: DraftRow
    prefix: int
    draft_tokens: tuple[int, ...]
    happened: bool = False  # what is drafted answers a miss, not what may come

    @staticmethod
    def under_verification(row: DraftRow, speculation: Speculation) -> Trunk:
        """The trunk the target verifies now: its outcome is still open."""
        return Trunk(row, row.length - 1, speculation.tokens)

    @staticmethod
    def decided(row: DraftRow) -> Trunk:
        """All that is known before the row's bonus token: its outcome (0, t*) has just happened."""
        return Trunk(row, row.length - 2, (), happened=True)


@dataclass(frozen=True)
class Guess:
    """An outcome to draft for, and how likely it is as far as the drafter can say. 1: it has happened, or it cannot."""

    outcome: Outcome
    probability: float = 1.0


def never() -> bool:
    """Nobody waits."""
    return False


class Drafter(Protocol):
    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Make the draft's state valid for all but the last token of each row."""
        ...

    def predict(self, trunks: Sequence[Trunk], fan_outs: Sequence[FanOut]) -> list[list[Guess]]:
        """The likeliest outcomes of each trunk: F_k guesses, or fewer if it has no more, for every acceptance length k,
        in order of k, best first. A drafter that says how likely they are may spread the ΣF_k guesses otherwise.

        The token sent for verification at row k is never a guess there: it cannot be the bonus token (paper, 4.1.1).
        """
        ...

    def draft(
        self, trunks: Sequence[Trunk], guesses: Sequence[Sequence[Guess]], enough: Callable[[], bool] = never
    ) -> list[list[Speculation]]:
        """A speculation of at most `row.lookahead` tokens for every guess (those of a trunk in order of k).

        `enough` is asked between two tokens: somebody waits now. A drafter may then leave it at what it has.
        """
        ...
