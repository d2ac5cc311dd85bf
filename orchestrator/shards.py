"""Which replica of the draft works on what. Pure: each comes to the same conclusion from what all of them know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from saguaro.orchestrator.types import Outcome


def owners(guesses: Sequence[Outcome], present: Sequence[int]) -> list[int]:
    """The replica, of those that are there, that prepares each of the guesses, which are best first for each
    acceptance length.

    Guess j for acceptance length k belongs to the (j + k) mod n-th of n. That is even for lists of the usual shapes,
    and depends on the place of a guess alone: replicas whose lists differ in length, because one has been started later
    and has measured less, still agree on whose a guess is.
    """
    ranks: Counter[int] = Counter()
    found: list[int] = []
    for guess in guesses:
        found.append(present[(guess.accepted + ranks[guess.accepted]) % len(present)])
        ranks[guess.accepted] += 1
    return found


def largest(budget: int, lookahead: int, present: int) -> int:
    """The most branches that one of so many replicas may have to prepare: of each F_k its part, rounded up."""
    return min(budget, (budget + (lookahead + 1) * (present - 1)) // present)


def home(sequence: int, present: Collection[int], replicas: int) -> int:
    """The replica that drafts for a sequence when nothing was prepared: the same as long as it is present."""
    return next(replica for i in range(replicas) if (replica := (sequence + i) % replicas) in present)
