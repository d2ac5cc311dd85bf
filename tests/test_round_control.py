"""The control and the real roles: what is measured decides how rounds are run, and never what they emit.

Target and draft are two devices of virtual time: forwards take what a profile says, and overlap as they would.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness import Pair, PumpChannel
from saguaro.engines.base import Engine, ForwardBatch, ForwardOutput
from saguaro.engines.profile import Agreement, Profile
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.engines.simulated import SimulatedEngine
from saguaro.errors import ConfigError
from saguaro.orchestrator.calibration import measure
from saguaro.orchestrator.config import DeploymentConfig, DraftConfig, FanOutConfig, ModelConfig, SpeculationConfig
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.protocol import Span, Step, decode
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Mode, SamplingParams, Setting
from test_round import DRAFT, TARGET, params, prompts, scripted

GREEDY = SamplingParams(temperature=0, max_tokens=100)


@dataclass
class Device:
    """Forwards of an engine take `first` + `row` for each further row, in virtual milliseconds."""

    engine: Engine
    first: float
    row: float
    slowed: float = 1.0
    now: int = 0  # nanoseconds

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now += self._time(len(batch.token_ids))
        return self.engine.forward(batch)

    def steps(self) -> tuple[Step, ...]:
        """What a measurement at start-up finds."""
        return tuple(Step(rows, self._time(rows)) for rows in (1, 4, 16))

    def _time(self, rows: int) -> int:
        return round((self.first + self.row * (rows - 1)) * self.slowed * 1e6)


class DeviceChannel(PumpChannel):
    """What the speculator does begins when it is asked, and the verifier goes on when it has the answer."""

    def __init__(self, target: Device, draft: Device) -> None:
        super().__init__()
        self._target, self._draft = target, draft
        self._asked: deque[tuple[int, bytes]] = deque()
        self._told: deque[tuple[int, bytes]] = deque()

    def send(self, data: bytes) -> None:
        self._asked.append((self._target.now, data))

    def receive(self, timeout: float) -> bytes | None:
        while self._asked and self.speculator:
            asked, data = self._asked.popleft()
            self._draft.now = max(self._draft.now, asked)
            self.speculator.take(decode(data))
        if not self._told:
            return None
        told, data = self._told.popleft()
        self._target.now = max(self._target.now, told)
        return data

    def answer(self, data: bytes) -> None:
        self._told.append((self._draft.now, data))


def simulated(agreement: Agreement | None = None) -> SimulatedEngine:
    profile = Profile({1: 0.0}, agreement)
    return SimulatedEngine(profile, vocab_size=300, first=3, max_model_len=512, block_size=16, num_blocks=4000)


@dataclass
class World:
    """A deployment in virtual time."""

    config: SpeculationConfig
    acceptance: float = 0.8
    draft_ms: float = 2.5
    target_ms: float = 20.0
    rows: int = 1  # sequences at a time
    scale: float = 0.4  # of the miss curve
    exponent: float = 0.6
    modes: Counter[Mode] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.target = Device(simulated(), self.target_ms, 0.05)
        self.draft = Device(simulated(Agreement(self.acceptance, self.scale, self.exponent)), self.draft_ms, 0.02)
        channel = DeviceChannel(self.target, self.draft)
        self.pair = Pair(
            self.target,  # type: ignore[arg-type]
            self.draft,  # type: ignore[arg-type]
            backup=self.config.backups[0],
            others=self.config.backups,
            channel=channel,
            timeline=Timeline(lambda: self.target.now),
            draft_timeline=Timeline(lambda: self.draft.now),
        )
        self.control = RoundControl(self.config, max_budget=8, verify_steps=self.target.steps())
        self.control.draft(True, self.draft.steps())
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.asked = 0

    def rounds(self, count: int) -> float:
        """Tokens per second over all sequences; one that ends gives way to another one."""
        start, emitted = self.target.now, 0
        for _ in range(count):
            while len(self.running) < self.rows:
                self.asked += 1
                self.running.append(self.pair.sequence([3 + self.asked % 200], GREEDY, lookahead=16))
            self.pair.verifier.setting = self.control.setting(len(self.running))
            self.modes[self.pair.verifier.setting.mode] += 1
            result = self.pair.step(self.running)
            self.control.observe(self.running, result)
            self.control.learn(self.running, result, self.pair.verifier.setting)
            emitted += sum(map(len, result.tokens))
            for sequence in [s for s in self.running if s.finish_reason]:
                sequence.release()
                self.running.remove(sequence)
                self.finished.append(sequence)
        return emitted / (self.target.now - start) * 1e9

    def until(self, mode: Mode, most: int = 1500) -> None:
        self.until_it(lambda: self.control.mode == mode, most)

    def until_it(self, holds: Callable[[], bool], most: int = 1500) -> None:
        while not holds():
            self.rounds(1)
            most -= 1
            assert most > 0

    @property
    def plain(self) -> float:
        """Speed of plain decoding."""
        return 1e3 * self.rows / (self.target.first + self.target.row * (self.rows - 1))


AUTO = SpeculationConfig(mode="auto", lookahead="auto", fan_out=FanOutConfig(budget="auto"))


def test_everything_automatic_over_the_real_roles(caplog: pytest.LogCaptureFixture) -> None:
    """A good draft, then one that is ten times slower, then as before: with texts as of plain decoding throughout."""
    caplog.set_level(logging.INFO, "saguaro")
    world = World(AUTO)
    world.rounds(120)
    good = world.rounds(60)
    assert world.control.mode == "ssd"
    assert good > 2 * world.plain
    assert world.control.costs.t_p is not None
    assert world.control.costs.t_p < 1.1
    chosen = world.control.latest
    assert chosen.lookahead > 2
    assert chosen.budget > 2
    world.draft.slowed = 10.0
    world.rounds(150)
    assert world.control.mode in ("sd", "ar")
    assert "instead of ssd at batch 1: the other has become slower" in caplog.text
    assert world.rounds(300) >= 0.97 * world.plain
    world.draft.slowed = 1.0
    world.until("ssd")
    world.rounds(100)
    assert world.rounds(60) > 0.8 * good
    assert world.control.changes.total() <= 6
    plain = Pair(simulated(), simulated())
    for sequence in (world.finished[0], world.finished[-1]):
        assert sequence.tokens[1:] == plain.run(sequence.tokens[:1], GREEDY, "ar")


@pytest.mark.parametrize("acceptance", [0.0, 0.05])
def test_a_useless_draft_ends_at_plain_decoding(acceptance: float) -> None:
    world = World(AUTO, acceptance=acceptance, draft_ms=4.0)
    world.rounds(150)
    assert world.rounds(500) >= 0.97 * world.plain
    assert acceptance or world.control.mode == "ar"


def test_a_fixed_mode_stays_while_acceptance_is_collapsed_and_each_request_decodes_plainly() -> None:
    world = World(SpeculationConfig(lookahead=3, fan_out=FanOutConfig(budget=4)), acceptance=0.0, draft_ms=2.0)
    world.rounds(270)
    assert world.control.alarm.on
    assert world.control.mode == "ssd"
    for sequence in world.finished:
        assert sequence.prospects.collapsed
        assert sum(record.drafted > 0 for record in sequence.rounds) == 44
    world.until_it(lambda: any(s.prospects.plain and s.emitted < 50 for s in world.running))  # in its first pause
    assert world.rounds(10) == pytest.approx(world.plain, rel=0.01)


def test_lookahead_and_budget_keep_the_preparation_within_a_verification() -> None:
    chosen: list[Setting] = []
    for draft_ms in (2.0, 5.0):
        world = World(replace(AUTO, mode="ssd"), draft_ms=draft_ms)
        world.rounds(100)
        assert world.control.costs.t_p is not None
        assert world.control.costs.t_p <= 1.05
        chosen.append(world.control.latest)
        assert chosen[-1].mode == "ssd"
    assert chosen[0].lookahead > chosen[1].lookahead


def test_the_backup_follows_the_text_and_the_batch() -> None:
    """Text that repeats itself, and a draft that is always wrong."""
    cycle, backwards = (
        [[Fraction(column == (token + step) % 5) for column in range(5)] for token in range(5)] for step in (1, 4)
    )
    target, draft = (ScriptedEngine(markov_table(rows), 5, 200, 4, 400) for rows in (cycle, backwards))
    pair = Pair(target, draft, others=("primary", "suffix", "ngram", "none"), budget=0)
    control = RoundControl(
        replace(AUTO, mode="ssd", backup="auto", lookahead=4, fan_out=FanOutConfig(budget=1)), max_budget=1
    )
    control.costs.verify.observe(5, 1.0)
    control.draft(True, (Step(1, 300_000_000),))
    used = Counter[str]()
    for seed in range(3):
        sequence = pair.sequence([0], SamplingParams(temperature=0, max_tokens=190, seed=seed), lookahead=4)
        while not sequence.finish_reason:
            pair.verifier.setting = control.setting(1)
            used[pair.verifier.setting.backup] += 1
            result = pair.step([sequence])
            control.observe([sequence], result)
            control.learn([sequence], result, pair.verifier.setting)
        sequence.release()
    assert used["primary"] > 0
    assert control.latest.backup in ("suffix", "ngram")
    assert control.report.acceptance["suffix"][0] > 0.9
    assert control.report.acceptance["none"][0] == 0


# Replicas of the draft


def paced(milliseconds: float) -> tuple[Step, ...]:
    """A draft whose forwards take so long for any row."""
    return tuple(Step(rows, round(rows * milliseconds * 1e6)) for rows in (1, 4, 16))


def replicas(count: int, fan_out: FanOutConfig) -> RoundControl:
    config = SpeculationConfig(mode="ssd", lookahead=4, fan_out=fan_out)
    control = RoundControl(config, max_budget=100, replicas=count, verify_steps=[Step(1, 10**8), Step(16, 10**8)])
    for replica in range(count):
        control.draft(True, paced(2.5), replica)
    return control


def test_the_budget_is_what_the_slowest_replica_can_prepare_times_those_that_are_there() -> None:
    """Verifying takes 100 ms. A replica has 87.5 left after the trunk: four steps of eight rows."""
    auto = FanOutConfig(budget="auto")
    alone, three = replicas(1, auto), replicas(3, auto)
    assert alone.setting(1).budget == 8
    assert three.setting(1).budget == 24
    slow = (Step(5, 25_000_000, True), Step(4, 20_000_000), Step(16, 80_000_000))
    for _ in range(600):  # the middle one takes twice as long from now on: 75 ms are left, which are 3 rows
        three.costs.observe_draft(msgspec.structs.replace(step, replica=1) for step in slow)
    for _ in range(1100):  # until it is looked at again
        three.setting(1)
    assert three.setting(1).budget == 9
    three.draft(False, replica=1)
    assert three.setting(1).budget == 16
    three.draft(False, replica=0)
    assert three.setting(1) == alone.setting(1)
    three.draft(True, paced(2.5), 0)
    three.draft(True, (), 1)
    assert three.setting(1).budget == 9


def test_a_stated_budget_is_that_of_all_replicas() -> None:
    """While some are away the others have no more to do than before."""
    control = replicas(3, FanOutConfig(budget=8))
    seen = [control.setting(1).budget]
    for replica in (2, 0, 1):
        control.draft(False, replica=replica)
        seen.append(control.setting(1).budget)
    assert seen == [8, 5, 2, 0]
    written = replicas(2, FanOutConfig(counts=(1, 0, 0, 0, 2)))
    written.draft(False, replica=1)
    assert written.setting(1).budget == 3


def test_times_are_those_of_the_slowest_replica_that_is_there() -> None:
    costs = replicas(2, FanOutConfig()).costs
    spans = [Span("verify", 0, 100), *(Span("prepare", 0, 50 + 100 * r, replica=r) for r in (0, 1))]
    costs.observe([*spans, Span("backup", 0, 40, replica=0)])
    costs.observe_work(spans, [Step(1, 20), Step(1, 30, replica=1)])
    assert (costs.t_p, costs.t_b) == pytest.approx((1.5, 0.4))
    costs.present = {0}
    assert (costs.t_p, costs.seconds("verify")) == pytest.approx((0.5, 1e-7))
    assert costs.slowest.overhead == pytest.approx(30e-9 * 0.05)
    costs.present = {1}
    assert costs.slowest.overhead == pytest.approx(120e-9 * 0.05)


# What never changes


def switching(pair: Pair, sequences: list[Sequence], choices: Callable[[int], Setting]) -> list[list[int]]:
    running, number = list(sequences), 0
    while running:
        pair.verifier.setting = choices(number)
        number += 1
        pair.step(running)
        for sequence in [s for s in running if s.finish_reason]:
            sequence.release()
            running.remove(sequence)
    assert pair.draft_pool.free_blocks == pair.draft_pool.num_blocks
    return [s.tokens[s.request.prompt_length :] for s in sequences]


some_settings = st.builds(
    Setting,
    mode=st.sampled_from(["ar", "sd", "ssd"]),
    lookahead=st.integers(1, 5),
    budget=st.integers(0, 8),
    backup=st.sampled_from(["primary", "suffix", "ngram", "none"]),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(params, prompts), min_size=1, max_size=3),
    st.lists(some_settings, min_size=2, max_size=8),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.4, 0.7]),
)
def test_coupled_emits_the_same_tokens_whatever_is_switched_every_few_rounds(
    requests: list[tuple[SamplingParams, list[int]]], chosen: list[Setting], lasting: int, min_confidence: float
) -> None:
    pair = Pair(
        scripted(TARGET),
        scripted(DRAFT),
        others=("primary", "suffix", "ngram", "none"),
        min_confidence=min_confidence,
        max_batch_tokens=6,
    )
    sequences = [pair.sequence(prompt, p, lookahead=5) for p, prompt in requests]
    plain = [Pair(scripted(TARGET), scripted(DRAFT)).run(prompt, p, "ar") for p, prompt in requests]
    assert switching(pair, sequences, lambda number: chosen[number // lasting % len(chosen)]) == plain


def test_ratio_keeps_the_targets_law_over_switches_and_speculations_that_end_early() -> None:
    """Chi-square of the first three tokens against the closed form, fixed seeds."""
    count = 1200
    law = np.array(TARGET, dtype=float) / 100
    joint = np.einsum("a,ab,bc->abc", law[0], law, law).ravel()
    seen: Counter[tuple[int, ...]] = Counter()
    ways = [Setting("ssd", 2, 2, "primary"), Setting("sd", 1, 0, "primary"), Setting("ssd", 3, 4, "ngram")]
    shorter = 0
    for start in range(0, count, 60):
        pair = Pair(
            scripted(TARGET, blocks=2000),
            scripted(DRAFT, blocks=4000),
            rule="ratio",
            others=("primary", "ngram"),
            width=4,
            min_confidence=0.45,
        )
        sequences = [
            pair.sequence([0], SamplingParams(temperature=1.0, seed=seed, max_tokens=3))
            for seed in range(start, start + 60)
        ]
        first = start // 60
        for tokens in switching(pair, sequences, lambda number, first=first: ways[(first + number) % 3]):  # type: ignore[misc]
            seen[tuple(tokens)] += 1
        shorter += sum(record.drafted < record.asked for sequence in sequences for record in sequence.rounds)
    counts = np.array([seen[a, b, c] for a in range(5) for b in range(5) for c in range(5)])
    kept = joint * count >= 5
    observed = np.append(counts[kept], counts[~kept].sum())
    expected = np.append(joint[kept], joint[~kept].sum()) * count
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert shorter > 150


def test_confidence_ends_a_speculation_where_the_draft_is_unsure() -> None:
    """The draft's best token has .4, .4, .4, .5 and .6 after 0 … 4."""
    sure = Pair(scripted(TARGET), scripted(DRAFT), min_confidence=0.45, budget=0)
    sequence = sure.sequence([4], SamplingParams(temperature=0, max_tokens=30))
    tokens = sure.finish([sequence])[0]
    assert tokens == Pair(scripted(TARGET), scripted(DRAFT)).run([4], sequence.request.params, "ar")
    assert {record.drafted for record in sequence.rounds[1:-3]} == {3}  # 4 is followed by itself
    unsure = Pair(scripted(TARGET), scripted(DRAFT), min_confidence=0.65)
    sequence = unsure.sequence([4], SamplingParams(temperature=0, max_tokens=10))
    assert unsure.finish([sequence])[0] == tokens[:10]
    assert {record.drafted for record in sequence.rounds} == {0}


