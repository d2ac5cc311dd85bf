"""The planner says what the theorems say, and prints it as people and programs want it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from saguaro import cli
from saguaro.orchestrator import analysis
from saguaro.simulate import Pair, Setting, each_backup, predict, sweeps

PAIR = Pair(acceptance=0.8, draft_step=0.1)


def test_a_prediction_is_theorem_7_over_its_own_figures() -> None:
    found = predict(PAIR, Setting(lookahead=4, budget=8))
    assert found.e_hit == pytest.approx(3.3616)
    assert found.fan_out == (2, 2, 1, 1, 2)
    # Σ w_k (1 - 0.4 F_k^-0.6), and after full acceptance 1 - (1 - 0.8) 0.4 (F_4 - 1)^-0.6
    assert found.p_hit == pytest.approx(0.36 * (1 - 0.4 * 2**-0.6) + 0.2304 * 0.6 + 0.4096 * (1 - 0.2 * 0.4))
    assert found.t_p == pytest.approx(0.1 * (1 + 0.03 * 4) + 4 * 0.1 * (1 + 0.03 * 7))
    assert found.sd == pytest.approx(analysis.sd_speed_up(0.8, 4, 0.1))
    assert found.backup == "primary"
    assert found.ssd == pytest.approx(3.3616 / (found.p_hit + (1 - found.p_hit) * (1 + found.t_b)))
    assert found.ssd > found.sd


def test_without_a_budget_ssd_is_sd() -> None:
    found = predict(PAIR, Setting(budget=0))
    assert found.p_hit == 0
    assert found.ssd == pytest.approx(found.sd)


def test_the_backup_changes_with_the_batch() -> None:
    """Theorem 17, with a hit rate for each backup of its own: the crossing lies near its b*."""
    pair = replace(PAIR, draft_step=0.06, row_cost=0.0)
    found = [
        max((p for p in each_backup(pair, Setting(budget=16, batch=b)) if p.backup != "defer"), key=lambda p: p.ssd)
        for b in range(1, 60)
    ]
    backups = [prediction.backup for prediction in found]
    assert backups[0] == "primary"
    assert backups[-1] == "fast"
    assert backups == sorted(backups, reverse=True)  # one switch
    limit = found[0].critical_batch
    assert limit is not None
    assert 1 + backups.index("fast") == pytest.approx(limit, abs=1.5)


def test_sitting_out_pays_where_drafting_is_long_and_guessing_hard() -> None:
    """A quick draft is waited for; and where guesses mostly hit, a round of one token prepares the next as well."""
    hard = Pair(acceptance=0.9, draft_step=0.15, row_cost=0.0, miss_scale=0.8, miss_exponent=0.3)
    setting = Setting(lookahead=6, budget=3, batch=4)
    assert predict(hard, setting).backup == "defer"
    assert predict(hard, replace(setting, batch=1)).backup == "primary"  # there is nobody else
    assert predict(replace(hard, draft_step=0.05), setting).backup == "primary"
    assert predict(replace(hard, miss_scale=0.3), replace(setting, budget=16)).backup == "fast"
    assert {p.backup for p in each_backup(hard, replace(setting, budget=0))} == {"primary", "fast"}


def test_more_devices_guess_more_in_the_same_time() -> None:
    by_devices = sweeps(PAIR, Setting())["devices"]
    assert len({prediction.t_p for prediction in by_devices}) == 1
    rates = [prediction.p_hit for prediction in by_devices]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0]


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_the_ends_of_the_scale(acceptance: float) -> None:
    for predictions in sweeps(replace(PAIR, acceptance=acceptance), Setting()).values():
        assert all(0 < prediction.ssd <= 33 for prediction in predictions)


def test_json_table_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "plan.svg"
    assert cli.main(["simulate", "--acceptance", "0.9", "--lookahead", "9", "--json", "--plot", str(figure)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["pair"]["acceptance"] == 0.9
    assert set(answer["sweeps"]) == {"lookahead", "budget", "batch", "devices"}
    assert answer["prediction"] in answer["backups"].values()
    assert answer["prediction"] in answer["sweeps"]["lookahead"]  # 9 is none of the usual values
    assert "<svg" in figure.read_text()
    assert cli.main(["simulate"]) == 0
    shown = capsys.readouterr().out
    assert "lookahead 4" in shown
    assert "devices 8" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "1.2"], "acceptance must be between 0 and 1, got 1.2"),
        (["--batch", "0"], "batch must be between 1 and 1024, got 0"),
        (["--plot", "plan.txt"], "must name a file that ends in one of .pdf, .png, .svg"),
        (["--plot", "nowhere/plan.png"], "cannot be written"),
    ],
)
def test_wrong_numbers_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *arguments]) == 1
    assert message in capsys.readouterr().err
