"""What the metrics say, against runs whose every count is known."""

from __future__ import annotations

import re

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from harness import Pair
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import CapacityError, ConfigError, DrainingError
from saguaro.orchestrator.collapse_alarm import CollapseAlarm
from saguaro.orchestrator.config import (
    DeploymentConfig,
    DraftConfig,
    FanOutConfig,
    ModelConfig,
    ServingConfig,
    SpeculationConfig,
)
from saguaro.orchestrator.histogram import Histogram
from saguaro.orchestrator.protocol import CurveFit, Report, Span
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.telemetry import Telemetry
from saguaro.orchestrator.types import Mode, SamplingParams
from saguaro.orchestrator.verifier import RoundResult

CYCLE = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]  # 0 1 2 3 0 …
BACKWARDS = [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]  # 3 2 1 0 3 …


class Rig:
    """The real roles over two tables, as the service drives them, and the metrics of it."""

    def __init__(self, draft: list[list[int]] = CYCLE, lookahead: int = 3, budget: int = 4) -> None:
        target, drafter = (ScriptedEngine(markov_table(rows), 4, 64, 4, 50) for rows in (CYCLE, draft))
        self.pair = Pair(target, drafter, lookahead=lookahead, budget=budget)
        config = DeploymentConfig(
            "test",
            ModelConfig("none"),
            DraftConfig("none"),
            SpeculationConfig(lookahead=lookahead, fan_out=FanOutConfig(budget)),
            ServingConfig(max_queue=2),
        )
        self.scheduler = Scheduler(
            self.pair.target_pool, max_sequences=2, max_model_len=64, max_batch_tokens=64, max_queue=2
        )
        self.control = RoundControl(config.speculation, max_budget=budget)
        self.control.draft(True)
        self.telemetry = Telemetry(
            config,
            self.scheduler,
            self.pair.verifier,
            self.control,
            target_pool=self.pair.target_pool,
            draft_pool=self.pair.draft_pool,
            compiling=lambda: 3,
        )

    def run(self, *requests: tuple[int, Mode]) -> None:
        """So many tokens after [0] in this mode, all at once."""
        for length, mode in requests:
            self.scheduler.add(self.pair.sequence([0], SamplingParams(temperature=0, max_tokens=length), mode))
        while batch := self.scheduler.schedule():
            result = self.pair.verifier.step(batch)
            self.control.observe(batch, result)
            self.control.learn(batch, result, self.pair.verifier.setting)
            self.telemetry.round(batch, result)
            for sequence in [sequence for sequence in batch if sequence.finish_reason]:
                self.scheduler.remove(sequence)

    def full(self) -> Rig:
        """With a value for every series there is."""
        self.run((40, "ssd"), (20, "sd"))
        self.control.report = Report((CurveFit(True, False, 0, 0.4, 0.6, 0.9, 50),), {"suffix": (0.5,)})
        self.control.draft(False)
        self.control.draft(True)
        return self

    def __getitem__(self, series: str) -> float:
        """The value of `name{label="value"}`, as it is written."""
        value = re.search(rf"^{re.escape(series)} (\S+)$", self.telemetry.text(), re.MULTILINE)
        assert value, f"{series} is not exported"
        return float(value.group(1))


