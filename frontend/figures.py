"""What the metrics of a deployment say about a span of time: two scrapes make the figures between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from saguaro.errors import ProtocolError


class Scrape:
    """The samples of one answer of `/metrics`. Raises ProtocolError for what is not Prometheus' text format."""

    def __init__(self, text: str = "") -> None:
        self._samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = tuple(sorted(sample.labels.items()))
                    self._samples.setdefault(sample.name, {})[labels] = sample.value
        except ValueError as error:
            raise ProtocolError(f"the metrics cannot be read as Prometheus' text format: {error}") from error

    def series(self, name: str, **labels: str) -> Iterator[tuple[tuple[tuple[str, str], ...], float]]:
        """The series of a metric that have these labels."""
        for own, value in self._samples.get(name, {}).items():
            if labels.items() <= dict(own).items():
                yield own, value

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of those series; None when there is none."""
        values = [value for _, value in self.series(name, **labels)]
        return sum(values) if values else None

    def growth(self, earlier: Scrape, name: str, **labels: str) -> float:
        """By how much counters have grown. One that is smaller than it was began anew, with its process."""
        total = 0.0
        for own, value in self.series(name, **labels):
            before = earlier._samples.get(name, {}).get(own, 0.0)
            total += value - before if value >= before else value
        return total


@dataclass(frozen=True)
class Figures:
    """Of a span of time. What has no data in it is None, never a zero."""

    tokens: int
    requests: int  # that ended
    tokens_per_second: float | None
    acceptance_length: float | None
    hit_rate: float | None
    e_hit: float | None
    e_miss: float | None
    speed_up: float | None  # over plain decoding, as if a verification took as long as a plain step
    t_p: float | None  # in verifications
    t_b: float | None
    verify_ms: float | None
    wait_ms: float | None
    speculator_idle: float | None  # share of the time of rounds
    ttft_ms: float | None
    inter_token_ms: float | None


def figures(now: Scrape, earlier: Scrape, seconds: float | None) -> Figures:
    """Between two scrapes so far apart; with an empty `earlier` and no `seconds`, since the service has started."""

    def grown(name: str, **labels: str) -> float:
        return now.growth(earlier, f"saguaro_{name}", **labels)

    def ratio(one: float | None, other: float | None) -> float | None:
        return None if one is None or not other else one / other

    def mean(name: str, **labels: str) -> float | None:
        return ratio(grown(f"{name}_sum", **labels), grown(f"{name}_count", **labels))

    def in_ms(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    verifying, waiting = grown("verify_seconds_sum"), grown("wait_seconds_sum")
    verify, length = mean("verify_seconds"), mean("acceptance_length")
    share = ratio(verifying, verifying + waiting)
    # Idle time is counted when the speculator answers: after a long prompt, of rounds before this span, too.
    idle = ratio(grown("speculator_idle_seconds_total"), verifying + waiting)
    return Figures(
        tokens=round(grown("generated_tokens_total")),
        requests=round(grown("requests_finished_total")),
        tokens_per_second=ratio(grown("generated_tokens_total"), seconds),
        acceptance_length=length,
        hit_rate=ratio(grown("lookups_total", result="hit"), grown("lookups_total")),
        e_hit=mean("acceptance_length", speculation="hit"),
        e_miss=mean("acceptance_length", speculation="miss"),
        speed_up=None if length is None or share is None else length * share,
        t_p=ratio(mean("prepare_seconds"), verify),
        t_b=ratio(mean("backup_seconds"), verify),
        verify_ms=in_ms(verify),
        wait_ms=in_ms(mean("wait_seconds")),
        speculator_idle=None if idle is None else min(idle, 1.0),
        ttft_ms=in_ms(mean("time_to_first_token_seconds")),
        inter_token_ms=in_ms(mean("inter_token_latency_seconds")),
    )
