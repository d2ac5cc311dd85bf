"""What past rounds say about the next: acceptance, how far down the guesses the bonus token lies, hit rates.

Everything is counted with decay and kept apart by temperature band and by whether the speculation had been prepared (a
hit) or came from the backup (a miss). The same history always gives the same estimates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saguaro.orchestrator.analysis import outcome_weights, overall_hit_rate
from saguaro.orchestrator.fan_out_policy import AcceptedCurve, Curve, MissCurve, Situation
from saguaro.orchestrator.protocol import CurveFit
from saguaro.orchestrator.types import Outcome
from saguaro.plugins.fan_out import FanOut

BANDS = (0.0, 0.5, 1.0)  # upper ends of the temperature bands; one more lies above
DECAY = 0.999  # of everything counted, with each round of a sequence: about the last 1000 count
_PRIOR_ROUNDS = 10.0  # what the prior weighs against what is counted


def band(temperature: float) -> int:
    return bisect_left(BANDS, temperature)


@dataclass(frozen=True)
class Prior:
    """What is assumed as long as nothing is measured."""

    acceptance: float = 0.8
    acceptance_after_miss: float = 0.8
    rejected: MissCurve = MissCurve(0.4, 0.6)

    @property
    def accepted(self) -> AcceptedCurve:
        return AcceptedCurve(self.acceptance, self.rejected)


@dataclass(frozen=True)
class Fit:
    """A power law through a measured miss curve: least squares in log-log, weighted by what each point rests on."""

    curve: MissCurve
    r_squared: float
    points: int  # fan-outs F it is laid through


class Counts:
    """Decayed successes among decayed trials, for each index."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._trials: list[float] = []  # plain lists: every sequence adds to some in every round, and they are short
        self._successes: list[float] = []

    @property
    def trials(self) -> NDArray[np.float64]:
        return np.array(self._trials)

    @property
    def successes(self) -> NDArray[np.float64]:
        return np.array(self._successes)

    def add(self, trials: int, success: int | None) -> None:
        """One trial for each of the indices below `trials`; at most one of them succeeded."""
        self.add_each(trials, () if success is None else (success,))

    def add_each(self, trials: int, successes: Sequence[int]) -> None:
        decay = self._decay
        more = [0.0] * (trials - len(self._trials))
        self._trials = [count * decay for count in self._trials] + more
        self._successes = [count * decay for count in self._successes] + more
        for index in range(trials):
            self._trials[index] += 1
        for index in successes:
            self._successes[index] += 1

    def rates(self, priors: Sequence[float]) -> list[float]:
        """Success rate at each index, drawn towards `priors` as far as little was counted."""
        known = len(self._trials)
        return [
            (self._successes[i] + _PRIOR_ROUNDS * prior) / (self._trials[i] + _PRIOR_ROUNDS) if i < known else prior
            for i, prior in enumerate(priors)
        ]


class GuessCurve:
    """P(the bonus token is not among the best F guesses), from ranks that were seen only down to the guesses made.

    A token outside a list of F is known to rank below F and no more (the data is censored), so the curve is the product
    over ranks j <= F of 1 - P(rank j | not above j): the Kaplan-Meier estimate.
    """

    def __init__(self, decay: float) -> None:
        self._ranks = Counts(decay)

    def observe(self, guesses: int, rank: int | None) -> None:
        """`rank` of the bonus token among `guesses`, from 0; None when it is not among them."""
        if guesses:
            self._ranks.add(guesses if rank is None else rank + 1, rank)

    @property
    def rounds(self) -> float:
        """What the curve rests on, with decay."""
        return float(self._ranks.trials.max(initial=0.0))

    def hits(self, most: int, prior: Curve) -> tuple[float, ...]:
        """Hit rates of 0 … `most` guesses; where little was seen, the fit goes on, or the prior."""
        fit = self.fit()
        curve = fit.curve if fit else prior
        misses = [1 - hit for hit in curve.hits(most)]
        hazards = [1 - now / before if before > 0 else 0.0 for before, now in zip(misses, misses[1:])]
        surviving = np.cumprod([1 - rate for rate in self._ranks.rates(hazards)])
        return (0.0, *(1 - surviving).tolist())

    def fit(self) -> Fit | None:
        """None until two fan-outs rest on enough rounds, and while nothing was missed at all."""
        trials = self._ranks.trials
        enough = int(np.argmin(np.append(trials >= 2 * _PRIOR_ROUNDS, False)))  # ranks are seen from the top down
        if enough == 0:
            return None
        misses = np.cumprod(1 - self._ranks.successes[:enough] / trials[:enough])
        enough = int(np.count_nonzero(misses > 1e-9))
        if enough < 2:
            return None
        return power_law(range(1, enough + 1), misses[:enough].tolist(), trials[:enough].tolist())


