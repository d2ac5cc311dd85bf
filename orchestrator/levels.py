"""Metrics of what the leader's objects know anyway, read at the moment of asking: they cost a round nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

import saguaro
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import Situation
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.types import Mode
from saguaro.orchestrator.verifier import Verifier


@dataclass(eq=False)
class Levels:
    """Queue, blocks, prefix cache, link and mode as metric families."""

    config: DeploymentConfig
    scheduler: Scheduler
    verifier: Verifier
    control: RoundControl
    pools: dict[str, BlockPool]

    def collect(self) -> Iterable[Metric]:
        info = InfoMetricFamily("saguaro_build", "The release that runs")
        info.add_metric([], {"version": saguaro.__version__})
        return [info, *self._load(), *self._memory(), *self._drafting(), *self.verifier.target.metrics()]

    def _load(self) -> Iterable[Metric]:
        scheduler = self.scheduler
        yield GaugeMetricFamily("saguaro_requests_running", "Requests in the batch", len(scheduler.running))
        yield GaugeMetricFamily(
            "saguaro_requests_collapsed",
            "Of these, requests that decode plainly because no draft token of theirs was accepted for long",
            sum(sequence.prospects.collapsed for sequence in scheduler.running),
        )
        yield GaugeMetricFamily("saguaro_requests_waiting", "Requests in the queue", scheduler.waiting)
        yield GaugeMetricFamily(
            "saguaro_queue_limit", "Requests that may wait: serving.max_queue", self.config.serving.max_queue
        )
        yield CounterMetricFamily(
            "saguaro_preemptions", "Running requests that had to give their blocks back", scheduler.preemptions
        )
        queries = CounterMetricFamily(
            "saguaro_prefix_cache_queries", "Tokens of admitted requests looked up in the prefix cache", labels=["pool"]
        )
        hits = CounterMetricFamily(
            "saguaro_prefix_cache_hits", "Tokens whose KV was found in the prefix cache", labels=["pool"]
        )
        for pool, counts in scheduler.prefix_cache.items():
            queries.add_metric([pool], counts.asked)
            hits.add_metric([pool], counts.found)
        yield queries
        yield hits

    def _memory(self) -> Iterable[Metric]:
        for name, text in (
            ("num_blocks", "KV blocks of a pool"),
            ("free_blocks", "KV blocks that no request holds, cached ones included"),
            ("cached_blocks", "KV blocks that hold a prefix a prompt may share"),
        ):
            family = GaugeMetricFamily(f"saguaro_kv_{name.removeprefix('num_')}", text, labels=["pool"])
            for pool, blocks in self.pools.items():
                family.add_metric([pool], getattr(blocks, name))
            yield family

    def _drafting(self) -> Iterable[Metric]:
        speculation = self.config.speculation
        connected = sum(self.verifier.link.connected)
        effective: Mode = self.control.mode if connected else "ar"
        mode = GaugeMetricFamily("saguaro_mode", "1 for the mode that new requests get now", labels=["mode"])
        for name in get_args(Mode):
            mode.add_metric([name], name == effective)
        yield mode
        fan_out = GaugeMetricFamily(
            "saguaro_fan_out",
            "Bonus tokens guessed for each number of accepted tokens after a hit; `auto` starts there",
            labels=["accepted"],
        )
        policy, setting = speculation.policy(Estimators(speculation.prior)), self.control.latest
        if speculation.fan_out.ranked_from is None:  # else they are others in every round
            for accepted, count in enumerate(policy(setting.budget, setting.lookahead, Situation()).counts):
                fan_out.add_metric([str(accepted)], count)
        yield fan_out
        wanted = self.config.replicas
        yield GaugeMetricFamily("saguaro_draft_wanted", "Replicas of the draft; 0 without speculation", wanted)
        yield GaugeMetricFamily("saguaro_draft_connected", "Speculators that are connected", connected)
        for name, text in (
            ("stale_answers", "Answers of the draft that came too late or were foreign, and were dropped"),
            ("draft_timeouts", "Rounds whose answer did not come within speculation.deadline_ms"),
            ("branches_prepared", "Continuations the speculator has drafted ahead"),
        ):
            family = CounterMetricFamily(f"saguaro_{name}", text, labels=["replica"])
            for replica, counts in enumerate(self.verifier.link.counts):
                family.add_metric([str(replica)], getattr(counts, name))
            yield family