def test_counts_of_a_draft_that_is_always_right() -> None:
    rig = Rig()
    rig.run((13, "ssd"))  # a prefill of one token, then three rounds of four
    assert rig["saguaro_rounds_total"] == 4
    assert rig['saguaro_acceptance_length_count{speculation="hit"}'] == 3
    assert rig['saguaro_acceptance_length_sum{speculation="hit"}'] == 12
    assert rig['saguaro_acceptance_length_bucket{le="3.0",speculation="hit"}'] == 0
    assert rig['saguaro_acceptance_length_bucket{le="4.0",speculation="hit"}'] == 3
    assert rig['saguaro_lookups_total{after="none",result="hit"}'] == 1
    assert rig['saguaro_lookups_total{after="hit",result="hit"}'] == 2
    assert [rig[f'saguaro_draft_tokens_total{{position="{p}"}}'] for p in (1, 2, 3)] == [3, 3, 3]
    assert [rig[f'saguaro_accepted_tokens_total{{position="{p}"}}'] for p in (1, 2, 3)] == [3, 3, 3]
    assert (
        rig['saguaro_branches_prepared_total{replica="0"}'] == 12
    )  # four beside each verification but the last: no answer since
    assert rig["saguaro_branches_used_total"] == 3
    spans = {name: rig[f"saguaro_{name}_seconds_count"] for name in ("verify", "wait", "prepare", "backup")}
    assert spans == {"verify": 4, "wait": 3, "prepare": 3, "backup": 0}
    assert rig['saguaro_prefix_cache_queries_total{pool="target"}'] == 1
    rig.run((13, "ssd"))
    assert (
        rig['saguaro_branches_prepared_total{replica="0"}'] == 28
    )  # what the last round of the first run prepared is in it


def test_counts_of_a_draft_that_is_always_wrong_and_prepares_nothing() -> None:
    rig = Rig(BACKWARDS, budget=0)
    rig.run((4, "ssd"))  # a prefill, speculations of two tokens and of one, and a last token that asks for none
    assert rig['saguaro_lookups_total{after="none",result="miss"}'] == 1
    assert rig['saguaro_lookups_total{after="miss",result="miss"}'] == 1
    assert rig['saguaro_acceptance_length_sum{speculation="miss"}'] == 2
    assert rig['saguaro_acceptance_length_sum{speculation="none"}'] == 1
    assert [rig[f'saguaro_draft_tokens_total{{position="{p}"}}'] for p in (1, 2, 3)] == [2, 1, 0]
    assert [rig[f'saguaro_accepted_tokens_total{{position="{p}"}}'] for p in (1, 2, 3)] == [0, 0, 0]
    assert (rig['saguaro_branches_prepared_total{replica="0"}'], rig["saguaro_branches_used_total"]) == (0, 0)
    assert rig["saguaro_backup_seconds_count"] == 2


def test_rounds_that_sequences_sat_out_are_counted_and_nothing_else_of_them() -> None:
    rig = Rig()
    sequence = rig.pair.sequence([0], SamplingParams())
    rig.telemetry.round([sequence], RoundResult([[]], (Span("deferred", 0, 5, (sequence.id,)),), deferred=1))
    assert rig["saguaro_deferred_rows_total"] == 1
    assert rig['saguaro_acceptance_length_count{speculation="none"}'] == 0


def test_a_batch_of_all_modes_is_told_apart() -> None:
    rig = Rig()
    rig.run((7, "sd"), (3, "ar"), (6, "ssd"))  # the third waits for the second
    lengths = {
        kind: rig[f'saguaro_acceptance_length_sum{{speculation="{kind}"}}'] for kind in ("hit", "miss", "sd", "none")
    }
    assert lengths == {"hit": 4, "miss": 0, "sd": 6, "none": 3}
    assert rig['saguaro_lookups_total{after="none",result="hit"}'] == 1  # sd looks nothing up
    assert [rig[f'saguaro_accepted_tokens_total{{position="{p}"}}'] for p in (1, 2, 3)] == [3, 2, 2]
    assert rig['saguaro_prefix_cache_queries_total{pool="target"}'] == 3
    assert rig['saguaro_prefix_cache_queries_total{pool="draft"}'] == 2


