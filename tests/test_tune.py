"""`saguaro tune`: what it predicts follows from what was measured, and what it recommends can be read again."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from saguaro.bench import tune
from saguaro.bench.ranked_replay import roll_out
from saguaro.bench.replay import Played, answer_logits
from saguaro.bench.tune_batches import BATCHES, REPLICAS
from saguaro.bench.tune_command import TunePlan, plan_of, run, section_of
from saguaro.bench.tune_report import FIGURES, tables
from saguaro.cli import main
from saguaro.errors import ConfigError
from saguaro.orchestrator import analysis
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig, read_deployment
from saguaro.orchestrator.fan_out_policy import MissCurve
from saguaro.orchestrator.types import SamplingParams
from test_replay import config, running, scored
from test_round import DRAFT, scripted

KS, BUDGETS = (1, 2, 4), (1, 2, 4, 8)
DEPLOYMENT = "name: mine\ntarget:\n  recipe: tiny-target\n  kv_tokens: 4096\ndraft:\n  recipe: tiny-draft\n"


def times(draft: float, *, more_rows: float = 0.0, trunk: float | None = None) -> tune.Times:
    """Of a target that takes a second whatever it verifies."""
    return tune.Times(
        dict.fromkeys((0, *KS), 1.0),
        dict.fromkeys(KS, draft if trunk is None else trunk),
        {b: draft * (1 + more_rows * (b - 1)) for b in BUDGETS},
    )


@pytest.fixture(scope="module")
def texts() -> list[dict]:
    both, found = running(config()), []
    for seed in range(4):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=80)
        sequence = both.sequence([seed % 5, 4, 0], params)
        both.finish([sequence])
        found.append({rule: scored(both, sequence, rule) for rule in ("coupled", "ratio")})
    return found


def judge(texts: list[dict], clock: tune.Times) -> tune.Judge:
    base = SpeculationConfig(width=5, fan_out=FanOutConfig(budget=4, acceptance=0.6))
    return tune.Judge(texts, clock, base, range(5))


def test_the_predicted_speed_is_theorem_7(texts: list[dict]) -> None:
    found = judge(texts, times(0.3, more_rows=0.1))
    for k in KS:
        for backup in ("primary", "none", "ngram"):
            choice = found.judge(found.setting(lookahead=k, backup=backup))
            e_hit, e_miss = choice.e_hit or 0.0, choice.e_miss or 0.0
            expected = analysis.ssd_speed_up(
                choice.hit_rate.mean, e_hit, e_miss, choice.t_p, choice.t_b, interrupt=False
            )
            assert choice.speed == pytest.approx(expected)
            assert choice.hit_rate.low <= choice.hit_rate.mean <= choice.hit_rate.high
        sd = found.judge(found.setting(lookahead=k).__class__(mode="sd", lookahead=k, width=5))
        assert (sd.hit_rate.mean, sd.t_p, sd.budget) == (0, 0, 0)
        assert sd.speed == pytest.approx(sd.tokens_per_round.mean / (1 + k * 0.3))


def of_one_rule(texts: list[dict]) -> list[dict]:
    """As at temperature 0."""
    return [{"coupled": text["coupled"]} for text in texts]


def test_what_is_best_depends_on_the_clock(texts: list[dict]) -> None:
    texts = of_one_rule(texts)
    free_rows = tune.best([judge(texts, times(0.15))], KS, BUDGETS)
    costly_rows = tune.best([judge(texts, times(0.2, more_rows=2.0))], KS, BUDGETS)
    assert free_rows.budgets()[-1] > costly_rows.budgets()[-1]
    hopeless = judge(texts, times(30.0))
    assert tune.recommended([hopeless], tune.best([hopeless], KS, BUDGETS), KS).mode == "ar"
    slow_to_prepare = judge(texts, times(0.05, trunk=20.0))
    assert tune.recommended([slow_to_prepare], tune.best([slow_to_prepare], KS, BUDGETS), KS).mode == "sd"


def test_sweeps_vary_one_thing_at_a_time(texts: list[dict]) -> None:
    found = judge(texts, times(0.1, more_rows=0.05))
    measured = tune.curves([text["coupled"] for text in texts], 4, found.base)
    acceptance, rejected, whole = measured
    assert len(acceptance) == 4
    assert 0 < min(acceptance) <= max(acceptance) < 1
    assert rejected.rounds + whole.rounds > 50
    misses = list(rejected.misses.values())
    assert misses == sorted(misses, reverse=True)
    chosen = tune.best([found], KS, BUDGETS)
    swept = tune.sweeps(found, chosen, measured, KS, BUDGETS)
    assert [choice.lookahead for choice in swept.lookahead] == list(KS)
    assert [choice.budget for choice in swept.budget] == list(BUDGETS)
    assert {choice.policy for choice in swept.lists} == {"uniform", "geometric", "auto"}
    rates = [choice.hit_rate.mean for choice in swept.budget]
    assert rates == sorted(rates)
    plain = tune.sweeps(judge(of_one_rule(texts), found.times), chosen, measured, (1,), (1,))
    assert not plain.rules
    assert not plain.cache_aware
    # Theorem 15: what C < 1 takes from acceptance it gives to the hit rate. Of a list the same for all.
    first, last = swept.cache_aware[0], swept.cache_aware[-1]
    assert first.acceptance.mean > last.acceptance.mean
    assert [choice.rule for choice in swept.rules] == ["coupled", "ratio"]


def with_rollouts(texts: list[dict]) -> list[dict]:
    draft = scripted(DRAFT, blocks=800, max_model_len=800)
    found = []
    for text in of_one_rule(texts):
        scored = text["coupled"]
        said = answer_logits(draft, scored.text)
        found.append({"coupled": replace(scored, rollouts=roll_out(draft, scored.text, said, max(KS), 5))})
    return found


def test_rounds_of_ranked_take_the_time_of_their_own_rows() -> None:
    clock = tune.Times({0: 1.0, 2: 1.2, 4: 1.4}, {2: 0.2, 4: 0.4}, {1: 0.1, 2: 0.3, 4: 0.4})
    rounds = [
        Played(True, 4, 2, None, (4.0, 2.0, 1.0, 0.5)),  # 0.4 + (0.4 + 0.3 + 0.1 + 0.05), before the 1.4 of the target
        Played(False, 3, 3, None, (2.0, 0.0, 0.0, 0.0)),  # 0.3 + 0.3, in less than 1.3, behind 3 tokens of the backup
        Played(True, 0, 0, None, (3.0, 3.0, 3.0, 0.0)),  # 0.2 + 3 * 0.35, in more than 1.0
    ]
    found = clock.of_ranked(rounds)
    assert found.verify == pytest.approx((1.4 + 1.3 + 1.0) / 3)
    assert found.prepare == pytest.approx((1.25 + 0.6 + 1.25) / 3)
    assert found.backup == pytest.approx(0.3)
    assert found.whole == pytest.approx((1.4 + 1.3 + 0.3 + 1.25) / 3)


def test_ranked_is_recommended_where_it_is_faster(texts: list[dict]) -> None:
    """The draft knows where a rejection is likely, and a list does not."""
    found = judge(with_rollouts(texts), times(0.1, more_rows=0.2))
    lists = [found.setting(lookahead=k, fan_out={"budget": b}) for k in KS for b in BUDGETS]
    chosen = max(lists, key=found.speed)
    least = (0.08, 0.01)
    ranked = tune.best_ranked([found], KS, (4, 8), least)
    assert [each.fan_out.least_probability for each in ranked] == list(least)
    assert {each.fan_out.policy for each in ranked} == {"ranked"}
    swept = tune.sweeps(
        found, chosen, tune.curves([t["coupled"] for t in found.scored], 4, found.base), KS, BUDGETS, ranked
    )
    assert [choice.least_probability for choice in swept.ranked] == list(least)
    fewer, more = swept.ranked
    assert more.hit_rate.mean >= fewer.hit_rate.mean
    assert more.t_p > fewer.t_p
    advised = tune.recommended([found], chosen, KS, ranked)
    assert advised in ranked
    assert "least_probability" in section_of(advised)
    # Unless its rounds take longer: here every row of the draft does.
    slow = judge(found.scored, times(0.05, more_rows=60.0))
    few = tune.best([slow], KS, BUDGETS)
    assert tune.recommended([slow], few, KS, tune.best_ranked([slow], KS, (8,), (0.01,))).fan_out.policy != "ranked"


def test_ranked_is_offered_only_where_it_can_be_replayed(texts: list[dict]) -> None:
    without = judge(of_one_rule(texts), times(0.15))
    assert tune.best_ranked([without], KS, (4,), (0.01,)) == []
    both_rules = [text | rolled for text, rolled in zip(texts, with_rollouts(texts), strict=True)]
    coupled = judge(both_rules, times(0.15))
    assert tune.best_ranked([coupled], KS, (4,), (0.01,))
    drawn = tune.Judge(both_rules, times(0.15), replace(coupled.base, rule="ratio"), range(5))
    assert tune.best_ranked([drawn], KS, (4,), (0.01,)) == []


def test_batches_and_replicas_are_predicted_by_the_model_that_decides_on_line(texts: list[dict]) -> None:
    found = judge(of_one_rule(texts), times(0.1, more_rows=0.2))
    measured = tune.curves([text["coupled"] for text in texts], 4, found.base)
    swept = tune.sweeps(found, tune.best([found], KS, BUDGETS), measured, KS, BUDGETS)
    by = {(predicted.replicas, predicted.batch): predicted for predicted in swept.batches}
    assert len(by) == len(swept.batches) == len(BATCHES) * len(REPLICAS)
    for predicted in swept.batches:
        of_ssd = max(predicted.backups.values())
        assert predicted.speed >= of_ssd - 1e-9
        if predicted.setting.mode == "ssd":
            assert predicted.speed == pytest.approx(of_ssd)
            assert predicted.backups[predicted.setting.backup] == pytest.approx(of_ssd)
    # More of them never prepare less; with one sequence nobody can be deferred behind another.
    speeds = [[by[replicas, batch].speed for replicas in REPLICAS] for batch in BATCHES]
    assert all(few <= many + 1e-9 for row in speeds for few, many in itertools.pairwise(row))
    assert by[1, 1].backups["defer"] == pytest.approx(by[1, 1].backups["primary"])
    slow = judge(of_one_rule(texts), times(0.3))  # free rows, and a draft that is slow to wait for
    waiting = tune.sweeps(slow, tune.best([slow], KS, BUDGETS), measured, KS, BUDGETS).batches
    assert all(p.backups["defer"] > p.backups["primary"] for p in waiting if p.batch == 4)
    assert "Predicted, not run" in str(list(tables([swept], found.times, []))[3].title)


def test_measured_curves_become_the_prior() -> None:
    fit = tune.Fit(MissCurve(0.3, 0.8), 0.99, 4)
    found = [([0.9, 0.7], tune.Curve({}, fit, 300), tune.Curve({}, None, 9))]
    fan_out = tune.fitted(SpeculationConfig(), found)
    assert (fan_out.acceptance, fan_out.miss_scale, fan_out.miss_exponent) == (0.8, 0.3, 0.8)


def test_a_section_is_read_as_what_it_was_written_for(tmp_path: Path) -> None:
    wanted = SpeculationConfig(
        lookahead=6, rule="ratio", cache_aware=0.4, backup="ngram", fan_out=FanOutConfig(budget=12, policy="auto")
    )
    path = tmp_path / "mine.yaml"
    path.write_text(DEPLOYMENT + section_of(wanted))
    assert read_deployment(path).speculation == wanted
    assert "deadline_ms" not in section_of(wanted)
    assert "least_probability" not in section_of(wanted)
    wanted = SpeculationConfig(lookahead=2, fan_out=FanOutConfig(budget=8, policy="ranked"))
    path.write_text(DEPLOYMENT + section_of(wanted))
    assert read_deployment(path).speculation == wanted
    assert "least_probability: 0.02" in section_of(wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "tiny", "--seconds", "1"], "seconds must be between 10 and 86400"),
        (["tune", "tiny", "--max-tokens", "2"], "max_tokens must be between 16"),
        (["tune", "tiny", "--temperature", "0", "0"], "temperatures must be one or more different"),
        (["tune", "tiny", "--plot", "tune.gif"], "--plot must name a file"),
        (["tune", "tinny"], "did you mean tiny"),
        (["tune", "tiny-tp4"], "the target is built for 4 ranks"),
    ],
)
def test_what_cannot_be_tuned_is_said_at_once(
    arguments: list[str], message: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--store", str(store)]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_plain_decoding_has_nothing_to_tune(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntarget:\n  recipe: tiny-target\nspeculation: {mode: ar}\n")
    with pytest.raises(ConfigError, match="nothing to tune"):
        run(str(path), tmp_path, plan_of(None, [0.0], None, None, quick=True))


def test_a_deployment_is_tuned(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    """From answers to the section and back: with real jobs, at both temperatures."""
    plan = TunePlan(
        ("Say something.",),
        max_tokens=16,
        seconds=10,
        lookaheads=(1, 2),
        budgets=(1, 4),
        ranked_budgets=(8,),
        least_probabilities=(0.02, 0.001),
    )
    written, drawn = tmp_path / "section.yaml", tmp_path / f"tune{FIGURES[1]}"
    run("tiny", store, plan, plot_file=drawn, write=written, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert yaml.safe_load(written.read_text()) == yaml.safe_load(found["section"])
    path = tmp_path / "mine.yaml"
    path.write_text(DEPLOYMENT + written.read_text())
    assert read_deployment(path).speculation.lookahead in plan.lookaheads
    assert [sweep["temperature"] for sweep in found["sweeps"]] == [0, 1]
    for sweep in found["sweeps"]:
        assert [choice["least_probability"] for choice in sweep["ranked"]] == [0.02, 0.001]
    assert {run["mode"] for run in found["confirmed"]} - {"sd"} == {"ar", "ssd"}
    assert min(found["times"]["verify"].values()) > 0
    assert drawn.stat().st_size > 10_000
