"""How the budget of branches is spread over the acceptance lengths of a trunk. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from saguaro.orchestrator.analysis import outcome_weights
from saguaro.plugins.fan_out import FanOut

Shape = Callable[[int, int], FanOut]  # (budget, lookahead) -> list


@dataclass(frozen=True)
class Situation:
    """What a list depends on besides budget and lookahead."""

    hit: bool = True  # the speculation under verification had been prepared; otherwise the backup drafted it
    temperature: float = 0.0


class FanOutPolicy(Protocol):
    def __call__(self, budget: int, lookahead: int, situation: Situation) -> FanOut:
        """The list over a trunk of `lookahead` draft tokens: ΣF_k is at most `budget`, and 0 for plain speculation."""
        ...


@dataclass(frozen=True)
class Lists:
    """A policy that never changes: one shape after a hit, one after a miss."""

    after_hit: Shape
    after_miss: Shape | None = None  # None: the same

    def __call__(self, budget: int, lookahead: int, situation: Situation) -> FanOut:
        shape = self.after_hit if situation.hit or self.after_miss is None else self.after_miss
        return shape(budget, lookahead)


class Curve(Protocol):
    def hits(self, most: int) -> tuple[float, ...]:
        """Probability that the bonus token is among the best F guesses, for F = 0 … `most`."""
        ...


@dataclass(frozen=True)
class MissCurve:
    """P(the bonus token is not among F guesses) = scale * F^-exponent, and 1 for F = 0.

    The paper's law is `scale` 1, which says that a single guess never hits; measured ones lie well below. The shape of
    the best list (Theorem 12) does not depend on the scale.
    """

    scale: float
    exponent: float

    def hit(self, guesses: int) -> float:
        return 1 - min(1.0, self.scale * guesses**-self.exponent) if guesses else 0.0

    def hits(self, most: int) -> tuple[float, ...]:
        """Hit rates of 0 … `most` guesses."""
        return tuple(self.hit(guesses) for guesses in range(most + 1))


@dataclass(frozen=True)
class AcceptedCurve:
    """The law of the row where everything was accepted, from that of the rows where a token was rejected.

    The first guess there is what the draft would have proposed next: as often right as any of its tokens. If it is
    wrong it is as good as rejected, and the other guesses do what they do after a rejection.
    """

    acceptance: float  # of a token of the draft
    rejected: MissCurve

    def hits(self, most: int) -> tuple[float, ...]:
        return (0.0, *(1 - (1 - self.acceptance) * (1 - hit) for hit in self.rejected.hits(most)[:most]))


def uniform(budget: int, lookahead: int) -> FanOut:
    """`budget` guesses spread evenly over rows 0..`lookahead`; what does not divide goes to the last rows.

    The last rows first, because row K (everything accepted) is the likeliest single outcome of a good draft.
    """
    share, rest = divmod(budget, lookahead + 1)
    return FanOut(tuple(share + (k > lookahead - rest) for k in range(lookahead + 1)))


def fixed(counts: tuple[int, ...], lookahead: int) -> FanOut:
    """A hand-written list (F_0, ..., F_K), fitted to a trunk of `lookahead` tokens.

    A shorter trunk keeps the list's tail: its last row is still the row where everything was accepted. A longer one
    repeats F_0 in front.
    """
    padding = max(0, lookahead + 1 - len(counts))
    return FanOut((counts[:1] * padding + counts)[-(lookahead + 1) :])


@lru_cache(maxsize=512)
def geometric(budget: int, lookahead: int, acceptance: float, rejected: Curve, accepted: Curve) -> FanOut:
    """The best list when every token is accepted with one probability: Theorem 12 in whole numbers.

    The theorem has one curve for all rows. Here the last row (everything `accepted`) has its own, as in Theorem 18.
    """
    hits = row_hits(budget, lookahead, rejected, accepted)
    return allocate(budget, outcome_weights([acceptance] * lookahead), hits)


def row_hits(most: int, lookahead: int, rejected: Curve, accepted: Curve) -> list[tuple[float, ...]]:
    """Hit rates of 0 … `most` guesses for each acceptance length 0 … `lookahead`."""
    return [rejected.hits(most)] * lookahead + [accepted.hits(most)]


def allocate(budget: int, weights: Sequence[float], hits: Sequence[Sequence[float]]) -> FanOut:
    """The list of at most `budget` guesses with the highest hit rate Σ_k weights[k] * hits[k][F_k].

    `weights[k]` is the probability of k accepted tokens, `hits[k]` the measured or modelled hit rates of 0 … `budget`
    guesses there, of any shape. Exact, by dynamic programming over rows: rounding Theorem 12, or giving each guess to
    the row where it gains most, can be far off, because the first guess may gain less than the second. No guess is
    spent where it gains nothing.
    """
    best = np.zeros(budget + 1)  # of the rows so far, by what they may spend
    chosen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    left = np.arange(budget + 1)[:, None] - np.arange(budget + 1)  # [spent, F]
    for weight, curve in zip(weights, hits, strict=True):
        gain = weight * np.asarray(curve[: budget + 1], dtype=np.float64)
        totals = np.where(left >= 0, best[np.maximum(left, 0)] + gain, -np.inf)
        chosen.append(totals.argmax(1))  # the first of equals: fewest guesses here, more further back
        best = totals.max(1)
    counts: list[int] = []
    for choice in reversed(chosen):
        counts.append(int(choice[budget]))
        budget -= counts[-1]
    return FanOut(tuple(reversed(counts)))


def predicted_hit_rate(fan_out: FanOut, weights: Sequence[float], hits: Sequence[Sequence[float]]) -> float:
    """What `allocate` maximises, for a given list."""
    return sum(weight * curve[count] for weight, curve, count in zip(weights, hits, fan_out.counts, strict=True))
