"""Estimates approach the truth that made the data, and the lists built on them change only when it pays."""

from __future__ import annotations

import math
import random

import pytest

from harness import Pair
from saguaro.orchestrator.analysis import geometric_fan_out
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig
from saguaro.orchestrator.estimators import Estimate, Estimators, GuessCurve, Prior, band
from saguaro.orchestrator.fan_out_policy import (
    AcceptedCurve,
    FanOutPolicy,
    Lists,
    MissCurve,
    Situation,
    geometric,
    uniform,
)
from saguaro.orchestrator.measured_fan_out import MeasuredFanOut
from saguaro.orchestrator.types import Outcome, Rule, SamplingParams
from saguaro.plugins.fan_out import FanOut
from test_round import DRAFT, TARGET, scripted

CURVE = MissCurve(0.45, 0.7)


def rank_of(u: float, curve: MissCurve) -> int:
    """The rank, from 0, that a bonus token has if P(rank >= F) is the curve's miss rate."""
    rank = 0
    while u < 1 - curve.hit(rank + 1):
        rank += 1
    return rank


def play(
    policy: FanOutPolicy,
    estimators: Estimators,
    rounds: int,
    *,
    a: float,
    curve: MissCurve,
    budget: int = 12,
    k: int = 3,
) -> list[FanOut]:
    """Rounds of a sequence whose draft tokens are accepted with probability a; the lists that were used."""
    draw, hit, used = random.Random(7), True, []
    for _ in range(rounds):
        situation = Situation(hit, 1.0)
        fan_out = policy(budget, k, situation)
        used.append(fan_out)
        accepted = 0
        while accepted < k and draw.random() < a:
            accepted += 1
        rank = rank_of(draw.random(), curve)
        hit = rank < fan_out.counts[accepted]
        estimators.of(situation).observe(k, Outcome(accepted, 0), fan_out, rank if hit else None)
    return used


def test_the_miss_curve_is_fitted_through_ranks_seen_only_as_far_as_was_guessed() -> None:
    draw, curve = random.Random(0), GuessCurve(decay=1.0)
    for _ in range(8000):
        guesses, rank = draw.choice([0, 1, 2, 4, 8]), rank_of(draw.random(), CURVE)
        curve.observe(guesses, rank if rank < guesses else None)
    fit = curve.fit()
    assert fit is not None
    assert fit.points == 8
    assert (fit.curve.scale, fit.curve.exponent) == pytest.approx((0.45, 0.7), abs=0.04)
    assert fit.r_squared > 0.99
    assert curve.hits(8, Prior().rejected) == pytest.approx(CURVE.hits(8), abs=0.025)
    assert curve.hits(64, Prior().rejected) == pytest.approx(CURVE.hits(64), abs=0.04)  # the fit goes on where none was


def test_no_fit_without_data_and_the_prior_in_its_place() -> None:
    curve = GuessCurve(decay=1.0)
    assert curve.fit() is None
    assert curve.hits(6, CURVE) == pytest.approx(CURVE.hits(6))
    for _ in range(500):
        curve.observe(3, 0)
    assert curve.fit() is None  # nothing was ever missed: no power law says so
    assert curve.hits(1, CURVE)[1] > 0.98


def test_acceptance_and_hit_rates_by_position() -> None:
    estimate = Estimate(Prior(0.5, 0.5, CURVE), hit=True, decay=1.0)
    draw = random.Random(1)
    for _ in range(8000):
        accepted = 0
        while accepted < 3 and draw.random() < (0.9, 0.7, 0.5)[accepted]:
            accepted += 1
        estimate.observe(3, Outcome(accepted, 0), FanOut((1, 1, 1, 1)), 0 if draw.random() < 0.6 else None)
    assert estimate.acceptance(3) == pytest.approx((0.9, 0.7, 0.5), abs=0.02)
    assert estimate.acceptance(5)[3:] == (0.5, 0.5)  # never seen: the prior
    assert estimate.hit_rate == pytest.approx(0.6, abs=0.02)
    assert estimate.tokens_per_round == pytest.approx(1 + 0.9 + 0.63 + 0.315, abs=0.03)
    assert math.fsum(estimate.weights(3)) == pytest.approx(1)


def test_what_is_old_is_forgotten() -> None:
    estimate = Estimate(Prior(0.5, 0.5, CURVE), hit=True, decay=0.99)
    for accepted in [2] * 500 + [0] * 500:
        estimate.observe(2, Outcome(accepted, 0), FanOut((0, 0, 0)), None)
    assert estimate.acceptance(1)[0] < 0.06
    assert estimate.hit_rate is None  # no guess was made: plain speculation says nothing of hits
    assert estimate.rounds == pytest.approx(100, abs=1)


def test_bands_and_situations_are_kept_apart() -> None:
    assert [band(t) for t in (0, 0.3, 0.5, 0.7, 1.0, 1.7)] == [0, 1, 1, 2, 2, 3]
    estimators = Estimators(Prior(0.8, 0.1, CURVE))
    for _ in range(50):
        estimators.of(Situation(True, 0.0)).observe(1, Outcome(1, 0), FanOut((1, 1)), 0)
        estimators.of(Situation(False, 0.0)).observe(1, Outcome(0, 0), FanOut((1, 1)), None)
    assert estimators.hit_rate(0.0) == 1  # a chain that never leaves the state it starts in
    assert estimators.hit_rate(1.0) is None
    assert estimators.of(Situation(True, 1.0)).acceptance(1) == (0.8,)
    assert estimators.of(Situation(False, 1.0)).acceptance(1) == (0.1,)


def test_the_overall_hit_rate_follows_from_the_two() -> None:
    estimators = Estimators()
    used = play(Lists(uniform), estimators, 2500, a=0.8, curve=CURVE)
    hits = sum(estimators.of(Situation(hit, 1.0)).observed for hit in (True,))
    assert estimators.hit_rate(1.0) == pytest.approx(hits / len(used), abs=0.03)


