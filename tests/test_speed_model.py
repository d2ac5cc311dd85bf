"""Predicted speeds are the paper's, and the settings chosen by them the best there are."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from saguaro.orchestrator.analysis import critical_batch, sd_speed_up, ssd_speed_up, tokens_per_round
from saguaro.orchestrator.costs import Costs, StepTime
from saguaro.orchestrator.fan_out_policy import MissCurve, allocate
from saguaro.orchestrator.protocol import Span, Step
from saguaro.orchestrator.speed_model import Choices, Outlook, Planner, best, predict, prepare_seconds
from saguaro.orchestrator.types import Backup, Mode, Setting

CURVE = MissCurve(0.4, 0.6)


def outlook(
    *,
    a: float = 0.8,
    fast: float = 0.0,
    step: float = 0.05,
    row: float = 0.0,
    verify_row: float = 0.0,
    curve: MissCurve = CURVE,
    places: int = 16,
) -> Outlook:
    """A verification takes 1 s, a draft step `step`, further rows their shares of that."""
    text: dict[Backup, list[float]] = {"suffix": [fast] * places, "none": []}
    return Outlook(
        verify=lambda rows: 1 + verify_row * (rows - 1),
        draft=lambda rows: step * (1 + row * (rows - 1)),
        trunk=lambda rows: step * (1 + row * (rows - 1)),
        prepared=[a] * places,
        backups={"primary": [a] * places, **text},
        in_turn={"primary": [a] * places, **text},
        rejected=curve,
        accepted=curve,
    )


@settings(max_examples=300, deadline=None)
@given(
    st.floats(0.05, 0.95),
    st.floats(0, 1),
    st.floats(0.02, 0.99),
    st.floats(0.01, 1),
    st.integers(1, 6),
    st.integers(1, 40),
)
def test_the_choice_of_the_backup_is_theorem_17_under_its_assumptions(
    a: float, worse: float, p_hit: float, share: float, k: int, batch: int
) -> None:
    """One hit rate whatever drafted, a primary that drafts within a verification, and the same time for any rows."""
    step = share / (k + 1)  # T_p <= 1; T_b is that of K steps
    figures = outlook(a=a, fast=a * worse, step=step, curve=MissCurve(1 - p_hit, 1e-12), places=k)
    e_hit, e_fast = tokens_per_round(a, k), tokens_per_round(a * worse, k)
    limit = critical_batch(p_hit, e_hit, e_fast, k * step)
    assume(not math.isclose(limit, batch, rel_tol=1e-6))
    choices = Choices([k], [k + 1], ["primary", "suffix"])  # one guess for each outcome: the curve is flat
    slow, quick = (predict(figures, Setting("ssd", k, k + 1, backup), batch) for backup in choices.backups)
    assert slow.p_hit == pytest.approx(p_hit, abs=1e-6)
    assert quick.p_hit == pytest.approx(p_hit, abs=1e-6)
    assume(not math.isclose(slow.tokens_per_second, quick.tokens_per_second, rel_tol=1e-7))
    assert best(figures, choices, "ssd", batch).setting.backup == ("primary" if batch < limit else "suffix")


def test_a_case_in_which_the_primary_backup_is_best_for_every_batch() -> None:
    """p_hit 0.5, E_hit 4, E_miss 1, T_p 0.2: the theorem has no batch at which to switch."""
    a = next(a for a in (i / 10_000 for i in range(10_000)) if tokens_per_round(a, 7) >= 4)
    figures = outlook(a=a, fast=0.0, step=0.2 / 7, curve=MissCurve(0.5, 1e-12), places=7)
    assert critical_batch(0.5, 4, 1, 0.2) == math.inf
    for batch in (1, 8, 64, 4096):
        assert best(figures, Choices([7], [8], ["suffix", "none", "primary"]), "ssd", batch).setting.backup == "primary"


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.integers(1, 8), st.floats(0.001, 0.5), st.integers(1, 16))
def test_predictions_are_the_papers(a: float, k: int, step: float, batch: int) -> None:
    figures = outlook(a=a, step=step, places=k)
    assert predict(figures, Setting("ar", k, 0, "primary"), batch).tokens_per_second == 1
    in_turn = predict(figures, Setting("sd", k, 0, "primary"), batch)
    assert in_turn.tokens_per_second == pytest.approx(sd_speed_up(a, k, step))
    found = predict(figures, Setting("ssd", k, 6, "primary"), batch)
    expected = ssd_speed_up(
        found.p_hit, tokens_per_round(a, k), tokens_per_round(a, k), (k + 1) * step, k * step, batch, interrupt=False
    )
    assert found.tokens_per_second == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 10), st.floats(0.05, 0.5), st.floats(0.1, 2))
def test_the_predicted_hit_rate_is_that_of_the_best_list(
    acceptance: list[float], budget: int, scale: float, exponent: float
) -> None:
    from saguaro.orchestrator.analysis import outcome_weights
    from saguaro.orchestrator.fan_out_policy import predicted_hit_rate
    from saguaro.orchestrator.speed_model import _hit_rates

    curve = MissCurve(scale, exponent)
    assume(1 - scale >= scale * (1 - 2**-exponent))  # concave
    figures = outlook(curve=curve)
    weights = outcome_weights(acceptance)
    hits = [curve.hits(budget)] * len(weights)
    exact = predicted_hit_rate(allocate(budget, weights, hits), weights, hits)
    assert _hit_rates(figures, acceptance, budget)[budget] == pytest.approx(exact)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("row", [0.0, 0.02, 0.2])
@pytest.mark.parametrize(("a", "step"), [(0.9, 0.02), (0.7, 0.1), (0.5, 0.4), (0.95, 1.5)])
def test_the_best_setting_is_that_of_all_settings(mode: Mode, row: float, a: float, step: float) -> None:
    """Over every lookahead and backup, with budgets that are prepared in time, or small ones where none is."""
    figures = outlook(a=a, fast=0.3, step=step, row=row, verify_row=0.01)
    budgets = [1, 2, 4, 8, 16, 32]
    choices = Choices(range(1, 9), budgets, ["primary", "suffix", "none"])
    for batch in (1, 5):
        chosen = best(figures, choices, mode, batch)
        speeds = []
        for k, budget, backup in itertools.product(choices.lookaheads, budgets, choices.backups):
            in_time = prepare_seconds(figures, batch, k, budget) <= figures.verify(batch * (k + 1))
            never = prepare_seconds(figures, batch, k, 1) > figures.verify(batch * (k + 1))
            if in_time or (never and budget <= 8):
                setting = Setting(mode, k, budget if mode == "ssd" else 0, backup)
                speeds.append(predict(figures, setting, batch).tokens_per_second)
        assert chosen.tokens_per_second == pytest.approx(max(speeds))
        k = chosen.setting.lookahead
        if mode == "ssd" and prepare_seconds(figures, batch, k, 1) <= figures.verify(batch * (k + 1)):
            assert chosen.t_p <= 1


def test_branches_that_are_hardly_needed_take_no_time() -> None:
    """a = 0.5, K = 2: weights .5, .25, .25, a guess hits with .6, then .13 more."""
    figures = replace(outlook(a=0.5, step=0.1, row=1.0, curve=MissCurve(0.4, 0.6)), least_probability=0.06)
    second = 0.4 * (1 - 2**-0.6)
    gains = [0.3, 0.15, 0.15, 0.5 * second, 0.25 * second, 0.25 * second]
    assert predict(figures, Setting("ssd", 2, 6, "primary"), 1).p_hit == pytest.approx(sum(gains[:4]))
    # A trunk of three rows, four guesses that are likely enough, and three of these that grow.
    assert prepare_seconds(figures, 1, 2, 6) == pytest.approx(0.1 * (3 + 4 + 3))
    assert prepare_seconds(replace(figures, least_probability=0.0), 1, 2, 6) == pytest.approx(0.1 * (3 + 6 + 6))


def test_a_faster_draft_has_a_longer_lookahead_and_a_larger_budget() -> None:
    choices = Choices(range(1, 17), [1, 2, 4, 8, 16, 32, 64], ["primary"])
    chosen = [best(outlook(step=step, row=0.05), choices, "ssd", 1).setting for step in (0.4, 0.1, 0.02)]
    assert chosen[0].lookahead < chosen[1].lookahead < chosen[2].lookahead
    worse = best(outlook(a=0.3, step=0.02, row=0.05), choices, "ssd", 1).setting
    assert worse.lookahead < chosen[2].lookahead


def test_a_plan_changes_only_for_a_gain_and_is_then_looked_at_more_often() -> None:
    choices = Choices(range(1, 9), [8], ["primary"])
    planner = Planner(choices, gain=0.02, review=4, longest=8)
    now = outlook(a=0.8)
    first = planner.setting(lambda: now, "sd", 1)
    looks = 0

    def counted() -> Outlook:
        nonlocal looks
        looks += 1
        return now

    for i in range(40):
        now = outlook(a=0.8 + (0.005 if i % 2 else -0.005))  # noise
        assert planner.setting(counted, "sd", 1) == first
    assert looks == 5  # after 4, 8, 8, … rounds
    now = outlook(a=0.3)
    for _ in range(8):
        after = planner.setting(counted, "sd", 1)
    assert after.lookahead < first.lookahead
    assert planner.setting(counted, "sd", 2) == best(now, choices, "sd", 2).setting  # each batch has its own


def test_without_a_choice_nothing_is_computed_twice() -> None:
    planner = Planner(Choices([4], [8], ["ngram"]))
    figures = outlook()
    figures.backups["ngram"] = [0.1] * 16  # type: ignore[index]
    assert planner.setting(lambda: figures, "ssd", 3) == Setting("ssd", 4, 8, "ngram")

    def never() -> Outlook:
        raise AssertionError("nothing to decide")

    for _ in range(2000):
        planner.setting(never, "ssd", 3)


def test_times_by_rows_are_a_line_through_what_was_measured() -> None:
    time = StepTime()
    assert not time.known
    assert time(4) == 0
    time.observe(1, 0.1)
    assert time(1) == pytest.approx(0.1)
    assert time(11) == pytest.approx(0.13)  # a further row is taken for 3% of the first
    for rows in (1, 4, 16, 8, 2) * 40:
        time.observe(rows, 0.02 + 0.003 * rows)
    for rows in (1, 5, 30):
        assert time(rows) == pytest.approx(0.02 + 0.003 * rows, rel=0.02)
    for rows in (1, 4, 16, 8, 2) * 200:  # the device is shared now
        time.observe(rows, 10 * (0.02 + 0.003 * rows))
    assert time(5) == pytest.approx(0.35, rel=0.02)
    falling = StepTime()
    for rows in (1, 16) * 20:
        falling.observe(rows, 0.2 if rows == 1 else 0.1)
    assert falling.slope == 0


def test_trunks_and_draft_steps_are_timed_apart() -> None:
    costs = Costs()
    costs.observe_draft([Step(1, 10**9)], calibrating=True)
    assert (costs.slowest.trunk(1), costs.slowest.draft(1)) == (1, 1)
    for _ in range(500):
        costs.observe_draft([Step(5, 3 * 10**9, trunk=True), Step(8, 10**9)])
    assert costs.slowest.trunk(5) == pytest.approx(3, rel=0.02)
    assert costs.slowest.draft(8) == pytest.approx(1, rel=0.02)
    for _ in range(200):
        costs.observe_work(
            [Span("prepare", 0, 7), Span("verify", 0, 9), Span("backup", 0, 4)], [Step(1, 6), Step(1, 2)]
        )
    assert costs.slowest.overhead == pytest.approx(3e-9, rel=1e-3)


def test_costs_are_in_verifications() -> None:
    costs = Costs()
    assert costs.t_p is None
    costs.observe([Span("verify", 0, 100), Span("prepare", 0, 50), Span("backup", 0, 30)])
    assert (costs.t_p, costs.t_b) == pytest.approx((0.5, 0.3))
    for _ in range(200):
        costs.observe([Span("prepare", 0, 200)])
    assert costs.t_p == pytest.approx(2, abs=1e-3)
    assert costs.seconds("prepare") == pytest.approx(200e-9, rel=1e-3)


@pytest.mark.parametrize(
    ("a", "step", "row", "curve", "k", "budget", "batch", "expected"),
    [
        (0.9, 0.15, 0.0, MissCurve(0.8, 0.3), 6, 3, 4, {"defer": 2.81, "primary": 2.68, "none": 2.37}),
        (0.9, 0.15, 0.005, CURVE, 5, 16, 8, {"none": 2.88, "defer": 2.79, "primary": 2.32}),
    ],
)
def test_whether_a_row_sits_out_is_a_matter_of_speed(
    a: float, step: float, row: float, curve: MissCurve, k: int, budget: int, batch: int, expected: dict[Backup, float]
) -> None:
    """The cases of docs/results/defer.md: predicted as by `saguaro simulate`, and the best one is taken."""
    figures = outlook(a=a, step=step, row=row, curve=curve, places=k)
    figures.backups["defer"] = figures.backups["primary"]  # type: ignore[index]
    found = {name: predict(figures, Setting("ssd", k, budget, name), batch).tokens_per_second for name in expected}
    assert found == pytest.approx(expected, abs=0.02)
    choices = Choices([k], [budget], ["primary", "defer", "none"])
    assert best(figures, choices, "ssd", batch).setting.backup == max(expected, key=lambda name: expected[name])
    quick = outlook(a=a, step=0.01, row=0.0, curve=curve, places=k)
    quick.backups["defer"] = quick.backups["primary"]  # type: ignore[index]
    assert best(quick, choices, "ssd", batch).setting.backup == "primary"
    assert best(figures, choices, "ssd", 1).setting.backup != "defer"  # nobody to hide behind
    figures.in_turn["defer"] = figures.in_turn["primary"]  # type: ignore[index]
    assert best(figures, choices, "sd", batch).setting.backup == "primary"
    alone = Choices([k], [0], ["defer"])  # a decision of the deployment: in turn it is the same work
    in_turn = [best(figures, Choices([k], [0], [name]), "sd", batch).tokens_per_second for name in ("primary", "defer")]
    assert in_turn[0] == in_turn[1] == best(figures, alone, "sd", batch).tokens_per_second


def test_more_replicas_prepare_more_and_share_out_the_misses() -> None:
    figures = outlook(a=0.8, step=0.02, row=0.1)
    both = replace(figures, replicas=2)
    assert prepare_seconds(both, 3, 4, 16) == prepare_seconds(figures, 3, 4, 8)
    one, two = (predict(each, Setting("ssd", 4, 16, "primary"), 8) for each in (figures, both))
    assert two.p_hit == one.p_hit
    assert two.t_p < one.t_p
    assert two.t_b < one.t_b
    budgets = [1, 2, 4, 8, 16, 32, 64]
    chosen = [best(each, Choices([4], budgets, ["primary"]), "ssd", 4).setting.budget for each in (figures, both)]
    assert chosen[1] == 2 * chosen[0]
