"""The service's metrics on Triton's own `/metrics`, for those who scrape nothing else.

Every counter and gauge under its own name and labels; of a histogram its `_sum` and `_count`, because this Triton
has no custom histograms. What is mirrored lags by up to one interval. Scrape one of the two, or sums count twice.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from saguaro.errors import LinkError
from saguaro.orchestrator.client import Client

_log = logging.getLogger(__name__)
INTERVAL = 2.0  # seconds between two looks at the service


class MetricsMirror:
    """`pb_utils` is Triton's module of that name, which exists in its stub processes alone."""

    def __init__(self, pb_utils: Any) -> None:
        self._kinds = pb_utils.MetricFamily
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, text: str) -> None:
        """Take over what the service says. A counter that is smaller than before began anew, with its process."""
        lines = [line for line in text.splitlines(keepends=True) if "_bucket{" not in line]
        for family in text_string_to_metric_families("".join(lines)):
            gauge = family.type == "gauge"
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                before = self._values.get((sample.name, labels), 0.0)
                metric = self._metric(sample.name, family.documentation, labels, gauge)
                if gauge:
                    metric.set(sample.value)
                elif sample.value != before:
                    metric.increment(sample.value - before if sample.value > before else sample.value)
                self._values[sample.name, labels] = sample.value

    async def follow(self, socket: Path) -> None:
        """Keep up with the service until cancelled. While it is away the figures stand still."""
        client = Client(socket)
        away = False
        try:
            while True:
                try:
                    self.update(await client.metrics())
                    away = False
                except LinkError as error:
                    if not away:
                        _log.warning("metrics stand still: %s", error)
                    away = True
                await asyncio.sleep(INTERVAL)
        finally:
            await client.close()

    def close(self) -> None:
        """Triton wants a family to outlive its metrics."""
        self._metrics.clear()
        self._families.clear()

    def _metric(self, name: str, text: str, labels: tuple[tuple[str, str], ...], gauge: bool) -> Any:
        if (name, labels) not in self._metrics:
            if name not in self._families:
                kind = self._kinds.GAUGE if gauge else self._kinds.COUNTER
                self._families[name] = self._kinds(name=name, description=text, kind=kind)
            self._metrics[name, labels] = self._families[name].Metric(labels=dict(labels))
        return self._metrics[name, labels]
