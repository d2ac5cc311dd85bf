"""The policy `auto`: lists fitted to what is measured, changed only when that is worth it."""

from __future__ import annotations

import logging
import math

from saguaro.orchestrator.estimators import Estimators, band
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Situation, allocate, predicted_hit_rate
from saguaro.plugins.fan_out import FanOut

_log = logging.getLogger(__name__)
_REVIEW = 32  # rounds observed between two looks at whether a list is still the best
_LEAST_GAIN = 0.005  # of the hit rate


class MeasuredFanOut:
    """Starts from `start`. A list in force gives way only to one whose predicted hit rate exceeds its own by more than
    the standard error of such a prediction, so that noise alone does not change lists.
    """

    def __init__(self, estimators: Estimators, start: FanOutPolicy) -> None:
        self._estimators = estimators
        self._start = start
        self._in_force: dict[tuple[int, bool, int, int], FanOut] = {}
        self._reviewed: dict[tuple[int, bool, int, int], int] = {}  # rounds observed at the last review
        self.changes = 0

    def __call__(self, budget: int, lookahead: int, situation: Situation) -> FanOut:
        key = band(situation.temperature), situation.hit, budget, lookahead
        observed = self._estimators.of(situation).observed
        if key not in self._in_force:
            self._in_force[key] = self._start(budget, lookahead, situation)
            self._reviewed[key] = 0
        if budget and lookahead and observed - self._reviewed[key] >= _REVIEW:
            self._reviewed[key] = observed
            self._in_force[key] = self._reviewed_list(self._in_force[key], budget, lookahead, situation)
        return self._in_force[key]

    def _reviewed_list(self, current: FanOut, budget: int, lookahead: int, situation: Situation) -> FanOut:
        estimate = self._estimators.of(situation)
        weights, hits = estimate.weights(lookahead), estimate.hits(lookahead, budget)
        best = allocate(budget, weights, hits)
        now, then = (predicted_hit_rate(fan_out, weights, hits) for fan_out in (current, best))
        if then - now <= max(_LEAST_GAIN, math.sqrt(then * (1 - then) / estimate.rounds)):
            return current
        self.changes += 1
        _log.info(
            "fan-out after a %s at temperature %g: %s instead of %s, hit rate %.3f instead of %.3f expected",
            "hit" if situation.hit else "miss",
            situation.temperature,
            list(best.counts),
            list(current.counts),
            then,
            now,
        )
        return best
