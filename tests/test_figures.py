"""The paper's figures: what is made of replays, runs and the model, and that what is committed can be drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from masks import mask_of
from saguaro.bench import figure_data as data
from saguaro.bench import figures, recorded
from saguaro.bench.replay import Ranked, Scored, Text
from saguaro.bench.tune import Judge, Times
from saguaro.engines.profile import Agreement, Profile
from saguaro.errors import ConfigError
from saguaro.orchestrator import analysis
from saguaro.orchestrator.config import DeploymentConfig, FanOutConfig, SpeculationConfig
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import RequestSampling, SamplingParams
from saguaro.simulate import Pair, Setting, predict
from test_replay import config, running, scored
from test_speed import FakeLLM, Result, Stats

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "figures"
WIDTH, LENGTH = 64, 400


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    """Of a scripted pair at temperature 1, under both rules."""
    both, found = running(config()), []
    for seed in range(4):
        sequence = both.sequence([seed % 5, 4, 0], SamplingParams(temperature=1.0, seed=seed, max_tokens=80))
        both.finish([sequence])
        found.append({rule: scored(both, sequence, rule) for rule in ("coupled", "ratio")})
    return found


def judge(answers: list[dict]) -> Judge:
    clock = Times(dict.fromkeys((0, 1, 3), 1.0), dict.fromkeys((1, 3), 0.1), dict.fromkeys((1, 2, 4, 8), 0.1))
    return data.judge(answers, SpeculationConfig(lookahead=3, width=5, fan_out=FanOutConfig(acceptance=0.6)), clock, 5)


def of_a_power_law(acceptance: float, scale: float, exponent: float) -> list[dict]:
    """Texts at whose positions the draft is right with that probability, and otherwise F guesses miss with c F^-r."""
    draw = np.random.default_rng(0)
    request = RequestSampling(SamplingParams(temperature=0), 0, 1)
    found = []
    for _ in range(12):
        right, tail = draw.random(LENGTH) < acceptance, (scale / draw.random(LENGTH)) ** (1 / exponent)
        place = np.where(right, 0, 1 + np.floor(tail)).clip(max=WIDTH).astype(np.int64)
        ids = np.tile(np.arange(WIDTH), (LENGTH, 1))
        found.append({"coupled": Scored(Text((WIDTH + 1,), tuple(place.tolist()), request), Ranked(ids, place))})
    return found


def test_a_replayed_power_law_gives_its_own_exponent_and_scale() -> None:
    """Acceptance is low, so that full acceptance, after which no guess is excluded, hardly ever happens."""
    clock = data.untimed(4)
    law = Judge(of_a_power_law(0.2, 0.6, 0.7), clock, SpeculationConfig(lookahead=4), range(WIDTH))
    found = data.miss_curve(law, "coupled", "primary", 4)
    assert [point["fan_out"] for point in found["points"]] == list(data.FAN_OUTS)
    for name in ("after_hit", "after_miss"):
        fit = found["fits"][name]
        assert fit["exponent"] == pytest.approx(0.7, abs=0.03)
        assert fit["scale"] == pytest.approx(0.6, abs=0.02)
        assert fit["r_squared"] > 0.99
    for point in found["points"]:
        assert point["overall"] == pytest.approx(1 - 0.6 * point["fan_out"] ** -0.7, abs=0.02)
        assert point["chain"] == pytest.approx(point["overall"], abs=0.02)


def test_the_law_through_exact_points_is_exact() -> None:
    points = [{"fan_out": f, "after_hit": 0.4 * f**-0.6} for f in (1, 4, 32)]
    points.append({"fan_out": 64, "after_hit": 0.0})  # nothing missed: says no power
    found = data.law(points, "after_hit")
    assert found == pytest.approx({"scale": 0.4, "exponent": 0.6, "r_squared": 1.0})
    assert data.law(points[:1], "after_hit") is None


@pytest.mark.parametrize("backup", ["primary", "ngram", "random"])
@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_answers_from_a_file_are_replayed_as_before(
    answers: list[dict], tmp_path: Path, rule: Any, backup: Any
) -> None:
    packed = [recorded.pack(scores) for scores in answers]
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"temperature": 1.0, "width": 5, "answers": packed, "deployment": "scripted"}))
    loaded, about = recorded.load(path)
    assert about == {"temperature": 1.0, "width": 5, "deployment": "scripted"}
    before, after = judge(answers), judge(loaded)
    lists = {"policy": "uniform", "budget": 8}
    setting = before.setting(lookahead=3, rule=rule, backup=backup, fan_out=lists)
    assert after.rounds(setting) == before.rounds(setting)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="delete it to record again"):
        recorded.load(path)


def test_temperatures_and_the_trade_off_are_judged(answers: list[dict]) -> None:
    one = judge(answers)
    rows = data.by_temperature([one], 3, 8)
    assert [(row["rule"], row["lists"]) for row in rows] == [
        (rule, lists) for rule in ("coupled", "ratio") for lists in ("sd", "uniform", "geometric")
    ]
    sd = [row for row in rows if row["lists"] == "sd"]
    assert {row["hit_rate"]["mean"] for row in sd} == {0.0}
    assert all(row["speed"] == pytest.approx(row["tokens_per_round"]["mean"] / (1 + row["t_b"])) for row in sd)
    swept = data.trade_off(one, 3, 4)
    assert [row["C"] for row in swept] == list(data.tune.SCALES)
    assert swept[0]["acceptance"]["mean"] > swept[-1]["acceptance"]["mean"]


def test_the_example_of_theorem_19() -> None:
    found = data.residual_example()
    assert found["cache_aware"]["q"] == pytest.approx([0.47, 0.47, 0.03, 0.03])
    for name, hits in (("plain", {1: 0.0, 2: 0.5}), ("cache_aware", {1: 0.5, 2: 1.0})):
        assert found[name]["acceptance"] == pytest.approx(0.98)
        assert found[name]["hit_rate"] == pytest.approx(hits)
        assert sum(found[name]["residual"]) == pytest.approx(1.0)


def test_more_draft_devices_by_the_model() -> None:
    """The step's times are those of the profile at one row and at the whole batch."""
    target, draft = Profile({1: 20.0}), Profile({1: 2.0, 16: 4.0}, Agreement(0.9, 0.4, 0.6))
    rows = data.by_devices(target, draft, lookahead=3, budget=4, batch=4)
    pair = Pair(0.9, 0.1, 1 / 15, 0.4, 0.6)
    assert [row["devices"] for row in rows] == list(data.DEVICES)
    assert rows[1]["ssd"] == pytest.approx(predict(pair, Setting(3, 4, 4, 2)).ssd)
    assert rows[0]["sd"] == pytest.approx(analysis.tokens_per_round(0.9, 3) / (1 + 3 * 0.1 * (1 + 3 / 15)))
    hits = [row["p_hit"] for row in rows]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]


