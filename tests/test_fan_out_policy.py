import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.orchestrator.analysis import geometric_fan_out, outcome_weights
from saguaro.orchestrator.fan_out_policy import (
    Lists,
    MissCurve,
    Situation,
    allocate,
    fixed,
    geometric,
    predicted_hit_rate,
    uniform,
)
from saguaro.plugins.fan_out import FanOut


@given(st.integers(0, 64), st.integers(0, 12))
def test_uniform_spends_the_budget_and_differs_by_one_at_most(budget: int, lookahead: int) -> None:
    counts = uniform(budget, lookahead).counts
    assert len(counts) == lookahead + 1
    assert sum(counts) == budget
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts)  # what does not divide goes to the last rows


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 12))
def test_fixed_keeps_the_full_acceptance_row_last(counts: list[int], lookahead: int) -> None:
    fitted = fixed(tuple(counts), lookahead).counts
    assert len(fitted) == lookahead + 1
    shared = min(len(counts), len(fitted))
    assert fitted[-shared:] == tuple(counts[-shared:])
    assert all(count == counts[0] for count in fitted[:-shared])


def hit_rate(counts: tuple[int, ...], weights: tuple[float, ...], hits: list[tuple[float, ...]]) -> float:
    return sum(weight * curve[count] for weight, curve, count in zip(weights, hits, counts))


def brute_force(budget: int, weights: tuple[float, ...], hits: list[tuple[float, ...]]) -> float:
    lists = itertools.product(range(budget + 1), repeat=len(weights))
    return max(hit_rate(counts, weights, hits) for counts in lists if sum(counts) <= budget)


def test_allocation_equals_brute_force_on_power_laws() -> None:
    for lookahead in range(4):
        for budget in range(13):
            for a, c, r in ((0.5, 0.9, 1.0), (0.8, 0.4, 0.6), (0.95, 1.0, 0.3), (0.0, 0.4, 1.0), (1.0, 0.4, 1.0)):
                weights, hits = outcome_weights([a] * lookahead), [MissCurve(c, r).hits(budget)] * (lookahead + 1)
                counts = geometric(budget, lookahead, a, MissCurve(c, r), MissCurve(c, r)).counts
                assert sum(counts) <= budget
                assert hit_rate(counts, weights, hits) == pytest.approx(brute_force(budget, weights, hits), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(0, 7))
def test_allocation_equals_brute_force_on_any_measured_curves(data: st.DataObject, lookahead: int, budget: int) -> None:
    """Not concave, different for each row, not even increasing."""
    rate = st.floats(0, 1, allow_subnormal=False)
    weights = outcome_weights(data.draw(st.lists(rate, min_size=lookahead, max_size=lookahead)))
    curve = st.lists(rate, min_size=budget, max_size=budget).map(lambda rates: (0.0, *rates))
    hits = data.draw(st.lists(curve, min_size=lookahead + 1, max_size=lookahead + 1))
    fan_out = allocate(budget, weights, hits)
    assert predicted_hit_rate(fan_out, weights, hits) == pytest.approx(brute_force(budget, weights, hits), abs=1e-12)


def test_giving_each_guess_where_it_gains_most_is_not_optimal() -> None:
    """K=1, B=4, a=.5, c=.9, r=1: the first guess of a row gains less than its second."""
    fan_out = geometric(4, 1, 0.5, MissCurve(0.9, 1.0), MissCurve(0.9, 1.0))
    weights, hits = outcome_weights([0.5]), [MissCurve(0.9, 1.0).hits(4)] * 2
    assert fan_out.counts == (2, 2)
    assert predicted_hit_rate(fan_out, weights, hits) == pytest.approx(0.55)
    greedy = [0, 0]
    for _ in range(4):
        greedy[max((0, 1), key=lambda k: weights[k] * (hits[k][greedy[k] + 1] - hits[k][greedy[k]]))] += 1
    assert hit_rate(tuple(greedy), weights, hits) == pytest.approx(0.40)


def test_whole_numbers_follow_theorem_12_as_the_budget_grows() -> None:
    real = geometric_fan_out(400, 4, 0.8, 0.5)
    assert geometric(400, 4, 0.8, MissCurve(0.4, 0.5), MissCurve(0.4, 0.5)).counts == pytest.approx(real, abs=1.5)


def test_the_paper_s_curve_says_that_one_guess_never_hits() -> None:
    assert [round(hit, 3) for hit in MissCurve(1.0, 1.0).hits(4)] == [0, 0, 0.5, 0.667, 0.75]
    assert MissCurve(0.4, 1.0).hits(2) == pytest.approx((0, 0.6, 0.8))


def test_lists_are_chosen_by_what_drafted_the_speculation() -> None:
    policy = Lists(uniform, lambda budget, lookahead: fixed((budget,), lookahead))
    assert policy(4, 1, Situation(hit=True)) == FanOut((2, 2))
    assert policy(4, 0, Situation(hit=False)) == FanOut((4,))
    assert Lists(uniform)(4, 1, Situation(hit=False)) == FanOut((2, 2))
