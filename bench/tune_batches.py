"""What larger batches and replicas of the draft would bring: by the model that decides on line, over measured times.

Nothing of it is run. Times of more rows than were measured lie on the line through those that were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saguaro.orchestrator.config import SpeculationConfig
from saguaro.orchestrator.costs import StepTime
from saguaro.orchestrator.speed_model import Choices, Outlook, best, predict
from saguaro.orchestrator.types import MODES, Backup, Setting

if TYPE_CHECKING:
    from saguaro.bench.tune import Curve, Times

BATCHES = (1, 2, 4, 8, 16)
REPLICAS = (1, 2, 4)
BACKUPS: tuple[Backup, ...] = ("primary", "defer", "ngram", "none")


@dataclass(frozen=True)
class Predicted:
    """The fastest setting of a batch, and what each backup would make of ssd there. Speeds are over plain decoding."""

    batch: int
    replicas: int
    setting: Setting
    speed: float
    t_p: float
    backups: dict[Backup, float]  # with the best lookahead and budget of each


def outlook(
    times: Times,
    measured: tuple[list[float], Curve, Curve],
    base: SpeculationConfig,
    ngram: float,
    replicas: int,
) -> Outlook:
    """Of one temperature. `ngram`: acceptance of that backup's tokens."""
    acceptance, rejected, whole = measured
    known = [rate for rate in acceptance if math.isfinite(rate)] or [base.fan_out.acceptance]
    places = [rate if math.isfinite(rate) else known[-1] for rate in acceptance]
    text: dict[Backup, Sequence[float]] = {"ngram": [ngram] * len(places), "none": []}
    after = {"primary": places, "defer": places, **text}
    return Outlook(
        verify=_line({k + 1: seconds for k, seconds in times.verify.items()}),
        draft=_line(times.step),
        trunk=_line({k + 1: seconds for k, seconds in times.trunk.items()}),
        prepared=places,
        backups=after,
        in_turn=after,
        rejected=rejected.fit.curve if rejected.fit else base.prior.rejected,
        accepted=whole.fit.curve if whole.fit else base.prior.accepted,
        replicas=replicas,
    )


def predictions(
    times: Times,
    measured: tuple[list[float], Curve, Curve],
    base: SpeculationConfig,
    ngram: float,
    lookaheads: Sequence[int],
    budgets: Sequence[int],
) -> list[Predicted]:
    """For each batch and number of replicas; these have budgets as many times as large."""
    found: list[Predicted] = []
    for replicas in REPLICAS:
        known = outlook(times, measured, base, ngram, replicas)
        most = [replicas * budget for budget in budgets]
        for batch in BATCHES:
            plain = predict(known, Setting("ar", 1, 0, "primary"), batch).tokens_per_second
            choices = Choices(lookaheads, most, BACKUPS)
            fastest = max((best(known, choices, mode, batch) for mode in MODES), key=lambda p: p.tokens_per_second)
            alone = {name: best(known, Choices(lookaheads, most, [name]), "ssd", batch) for name in BACKUPS}
            found.append(
                Predicted(
                    batch,
                    replicas,
                    fastest.setting,
                    fastest.tokens_per_second / plain,
                    fastest.t_p,
                    {name: prediction.tokens_per_second / plain for name, prediction in alone.items()},
                )
            )
    return found


def _line(seconds: Mapping[int, float]) -> StepTime:
    time = StepTime()
    for rows, each in seconds.items():
        time.observe(rows, each)
    return time
