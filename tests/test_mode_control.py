"""The mode that runs is the fastest one, whatever the draft does, and trying others costs next to nothing.

Worlds with stated costs: time is what they say it is, and every run is the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from saguaro.orchestrator.mode_control import Change, Measured, ModeControl
from saguaro.orchestrator.types import Mode


@dataclass
class World:
    """Rounds in units of a plain step."""

    draft: float = 0.1  # a draft step
    acceptance: float = 0.8
    lookahead: int = 4
    hit: float = 0.85
    noise: float = 0.1  # of times, relative
    hang: float = 0.0  # seconds a round waits for an answer that does not come
    row: float = 0.0  # of a verification of one more row
    seed: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    last: Mode = "ar"
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def round(self, mode: Mode, rows: int = 1) -> tuple[int, float]:
        tokens = rows
        verify = 1 + self.row * (rows - 1)
        if mode != "ar":
            verify = 1 + self.row * (rows * (1 + self.lookahead) - 1)
            verify = max(verify, (self.lookahead + 1) * self.draft) if mode == "ssd" else verify
            missing = mode == "sd" or self.last != "ssd" or self.random.random() > self.hit**rows
            verify += self.lookahead * self.draft * missing + self.hang
            for _ in range(rows * (not self.hang)):
                for _ in range(self.lookahead):
                    if self.random.random() >= self.acceptance:
                        break
                    tokens += 1
        seconds = verify * max(0.3, self.random.gauss(1, self.noise))
        self.last = mode
        self.seconds += seconds
        self.tokens += tokens / rows
        return tokens, seconds


class Run:
    def __init__(self, world: World, start: Mode = "ssd") -> None:
        self.world = world
        self.changes: list[Change] = []
        self.control = ModeControl(("ssd", "sd", "ar"), auto=True, on_change=self.changes.append)
        self.control.start(start)
        self.used: list[Mode] = []

    def rounds(self, count: int, rows: int = 1) -> float:
        """Tokens per second of a sequence."""
        seconds, tokens = self.world.seconds, self.world.tokens
        for _ in range(count):
            mode = self.control.mode(rows)
            self.used.append(mode)
            emitted, took = self.world.round(mode, rows)
            self.control.observe(Measured(mode, rows, emitted, took, settled=True))
        return (self.world.tokens - tokens) / (self.world.seconds - seconds)


@cache
def speed(mode: Mode, rounds: int = 3000, rows: int = 1, **world: float) -> float:
    alone = World(**world, seed=99)  # type: ignore[arg-type]
    for _ in range(rounds):
        alone.round(mode, rows)
    return alone.tokens / alone.seconds


WORLDS: dict[str, dict[str, float]] = {
    "a good draft": {},
    "useless": {"acceptance": 0.0},
    "useless and slow": {"acceptance": 0.0, "draft": 3.0},
    "slow": {"draft": 1.0},
    "as fast as nothing": {"acceptance": 0.2},
    "never hits": {"hit": 0.0},
    "hangs": {"hang": 40.0},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("start", "seed"), [("ssd", 0), ("ar", 1)])
def test_it_ends_at_the_speed_of_the_fastest_mode(world: str, start: Mode, seed: int) -> None:
    costs = WORLDS[world]
    run = Run(World(**costs, seed=seed), start)  # type: ignore[arg-type]
    run.rounds(1500)
    reached = run.rounds(3000)
    plain, fastest = speed("ar", **costs), max(speed(mode, **costs) for mode in ("ar", "sd", "ssd"))  # type: ignore[arg-type]
    assert reached >= 0.97 * plain
    assert reached >= 0.93 * fastest
    assert len(run.changes) <= 4  # `never hits` is a tie of sd and ssd


def test_a_useless_draft_costs_less_than_three_per_cent_from_the_start() -> None:
    run = Run(World(acceptance=0.0))
    assert run.rounds(5000) >= 0.97 * speed("ar")
    assert [(change.before, change.after, change.reason) for change in run.changes] == [("ssd", "ar", "faster")]
    assert run.control.probes["ssd"] > 2  # it does look whether that is still so


def test_a_draft_that_becomes_slow_is_left_and_taken_again_when_it_is_fast() -> None:
    run = Run(World(seed=1))
    run.rounds(1000)
    assert run.control.effective == "ssd"
    run.world.draft = 1.0
    run.rounds(150)
    assert run.control.effective in ("sd", "ar")
    assert run.changes[0].reason == "slower"
    assert run.changes[0].rate_before is not None
    assert run.rounds(4000) >= 0.97 * speed("ar")
    slow = len(run.changes)
    run.world.draft = 0.1
    run.rounds(4000)
    assert run.control.effective == "ssd"
    assert {change.reason for change in run.changes[slow:]} == {"faster"}


@pytest.mark.parametrize("seed", range(2))
def test_noise_does_not_make_it_flap(seed: int) -> None:
    """Times vary by 40%, tokens by nature; two modes are nearly as fast as each other."""
    run = Run(World(noise=0.4, hit=0.2, draft=0.12, seed=seed))
    run.rounds(5000)
    assert len(run.changes) <= 3
    assert run.rounds(2000) >= 0.9 * max(speed(mode, noise=0.4, hit=0.2, draft=0.12) for mode in ("sd", "ssd"))  # type: ignore[arg-type]


def test_probes_are_short_and_become_rare() -> None:
    run = Run(World(noise=0.0, seed=3))
    run.rounds(6000)
    other = [mode != "ssd" for mode in run.used]
    assert sum(other[:1000]) < 120
    assert sum(other[3000:]) < 0.05 * 3000
    longest = max(len(part) for part in "".join("x" if o else " " for o in other).split())
    assert longest <= 64 + 2


def test_each_batch_size_has_its_own_mode() -> None:
    """With a verification that is bound by its rows, speculation pays alone and not in a crowd."""
    run = Run(World(row=0.2, hit=0.9))
    assert speed("ssd", row=0.2, hit=0.9) > 1.5 * speed("ar", row=0.2)
    assert speed("ssd", rows=16, row=0.2, hit=0.9) < 0.9 * speed("ar", rows=16, row=0.2)
    run.rounds(600)
    assert run.control.effective == "ssd"
    run.rounds(600, rows=16)
    assert run.control.effective == "ar"
    before = len(run.changes)
    run.rounds(600)
    assert run.control.effective == "ssd"
    assert [change.reason for change in run.changes[before:]] == ["batch"]
    assert {batch for batch, _ in run.control.rates()} == {1, 16}
    before = len(run.changes)
    for _ in range(100):  # a guest of a few rounds changes nothing
        run.rounds(2, rows=16)
        run.rounds(5)
    assert len(run.changes) == before


def test_a_draft_that_is_away_means_plain_decoding_and_its_return_the_mode_before() -> None:
    run = Run(World())
    run.rounds(500)
    run.control.draft(False)
    assert run.control.effective == run.control.mode(1) == "ar"
    run.rounds(50)
    run.control.draft(True)
    run.control.draft(True)
    assert run.control.effective == "ssd"
    assert [change.reason for change in run.changes] == ["draft_lost", "draft_back"]


def test_a_fixed_mode_runs_whatever_is_measured() -> None:
    world = World(draft=1.0)  # slower than plain decoding: the decision of whoever wrote the deployment
    changes: list[Change] = []
    control = ModeControl(["sd"], auto=False, on_change=changes.append)
    used: list[Mode] = []
    for _ in range(400):
        used.append(control.mode(1))
        tokens, seconds = world.round(used[-1])
        control.observe(Measured(used[-1], 1, tokens, seconds, settled=True))
    assert set(used) == {"sd"}
    assert changes == []


def test_rounds_that_did_not_run_as_they_were_meant_to_say_nothing() -> None:
    control = ModeControl(("ssd", "sd", "ar"), auto=True, on_change=lambda change: None)
    for _ in range(200):
        control.observe(Measured(control.mode(1), 1, 1, 1.0, settled=False))
    assert control.rates() == {}
    assert control.effective == "ssd"