# The policy `auto`


def test_lists_come_to_be_the_best_for_the_truth() -> None:
    """Acceptance 0.95 where 0.3 was assumed: the list moves from the front to the back."""
    estimators = Estimators(Prior(0.3, 0.3, CURVE))
    policy = MeasuredFanOut(estimators, Lists(lambda budget, k: geometric(budget, k, 0.3, CURVE, CURVE)))
    used = play(policy, estimators, 3000, a=0.95, curve=CURVE)
    assert used[0] == geometric(12, 3, 0.3, CURVE, CURVE)
    assert used[-1].counts == pytest.approx(geometric_fan_out(12, 3, 0.95, 0.7), abs=1.5)
    assert 1 <= policy.changes <= 6


def test_noise_does_not_change_lists() -> None:
    """What is assumed is the truth, and 3000 rounds never say otherwise strongly enough."""
    estimators = Estimators(Prior(0.8, 0.8, CURVE))
    policy = MeasuredFanOut(estimators, Lists(lambda budget, k: geometric(budget, k, 0.8, CURVE, CURVE)))
    play(policy, estimators, 3000, a=0.8, curve=CURVE)
    assert policy.changes == 0


def test_the_same_history_gives_the_same_lists() -> None:
    def lists() -> list[FanOut]:
        estimators = Estimators(Prior(0.3, 0.3, CURVE))
        policy = MeasuredFanOut(estimators, Lists(uniform))
        return play(policy, estimators, 600, a=0.9, curve=CURVE)

    assert lists() == lists()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_changes_lists_and_no_token(temperature: float) -> None:
    config = SpeculationConfig(fan_out=FanOutConfig(policy="auto", budget=4, acceptance=0.05), lookahead=3)
    estimators = Estimators(config.prior)
    policy = config.policy(estimators)
    assert isinstance(policy, MeasuredFanOut)
    both = Pair(scripted(TARGET), scripted(TARGET), policy=policy, budget=4, estimators=estimators)
    for seed in range(2):
        p = SamplingParams(temperature=temperature, seed=seed, max_tokens=150)
        assert both.run([0], p) == Pair(scripted(TARGET), scripted(DRAFT)).run([0], p, "ar")
    assert policy.changes > 0  # a draft that is always right, where nearly nothing was assumed
    estimate = estimators.of(Situation(True, temperature))
    assert estimate.acceptance(1)[0] > 0.5


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_a_running_speculator_learns_what_the_verifier_decided(rule: Rule) -> None:
    both = Pair(scripted(TARGET), scripted(DRAFT), rule=rule, lookahead=3, budget=6)
    sequence = both.sequence([0], SamplingParams(temperature=1.0, seed=2, max_tokens=100))
    both.finish([sequence])
    after_hit, after_miss = (both.estimators.of(Situation(hit, 1.0)) for hit in (True, False))
    looked_up = [record for record in sequence.rounds if record.hit is not None]
    assert after_hit.observed + after_miss.observed == len(looked_up)
    pairs = list(zip([True, *(record.hit for record in looked_up)], [record.hit for record in looked_up]))
    for hit, estimate in ((True, after_hit), (False, after_miss)):
        following = [now for before, now in pairs if before == hit]
        assert estimate.hit_rate == pytest.approx(sum(map(bool, following)) / len(following), abs=0.02)


# Configuration


def test_every_policy_of_the_configuration() -> None:
    def lists(backup: str = "primary", **options: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
        config = SpeculationConfig(lookahead=3, fan_out=FanOutConfig(**options), backup=backup)  # type: ignore[arg-type]
        policy = config.policy(Estimators(config.prior))
        after_hit, after_miss = (policy(max(config.budgets()), 3, Situation(hit)).counts for hit in (True, False))
        assert max(sum(after_hit), sum(after_miss)) <= max(config.budgets())
        assert policy(0, 3, Situation()).branches == 0
        return after_hit, after_miss

    assert lists(policy="uniform") == ((2, 2, 2, 2), (2, 2, 2, 2))
    assert lists(counts=(1, 1, 1, 3)) == ((1, 1, 1, 3), (1, 1, 1, 3))
    assert lists(counts=(1, 1, 1, 3), counts_after_miss=(4, 2, 1, 0)) == ((1, 1, 1, 3), (4, 2, 1, 0))
    assert lists(counts=(2,)) == ((2, 2, 2, 2), (2, 2, 2, 2))  # a short list is stretched, and the budget with it
    geometric_lists = lists(policy="geometric", acceptance=0.9, acceptance_after_miss=0.1)
    assert geometric_lists == ((2, 2, 2, 2), (6, 2, 0, 0))
    assert lists() == lists(policy="geometric")  # `auto` starts there
    assert lists("random")[1] == (8, 0, 0, 0)  # nothing of a random speculation is accepted


def test_after_full_acceptance_the_first_guess_is_the_next_draft_token() -> None:
    """Right as often as any; if wrong it is as good as rejected. Against draws of just that."""
    draw, curve = random.Random(2), AcceptedCurve(0.8, CURVE)
    ranks = [0 if draw.random() < 0.8 else 1 + rank_of(draw.random(), CURVE) for _ in range(20_000)]
    seen = [sum(rank < guesses for rank in ranks) / len(ranks) for guesses in range(6)]
    assert curve.hits(5) == pytest.approx(seen, abs=0.01)
    assert curve.hits(0) == (0.0,)
    assert AcceptedCurve(1.0, CURVE).hits(2) == (0, 1, 1)
    assert AcceptedCurve(0.0, CURVE).hits(3) == (0, *CURVE.hits(2))