def power_law(guesses: Sequence[int], misses: Sequence[float], weights: Sequence[float]) -> Fit:
    """c F^-r through at least two points, all of which are above 0."""
    x, y, w = np.log(guesses), np.log(misses), np.asarray(weights)
    mean_x, mean_y = np.average(x, weights=w), np.average(y, weights=w)
    slope = float(w @ ((x - mean_x) * (y - mean_y)) / (w @ (x - mean_x) ** 2))
    scale = math.exp(mean_y - slope * mean_x)
    spread = float(w @ (y - mean_y) ** 2)
    rest = float(w @ (y - mean_y - slope * (x - mean_x)) ** 2)
    curve = MissCurve(min(1.0, scale), max(0.0, -slope))
    return Fit(curve, 1 - rest / spread if spread > 0 else 1.0, len(guesses))


class Estimate:
    """Of one temperature band, after a hit or after a miss."""

    def __init__(self, prior: Prior, hit: bool, decay: float = DECAY) -> None:
        self._prior = prior
        self._acceptance = prior.acceptance if hit else prior.acceptance_after_miss
        self._positions = Counts(decay)
        self._lookups = Counts(decay)
        self._decay = decay
        self._tokens = 0.0
        self.observed = 0  # rounds, without decay
        self.rounds = 0.0  # with decay
        self.after_rejection = GuessCurve(decay)
        self.after_acceptance = GuessCurve(decay)  # of the whole speculation

    def observe(self, lookahead: int, outcome: Outcome, guesses: FanOut, rank: int | None) -> None:
        """A verified speculation of `lookahead` tokens, the guesses that had been made, and the bonus token's rank."""
        reached = min(outcome.accepted + 1, lookahead)
        self._positions.add_each(reached, range(outcome.accepted))
        curve = self.after_acceptance if outcome.accepted == lookahead else self.after_rejection
        curve.observe(guesses.counts[outcome.accepted], rank)
        if guesses.branches:
            self._lookups.add(1, None if rank is None else 0)
        self._tokens = self._tokens * self._decay + outcome.accepted + 1
        self.rounds = self.rounds * self._decay + 1
        self.observed += 1

    def acceptance(self, lookahead: int) -> tuple[float, ...]:
        """Of each of the first `lookahead` positions, given that the ones before were accepted."""
        return tuple(self._positions.rates([self._acceptance] * lookahead))

    @property
    def hit_rate(self) -> float | None:
        """None while nothing has been looked up."""
        return float(self._lookups.successes[0] / self._lookups.trials[0]) if len(self._lookups.trials) else None

    @property
    def tokens_per_round(self) -> float | None:
        """E_hit after a hit, E_miss after a miss."""
        return self._tokens / self.rounds if self.rounds else None

    def weights(self, lookahead: int) -> tuple[float, ...]:
        """P(k accepted), k = 0 … lookahead."""
        return outcome_weights(self.acceptance(lookahead))

    def hits(self, lookahead: int, budget: int) -> list[tuple[float, ...]]:
        """Hit rates of 0 … budget guesses for each acceptance length."""
        rejected = self.after_rejection.hits(budget, self._prior.rejected)
        return [rejected] * lookahead + [self.after_acceptance.hits(budget, self._prior.accepted)]


class Estimators:
    """All estimates of a deployment."""

    def __init__(self, prior: Prior | None = None, decay: float = DECAY) -> None:
        self._prior = prior or Prior()
        self._decay = decay
        self._estimates: dict[tuple[int, bool], Estimate] = {}

    def of(self, situation: Situation) -> Estimate:
        key = band(situation.temperature), situation.hit
        if key not in self._estimates:
            self._estimates[key] = Estimate(self._prior, situation.hit, self._decay)
        return self._estimates[key]

    def hit_rate(self, temperature: float) -> float | None:
        """What the rates after a hit and after a miss lead to over all (Theorem 7); None while one is unknown."""
        after_hit, after_miss = (self.of(Situation(hit, temperature)).hit_rate for hit in (True, False))
        return None if after_hit is None or after_miss is None else overall_hit_rate(after_hit, after_miss)

    def curves(self) -> tuple[CurveFit, ...]:
        """Every miss curve that can be fitted."""
        found: list[CurveFit] = []
        for (temperatures, hit), estimate in sorted(self._estimates.items()):
            for accepted, curve in ((False, estimate.after_rejection), (True, estimate.after_acceptance)):
                if fit := curve.fit():
                    c, r = fit.curve.scale, fit.curve.exponent
                    found.append(CurveFit(hit, accepted, temperatures, c, r, fit.r_squared, curve.rounds))
        return tuple(found)
