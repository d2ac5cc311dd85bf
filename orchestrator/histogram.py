"""A Prometheus histogram that a round can afford."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Histogram:
    """For one thread: without a lock, and equal values count at once, because a round brings several.

    `bounds` are the upper ends of the buckets; the last one, without end, is added. With a `label` there is a histogram
    for each of its `values`.
    """

    def __init__(self, name: str, text: str, bounds: Rows[float], label: str = "", values: Rows[str] = ("",)) -> None:
        self._name, self._text, self._label, self._bounds = name, text, label, bounds
        self._counts = {value: [0] * (len(bounds) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def add(self, amount: float, times: int = 1, value: str = "") -> None:
        """Observe `amount` so many times, under this value of the label."""
        self._counts[value][bisect_left(self._bounds, amount)] += times
        self._sums[value] += amount * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for value, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([value] if self._label else [], buckets, self._sums[value])
        return [family]
