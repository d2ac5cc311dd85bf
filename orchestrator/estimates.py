"""What is estimated and decided on line, as metric families: read at the moment of asking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from saguaro.orchestrator.estimators import BANDS
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.types import Backup


@dataclass(eq=False)
class Estimates:
    """Of acceptance, miss curves, hit rates and times, and the mode, lookahead, budget and backup made of them."""

    control: RoundControl

    def collect(self) -> Iterable[Metric]:
        yield from self._decisions()
        yield from self._acceptance()
        yield from self._curves()
        yield from self._times()

    def _decisions(self) -> Iterable[Metric]:
        control, setting = self.control, self.control.latest
        yield GaugeMetricFamily("saguaro_lookahead", "Draft tokens in a speculation at most, now", setting.lookahead)
        yield GaugeMetricFamily("saguaro_budget", "Branches prepared for a sequence at most, now", setting.budget)
        backup = GaugeMetricFamily("saguaro_backup", "1 for what drafts after a miss now", labels=["backup"])
        for name in get_args(Backup):
            backup.add_metric([name], name == setting.backup)
        yield backup
        changes = CounterMetricFamily(
            "saguaro_mode_changes", "Changes of the mode that runs", labels=["from", "to", "reason"]
        )
        for labels, count in sorted(control.changes.items()):
            changes.add_metric(labels, count)
        yield changes
        probes = CounterMetricFamily("saguaro_mode_probes", "Short trials of a mode that does not run", labels=["mode"])
        for mode, count in control.probes.items():
            probes.add_metric([mode], count)
        yield probes
        rates = GaugeMetricFamily(
            "saguaro_mode_tokens_per_second",
            "Measured tokens per second of a sequence, by mode and largest batch of the band",
            labels=["mode", "batch"],
        )
        for (batch, mode), rate in sorted(control.rates().items()):
            rates.add_metric([mode, str(batch)], rate)
        yield rates

    def _acceptance(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "saguaro_estimated_acceptance",
            "Acceptance of a place in the speculation, given that the ones before were accepted",
            labels=["speculation", "position"],
        )
        for made in ("hit", "miss", "sd"):
            for place, rate in enumerate(self.control.acceptance(made), 1):
                family.add_metric([made, str(place)], rate)
        yield family
        free = GaugeMetricFamily(
            "saguaro_estimated_backup_acceptance",
            "Acceptance of a place, had this backup drafted: with `backup: auto`",
            labels=["backup", "position"],
        )
        for name, rates in sorted(self.control.report.acceptance.items()):
            for place, rate in enumerate(rates, 1):
                free.add_metric([name, str(place)], rate)
        yield free
        hits = GaugeMetricFamily(
            "saguaro_estimated_hit_rate",
            "Hit rate after a hit, after a miss, and over all (Theorem 7)",
            labels=["after"],
        )
        _add(
            hits, {"hit": self.control.hit_rate(True), "miss": self.control.hit_rate(False), "any": self.control.p_hit}
        )
        yield hits

    def _curves(self) -> Iterable[Metric]:
        labels = ["speculation", "after", "temperature"]
        for name, text in (
            ("scale", "c of the miss curve c F^-r"),
            ("exponent", "r of the miss curve c F^-r"),
            ("r_squared", "R^2 of the fit of the miss curve"),
        ):
            family = GaugeMetricFamily(f"saguaro_miss_curve_{name}", text, labels=labels)
            for fit in self.control.report.curves:
                upper = f"<={BANDS[fit.band]:g}" if fit.band < len(BANDS) else f">{BANDS[-1]:g}"
                made, after = "hit" if fit.hit else "miss", "acceptance" if fit.accepted else "rejection"
                family.add_metric([made, after, upper], getattr(fit, name))
            yield family

    def _times(self) -> Iterable[Metric]:
        costs = self.control.costs
        times = GaugeMetricFamily(
            "saguaro_estimated_time",
            "T_p and T_b: preparing and drafting after a miss, in verifications",
            labels=["of"],
        )
        _add(times, {"prepare": costs.t_p, "backup": costs.t_b})
        yield times
        for name, text, value in (
            ("verify", "verification", costs.verify),
            ("draft", "draft step", costs.slowest.draft),
        ):
            family = GaugeMetricFamily(
                f"saguaro_estimated_{name}_seconds",
                f"Time of a {text} of one row, and of each further one",
                labels=["row"],
            )
            if value.known:
                _add(family, {"first": value(1), "further": value.slope})
            yield family


def _add(family: GaugeMetricFamily, values: Mapping[str, float | None]) -> None:
    for label, value in values.items():
        if value is not None:
            family.add_metric([label], value)