def test_the_paper_s_means() -> None:
    speeds = [row for *_, row in data.published(figures.LLAMA)]
    assert sum(row["ssd"] for row in speeds) / sum(row["sd"] for row in speeds) == pytest.approx(1.58, abs=0.005)


def test_figure_8_is_the_golden_mask(tmp_path: Path) -> None:
    """Of the plugin now, and as committed."""
    assert figures.main(["8", "--out", str(tmp_path), "--data", str(tmp_path)]) == 0
    assert (tmp_path / "fig8.png").stat().st_size > 5000
    made = json.loads((tmp_path / "fig8.json").read_text())["data"]
    assert made == json.loads((RESULTS / "fig8.json").read_text())["data"]
    rows = torch.tensor([[int(bit) for bit in row] for row in made["rows"]], dtype=torch.bool)
    prefix = made["prefix"]
    assert torch.equal(rows, mask_of([(4, 4, 4, 4)], [prefix], depth=2).dense(prefix + 4 + 3 * 16))
    assert rows.sum(1).tolist() == [prefix + (row // 4 + 1) + 3 for row in range(16)]


@dataclass
class Traced(Result):
    spans: tuple[Span, ...]


class TracedLLM:
    """Any mode is as fast as K says, and was at work for a while."""

    def __init__(self, config: DeploymentConfig, store: Path) -> None:
        self.lookahead = config.speculation.max_lookahead

    def __enter__(self) -> TracedLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: Any, params: Any, *, mode: str, lookahead: int | None, trace: bool = False) -> Any:
        spans = tuple(Span(n, 1000 + i, 1001 + i) for i, n in enumerate(("prepare", "verify", "wait", "verify")))
        found = Stats(mode, 10.0 + (lookahead or 0))
        return [Traced(found, [1, 2], spans if trace else ()) for _ in prompts]

    def metrics(self) -> str:
        return FakeLLM().metrics()


@pytest.mark.parametrize("number", [1, 6, 7, 11])
def test_runs_become_figures(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    monkeypatch.setattr(data, "LLM", TracedLLM)
    monkeypatch.setattr(data, "devices_of", lambda *_: {"ar": 4, "sd": 5, "ssd": 5})
    figures.make(number, figures.Sources(store, tmp_path, RESULTS.parent, lambda text: None), tmp_path)
    found = json.loads((tmp_path / f"fig{number}.json").read_text())["data"]
    committed = json.loads((RESULTS / f"fig{number}.json").read_text())["data"]
    assert shape(found) == shape(committed)
    if number == 1:
        assert found["traces"]["ssd"] == [["prepare", 0, 1], ["verify", 1, 2], ["wait", 2, 3], ["verify", 3, 4]]


def shape(value: Any) -> Any:
    """The keys of mappings, of lists those of the first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value[:1]] if isinstance(value, list) else None


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def speeds(config: Any, deployment: str, plan: Any, *_: Any) -> dict[str, Any]:
        calls.append((deployment, config.speculation.backup, config.speculation.fan_out.budget, plan.modes))
        return {"runs": [{"mode": mode} for mode in plan.modes]}

    monkeypatch.setattr(data, "speeds", speeds)
    sources = figures.Sources(tmp_path, tmp_path, tmp_path, lambda text: None)
    assert sources.backups(figures.QWEN) == sources.backups(figures.QWEN)
    assert calls == [(figures.QWEN, "primary", 5, ("sd", "ssd")), (figures.QWEN, "random", 5, ("ssd",))]
    assert [row["backup"] for row in sources.backups(figures.QWEN)] == [None, "primary", "random"]


@pytest.mark.parametrize("number", figures.FIGURES)
def test_committed_figures_are_whole_and_can_be_drawn(number: int, tmp_path: Path) -> None:
    document = json.loads((RESULTS / f"fig{number}.json").read_text())
    kind = figures.FIGURES[number]
    assert set(document) == {
        *("figure", "title", "caption", "data", "deployment", "machine", "versions", "command"),
    }
    assert (document["title"], document["caption"], document["deployment"]) == (
        kind.title,
        kind.caption,
        kind.deployment,
    )
    assert document["command"].startswith("python -m saguaro.bench.figures ")
    (tmp_path / f"fig{number}.json").write_text(json.dumps(document))
    assert figures.draw(number, tmp_path).stat().st_size > 5000
    assert (RESULTS / f"fig{number}.png").stat().st_size < 80_000
    assert f"(fig{number}.png)" in (RESULTS / "README.md").read_text()


def test_without_data_there_is_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["8", "--draw", "--out", str(tmp_path)]) == 1
    assert "leave out --draw" in " ".join(capsys.readouterr().err.split())
    assert figures.main(["4", "--out", str(tmp_path), "--results", str(tmp_path)]) == 1
    assert "tune_qwen_coder_cpu.json cannot be read" in " ".join(capsys.readouterr().err.split())
