"""The side-by-side measurement: what is run in which order, and what is made of the figures. No speed is asserted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from saguaro import cli
from saguaro.bench.speed import (
    Figures,
    Setting,
    SpeedPlan,
    SpeedRun,
    measure,
    medians,
    partings,
    prompts_by_kind,
    ratios,
)
from saguaro.bench.speed_command import placed, report
from saguaro.errors import ConfigError
from saguaro.orchestrator.config import SpeculationConfig, find_deployment, read_deployment
from saguaro.orchestrator.types import SamplingParams

EMPTY = Figures(*[None] * len(Figures.__dataclass_fields__))
DEVICES = {"ar": 4, "sd": 5, "ssd": 5}
SPEEDS = {("ar", 0): 1.0, ("sd", 2): 2.0, ("sd", 6): 3.0, ("sd", 4): 2.5, ("ssd", 4): 4.0}


@dataclass
class Stats:
    mode: str
    tokens_per_second: float
    rounds: int = 5
    ttft_ms: float = 3.0
    acceptance_length: float = 2.0
    hit_rate: float | None = 0.5
    e_hit: float | None = None
    e_miss: float | None = 1.5
    t_p: float | None = 0.8
    t_b: float | None = None
    verify_ms: float = 10.0
    wait_ms: float | None = None
    idle_ms: float | None = None
    branches: float | None = None
    near_ties: tuple[int, ...] = ()


@dataclass
class Result:
    stats: Stats
    token_ids: list[int]


@dataclass
class FakeLLM:
    """As fast as `SPEEDS` says. Notes what it was asked for."""

    calls: list[tuple[str, int | None, int, SamplingParams, list[str]]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams, *, mode: str, lookahead: int | None
    ) -> list[Result]:
        texts = [prompt[0]["content"] for prompt in prompts]
        self.calls.append((mode, lookahead, len(prompts), params, texts))
        return [Result(Stats(mode, SPEEDS[mode, lookahead or 0]), [1, 2]) for _ in prompts]

    def metrics(self) -> str:
        name = "saguaro_draft_tokens"
        return f'# TYPE {name} counter\n{name}_total{{position="2"}} {len(self.calls) * 5}\n'


def plan(**changes: Any) -> SpeedPlan:
    return SpeedPlan(**({"prompts": {"code": ("a", "b"), "chat": ("c",)}, "lookahead": 4, "repeats": 2} | changes))


def run(mode: str, speed: float, kind: str = "code", repeat: int = 0, **setting: Any) -> SpeedRun:
    figures = replace(EMPTY, tokens_per_second=speed)
    where = Setting(mode, 0 if mode == "ar" else 4, **setting)  # type: ignore[arg-type]
    return SpeedRun(kind, repeat, where, figures, ((1, 2, 3),), ((),))


def test_every_prompt_goes_through_every_setting_in_an_order_that_rotates() -> None:
    llm = FakeLLM()
    runs, sweep = measure(plan(), {"own": llm}, DEVICES, lambda text: None)  # type: ignore[arg-type, dict-item]
    assert sweep == []
    assert [(r.repeat, r.kind) for r in runs[::3]] == [(0, "code"), (0, "chat"), (1, "code"), (1, "chat")]
    assert ["".join(r.setting.mode[-2] for r in runs[i : i + 3]) for i in (0, 3, 6)] == ["ass", "ssa", "sas"]
    measured = [call for call in llm.calls if call[3].max_tokens == 96]
    assert len(measured) == len(runs)
    assert [call[4] for call in measured[:9:3]] == [["a"], ["c"], ["b"]]
    assert all(call[3].ignore_eos for call in measured)
    assert [run.drafted for run in runs[:3]] == [(), (0, 5, 0, 0), (0, 5, 0, 0)]  # of its own call, not of all
    assert runs[2].figures.tokens_per_second_per_device == pytest.approx(4.0 / 5)


def test_a_lookahead_that_the_deployment_decides_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPEEDS, ("ssd", 0), 9.0)
    llm = FakeLLM()
    runs, _ = measure(plan(lookahead=0, modes=("ssd",)), {"own": llm}, DEVICES, lambda text: None)  # type: ignore[arg-type, dict-item]
    assert {call[:2] for call in llm.calls} == {("ssd", None)}
    assert {(run.setting.lookahead, run.drafted) for run in runs} == {(0, (0, 5))}  # as far as any was drafted
    config = replace(read_deployment(find_deployment("tiny")), speculation=SpeculationConfig(lookahead="auto"))
    assert placed(config, "own", plan(lookahead=0), Path()).speculation.lookahead == "auto"


def test_sd_stands_with_its_fastest_lookahead() -> None:
    runs, sweep = measure(plan(sd_lookaheads=(2, 6)), {"own": FakeLLM()}, DEVICES, lambda text: None)  # type: ignore[arg-type, dict-item]
    assert {r.setting.lookahead for r in sweep} == {2, 6}
    assert {(r.setting.mode, r.setting.lookahead) for r in runs} == {("ar", 0), ("sd", 6), ("ssd", 4)}
    document = report(runs, sweep)
    assert [(row["mode"], row["lookahead"], row["swept"]) for row in document["runs"]] == [
        ("sd", 2, True),
        ("sd", 6, False),
        ("ar", 0, False),
        ("ssd", 4, False),
    ]
    assert {row["ratio"]: row["median"] for row in document["ratios"]} == pytest.approx(
        {"ssd/sd": 4 / 3, "ssd/ar": 4.0, "sd/ar": 3.0}
    )


def test_a_batch_takes_the_prompts_of_its_kind_in_turn() -> None:
    llm = FakeLLM()
    measure(plan(batches=(3,), repeats=1), {"own": llm}, DEVICES, lambda text: None)  # type: ignore[arg-type, dict-item]
    assert llm.calls[-1][4] == ["c", "c", "c"]
    assert ["a", "b", "a"] in [call[4] for call in llm.calls]


def test_ratios_pair_runs_over_the_same_prompts_in_the_same_setting() -> None:
    runs = [run("ar", 2.0), run("ssd", 6.0), run("ar", 4.0, repeat=1), run("ssd", 4.0, repeat=1)]
    runs += [run("ssd", 100.0, batch=2), run("ssd", 100.0, placement="all"), run("ssd", 100.0, temperature=1.0)]
    assert ratios(runs, "ssd", "ar") == [3.0, 1.0]


def test_a_median_is_over_the_runs_that_have_the_figure() -> None:
    runs = [run("ar", 1.0), run("ar", 9.0), run("ar", 3.0)]
    runs[0] = replace(runs[0], figures=replace(runs[0].figures, p_hit=0.5))
    assert (medians(runs).tokens_per_second, medians(runs).p_hit, medians(runs).t_p) == (3.0, 0.5, None)


def test_greedy_answers_that_part_are_told_from_near_ties() -> None:
    plain = run("ar", 1.0)
    same, tied, wrong = (run(mode, 1.0, repeat=0) for mode in ("sd", "ssd", "ssd"))
    tied = replace(tied, tokens=((1, 9, 3),), near_ties=((1,),))
    wrong = replace(wrong, tokens=((1, 9, 3),))
    assert partings([plain, same, tied, wrong]) == (1, 1)
    sampled = [replace(r, setting=replace(r.setting, temperature=1.0)) for r in (plain, wrong)]
    assert partings(sampled) == (0, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": {}}, "prompts must be at least one text"),
        ({"batches": (0,)}, "batches must be between 1 and 256"),
        ({"modes": ("fast",)}, "modes must be among ar, sd, ssd"),
        ({"sd_lookaheads": (99,)}, "sd_lookaheads must be 1 to 32"),
        ({"temperatures": (-1.0,)}, "temperatures must be 0 to 5"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
        ({"repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(**change)


def test_there_are_prompts_of_four_kinds() -> None:
    assert list(prompts_by_kind()) == ["code", "maths", "chat", "instructions"]
    assert all(len(texts) == 1 for texts in prompts_by_kind(1).values())


def test_the_quick_bench_of_the_tiny_pair_runs(
    store: Path, tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["saguaro", "bench", "tiny"])
    assert cli.main(["bench", "tiny", "--quick", "--json", "--store", str(store), "--out", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "bench.json").read_text())
    assert [row["mode"] for row in document["runs"]] == ["ar", "sd", "ssd"]
    assert all(row["tokens_per_second"] > 0 for row in document["runs"])
    assert document["greedy_answers_that_part"]["elsewhere"] == 0
    assert {row["ratio"] for row in document["ratios"]} == {"ssd/sd", "ssd/ar", "sd/ar"}
    assert document["command"] == "saguaro bench tiny"
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "speed.png", "timeline.png"}


def test_both_placements_are_measured_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("saguaro.bench.speed_command.bench", lambda *_, **options: asked.append(options["placements"]))
    for named in ("both", "all", "own all"):
        assert cli.main(["bench", "tiny", "--placement", *named.split()]) == 0
    assert asked == [["own", "all"], ["all"], ["own", "all"]]
