"""The mirror of the service's metrics in Triton: its arithmetic against a strict stand-in, then the real server."""

from __future__ import annotations

import math
import time
import urllib.request
from types import SimpleNamespace

from saguaro.frontend.figures import Scrape
from saguaro.triton_repo.metrics import MetricsMirror
from serving import Served
from test_telemetry import Rig


class Metric:
    def __init__(self, counter: bool) -> None:
        self._counter = counter
        self.value = 0.0

    def increment(self, amount: float) -> None:
        assert math.isfinite(amount)
        assert not self._counter or amount >= 0
        self.value += amount

    def set(self, value: float) -> None:
        assert not self._counter, "Triton sets gauges only"
        self.value = value


class MetricFamily:
    COUNTER, GAUGE = 0, 1
    made: dict[str, MetricFamily] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        assert name not in self.made, "one family of a name"
        assert description
        self.kind = kind
        self.metrics: dict[frozenset[tuple[str, str]], Metric] = {}
        self.made[name] = self

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 (Triton's name)
        key = frozenset(labels.items())
        assert key not in self.metrics
        self.metrics[key] = Metric(self.kind == self.COUNTER)
        return self.metrics[key]


def test_the_mirror_says_what_the_service_says_and_a_restart_never_takes_a_count_back() -> None:
    mirror = MetricsMirror(SimpleNamespace(MetricFamily=MetricFamily))
    rig = Rig()

    def value(name: str, **labels: str) -> float:
        return MetricFamily.made[name].metrics[frozenset(labels.items())].value

    for _ in range(2):
        rig.run((13, "ssd"))
        mirror.update(rig.telemetry.text())
    assert value("saguaro_rounds_total") == rig["saguaro_rounds_total"] == 8
    assert value("saguaro_lookups_total", result="hit", after="hit") == 4
    assert value("saguaro_acceptance_length_sum", speculation="hit") == 24
    assert value("saguaro_kv_free_blocks", pool="draft") == 50
    assert not [name for name in MetricFamily.made if name.endswith("_bucket")]
    again = Rig()  # the target group has died and is there again
    again.run((5, "ssd"))
    mirror.update(again.telemetry.text())
    assert value("saguaro_rounds_total") == 8 + 2
    assert value("saguaro_kv_cached_blocks", pool="target") == again['saguaro_kv_cached_blocks{pool="target"}']
    mirror.close()


def test_tritons_own_metrics_say_what_the_service_says(served: Served) -> None:
    status, _ = served.post("generate", {"text_input": "hello", "max_tokens": 9, "temperature": 0.0})
    assert status == 200
    expected = Scrape(served.llm.metrics())
    url = f"http://127.0.0.1:{served.server.metrics_port}/metrics"
    deadline = time.monotonic() + 30
    while True:
        with urllib.request.urlopen(url, timeout=30) as answer:
            mirrored = Scrape(answer.read().decode())
        if mirrored.value("saguaro_generated_tokens_total") == expected.value("saguaro_generated_tokens_total"):
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for name in ("rounds_total", "lookups_total", "kv_blocks"):
        assert mirrored.value(f"saguaro_{name}") == expected.value(f"saguaro_{name}") != 0
    for name in (
        "acceptance_length_sum",
        "verify_seconds_count",
    ):  # counters there, which the parser calls by that name
        assert mirrored.value(f"saguaro_{name}_total") == expected.value(f"saguaro_{name}") != 0
    assert mirrored.value("saguaro_requests_finished_total", reason="length") == expected.value(
        "saguaro_requests_finished_total", reason="length"
    )
    assert mirrored.value("saguaro_mode", mode="ssd") == 1