# Around it


def test_a_model_is_measured_before_it_serves() -> None:
    device = Device(scripted(TARGET, block_size=4, blocks=3), 5.0, 1.0)
    steps = measure(device)  # type: ignore[arg-type]
    assert [step.rows for step in steps] == [1, 4]  # 16 do not fit into its pool
    assert all(step.nanoseconds > 0 for step in steps)


def test_what_may_be_automatic_and_beside_what() -> None:
    assert AUTO.limit == "ssd"
    assert AUTO.max_lookahead == 16
    assert max(AUTO.budgets(20)) == 20
    assert not SpeculationConfig().adaptive
    assert AUTO.adaptive
    deployment = DeploymentConfig("x", ModelConfig("t"), DraftConfig("d", kv_tokens=8192), AUTO)
    assert deployment.max_budget == 8192 // (2 * 8 * 16) == 32
    with pytest.raises(ConfigError, match="without a `draft:` section"):
        DeploymentConfig("x", ModelConfig("t"), speculation=AUTO)
    with pytest.raises(ConfigError, match="lookahead must be a number beside"):
        SpeculationConfig(lookahead="auto", fan_out=FanOutConfig(counts=(1, 2)))
    with pytest.raises(ConfigError, match="budget must be a number beside"):
        FanOutConfig(budget="auto", counts=(1, 2))
    with pytest.raises(ConfigError, match="min_confidence must be 0"):
        SpeculationConfig(min_confidence=1.0)