def test_levels_are_those_of_the_moment() -> None:
    rig = Rig()
    sequence = rig.pair.sequence([0, 1, 2, 3, 0], SamplingParams(temperature=0, max_tokens=9), "ssd")
    rig.scheduler.add(sequence)
    assert (rig["saguaro_requests_running"], rig["saguaro_requests_waiting"], rig["saguaro_queue_limit"]) == (0, 1, 2)
    assert rig["saguaro_requests_compiling"] == 3
    rig.scheduler.schedule()
    assert (rig["saguaro_requests_running"], rig["saguaro_requests_waiting"]) == (1, 0)
    assert (rig['saguaro_kv_free_blocks{pool="target"}'], rig['saguaro_kv_blocks{pool="target"}']) == (48, 50)
    assert (rig['saguaro_mode{mode="ssd"}'], rig['saguaro_mode{mode="ar"}'], rig["saguaro_draft_connected"]) == (
        1,
        0,
        1,
    )
    assert [rig[f'saguaro_fan_out{{accepted="{k}"}}'] for k in range(4)] == [1, 1, 1, 1]
    rig.pair.link.lost = True
    assert (rig['saguaro_mode{mode="ssd"}'], rig['saguaro_mode{mode="ar"}'], rig["saguaro_draft_connected"]) == (
        0,
        1,
        0,
    )
    rig.scheduler.remove(sequence)


def test_counts_of_a_link_outlive_it() -> None:
    rig = Rig()
    rig.pair.channel.delay = 9
    rig.run((5, "ssd"))
    assert rig['saguaro_draft_timeouts_total{replica="0"}'] == 1
    rig.telemetry.draft_connected()
    rig.pair.channel.delay = 0
    rig.pair.start(0)
    rig.pair.connect(0)
    assert rig['saguaro_draft_timeouts_total{replica="0"}'] == 1
    assert rig["saguaro_draft_connections_total"] == 1


def test_time_in_which_the_speculator_does_not_work_is_idle_and_a_rogue_span_is_ignored() -> None:
    rig = Rig()
    millisecond = 10**6
    rig.telemetry.round([], RoundResult([], (Span("verify", 0, 100 * millisecond),)))
    spans = (
        Span("wait", 0, 10 * millisecond),
        Span("verify", 0, 100 * millisecond),
        Span("prepare", 0, 60 * millisecond),
        Span("mischief", 0, 7 * millisecond),
        Span("backup", 5 * millisecond, 0),
    )
    rig.telemetry.round([], RoundResult([], spans))
    assert rig["saguaro_speculator_idle_seconds_total"] == pytest.approx(0.05)
    assert rig["saguaro_backup_seconds_sum"] == 0
    rig.telemetry.draft_connected()  # another one: what went on before is not its idleness
    rig.telemetry.round([], RoundResult([], (Span("wait", 0, 30 * millisecond), Span("prepare", 0, 20 * millisecond))))
    assert rig["saguaro_speculator_idle_seconds_total"] == pytest.approx(0.06)


def test_a_speculator_is_idle_while_rounds_ask_it_nothing() -> None:
    rig = Rig()
    idle = "saguaro_speculator_idle_seconds_total"
    rig.run((9, "ar"))
    assert rig[idle] == pytest.approx(rig["saguaro_verify_seconds_sum"])
    verify = (Span("verify", 0, 10**8),)
    before = rig[idle]
    rig.telemetry.round([], RoundResult([], verify))
    for known in (0, 0.1, 0.2):  # it may still work ahead in the first of them
        rig.telemetry.round([], RoundResult([], verify, asked=False))
        assert rig[idle] - before == pytest.approx(known)
    rig.telemetry.round([], RoundResult([], (Span("prepare", 0, 15 * 10**7),)))
    assert rig[idle] - before == pytest.approx(0.2 + 0.05)
    rig.pair.link.lost = True
    for _ in range(3):
        rig.telemetry.round([], RoundResult([], verify, asked=False))
    assert rig[idle] - before == pytest.approx(0.25)  # a speculator that is away is not idle


def test_requests_are_counted_by_how_they_end() -> None:
    rig = Rig()
    telemetry = rig.telemetry
    telemetry.submitted(SamplingParams(regex="a+"), prompt=7, delivered=0)
    telemetry.submitted(SamplingParams(), prompt=5, delivered=2)
    telemetry.refused(ConfigError("bad"))
    telemetry.refused(CapacityError("full"))
    telemetry.refused(DrainingError("later"))
    telemetry.started(0.02)
    telemetry.emitted(1, 0.2, first=True)
    telemetry.emitted(4, 0.2, first=False)
    telemetry.finished("stop", 0.4)
    telemetry.finished("cancelled", 400)
    assert rig["saguaro_prompt_tokens_total"] == 12
    assert rig["saguaro_generated_tokens_total"] == 5
    assert (rig["saguaro_requests_resumed_total"], rig['saguaro_structured_requests_total{guide="regex"}']) == (1, 1)
    refused = [rig[f'saguaro_requests_refused_total{{reason="{why}"}}'] for why in ("invalid", "capacity", "draining")]
    assert refused == [1, 1, 1]
    ends = [rig[f'saguaro_requests_finished_total{{reason="{why}"}}'] for why in ("stop", "length", "cancelled")]
    assert ends == [1, 0, 1]
    assert rig['saguaro_time_to_first_token_seconds_bucket{le="0.1"}'] == 0
    assert rig['saguaro_time_to_first_token_seconds_bucket{le="0.25"}'] == 1
    assert rig['saguaro_inter_token_latency_seconds_bucket{le="0.05"}'] == 4  # 0.2 s for four tokens
    assert rig["saguaro_inter_token_latency_seconds_sum"] == pytest.approx(0.2)
    assert rig['saguaro_request_seconds_bucket{le="300.0"}'] == 1
    assert rig['saguaro_request_seconds_bucket{le="+Inf"}'] == 2


def test_a_histogram_is_that_of_the_library() -> None:
    """Against prometheus_client's own, values on the bounds included."""
    registry = CollectorRegistry()
    theirs = prometheus_client.Histogram("size", "text", ["kind"], buckets=(1, 2.5, 5), registry=registry)
    ours = Histogram("size", "text", (1, 2.5, 5), "kind", ("a", "b"))
    theirs.labels("b")
    for value, times in ((0.5, 1), (1, 2), (2.5, 3), (2.6, 1), (99, 2)):
        ours.add(value, times, "a")
        for _ in range(times):
            theirs.labels("a").observe(value)
    [mine] = ours.collect()
    [family] = theirs.collect()
    expected = {(s.name, tuple(s.labels.items()), s.value) for s in family.samples if not s.name.endswith("_created")}
    assert {(s.name, tuple(s.labels.items()), s.value) for s in mine.samples} == expected


def test_collapse_is_said_once_and_ends_with_some_distance(caplog: pytest.LogCaptureFixture) -> None:
    alarm = CollapseAlarm(window=100)
    for accepted in [0] * 99:
        alarm.add(accepted)
    assert not alarm.on  # too early to tell
    alarm.add(2)
    assert alarm.on
    for accepted in [1] * 4:
        alarm.add(accepted)
    assert alarm.on  # 5 of 100
    alarm.add(1)
    assert not alarm.on
    for accepted in [0] * 98:
        alarm.add(accepted)
    assert alarm.on  # and again: 2 of 100
    assert [record.getMessage()[:55] for record in caplog.records] == [
        "acceptance has collapsed: of the last 100 speculations "
    ] * 2


def test_a_draft_that_never_helps_sets_the_alarm_and_one_that_does_not_speculate_does_not() -> None:
    rig, plain = Rig(BACKWARDS, lookahead=1, budget=0), Rig(BACKWARDS)
    rig.run((60, "ssd"), (60, "ssd"), (60, "ssd"))
    plain.run((60, "ar"), (60, "ar"))
    assert rig["saguaro_acceptance_collapsed"] == 1
    assert plain["saguaro_acceptance_collapsed"] == 0


def test_of_several_speculators_the_busiest_says_what_is_idle() -> None:
    rig = Rig()
    rig.telemetry.round([], RoundResult([], (Span("verify", 0, 10**8),)))
    worked = (Span("prepare", 0, 6 * 10**7, replica=0), Span("prepare", 0, 8 * 10**7, replica=1))
    rig.telemetry.round([], RoundResult([], worked))
    assert rig["saguaro_speculator_idle_seconds_total"] == pytest.approx(0.02)
    assert rig["saguaro_prepare_seconds_count"] == 2
