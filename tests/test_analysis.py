"""The closed forms against check values computed by hand from the paper's statements, and against their own limits."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from saguaro.orchestrator import analysis
from saguaro.orchestrator.sampling import acceptance, cache_aware


def test_theorem_7() -> None:
    assert analysis.ssd_speed_up(0.9, 4, 1, t_p=0.5, t_b=0) == pytest.approx(3.7)
    assert analysis.ssd_speed_up(0.9, 4, 4, t_p=0.5, t_b=0.5) == pytest.approx(3.8095, abs=5e-5)
    assert analysis.ssd_speed_up(0.5, 4, 2, t_p=0.5, t_b=0.5) == analysis.ssd_speed_up(
        0.5, 4, 2, 0.5, 0.5, interrupt=False
    )
    assert analysis.ssd_speed_up(0.5, 4, 2, t_p=2, t_b=1) == pytest.approx(3 / 2)
    assert analysis.ssd_speed_up(0.5, 4, 2, t_p=2, t_b=1, interrupt=False) == pytest.approx(3 / 2.5)
    assert analysis.ssd_speed_up(1, 4, 1, t_p=2, t_b=0) == 2  # a primary slower than the verification is waited for


@pytest.mark.parametrize(
    ("after_hit", "after_miss", "overall"),
    [(0.9, 0.6, 6 / 7), (0.8, 0.8, 0.8), (1, 0.5, 1), (0.5, 0, 0), (1, 0, 1)],
)
def test_theorem_7_stationary_hit_rate(after_hit: float, after_miss: float, overall: float) -> None:
    assert analysis.overall_hit_rate(after_hit, after_miss) == pytest.approx(overall, abs=1e-12)


def test_theorem_7_is_what_a_long_run_of_the_chain_shows() -> None:
    draw, hit, hits = random.Random(0), True, 0
    for _ in range(40_000):
        hit = draw.random() < (0.9 if hit else 0.6)
        hits += hit
    assert hits / 40_000 == pytest.approx(analysis.overall_hit_rate(0.9, 0.6), abs=0.01)


def test_corollary_8() -> None:
    assert analysis.ssd_over_same_draft(0.8, 0.5) == pytest.approx(1.3636, abs=5e-5)
    assert analysis.ssd_over_same_draft(0.5, 2) == pytest.approx(1.2)
    for p in np.linspace(0, 1, 21):
        for t in (0, 0.01, 0.5, 1, 3):
            ratio = analysis.ssd_over_same_draft(p, t)
            assert ratio >= 1
            assert (ratio > 1 + 1e-12) == (p > 0 and t > 0)
            # It is Theorem 7 with one draft for everything, over SD.
            assert ratio == pytest.approx(analysis.ssd_speed_up(p, 3, 3, t, t) / (3 / (1 + t)))


def test_corollary_9() -> None:
    low, high = analysis.ssd_over_sd_bounds(0.85, 3.6, 3.2, 0.4)
    ratio = analysis.ssd_speed_up(0.85, 3.6, 1, t_p=0.5, t_b=0) / (3.2 / 1.4)
    assert (low, ratio, high) == pytest.approx((1.33875, 1.404375, 1.575))


def test_corollary_16() -> None:
    assert analysis.ssd_speed_up(0.8, 4, 1, 0.5, 0.3, batch=1) == analysis.ssd_speed_up(0.8, 4, 1, 0.5, 0.3)
    limit = (0.8 * 4 + 0.2 * 1) / 1.3
    assert analysis.ssd_speed_up(0.8, 4, 1, 0.5, 0.3, batch=64) == pytest.approx(limit, abs=1e-3)
    speeds = [analysis.ssd_speed_up(0.8, 4, 1, 0.5, 0.3, batch=b) for b in range(1, 65)]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(
    ("p", "e_hit", "e_miss", "t_p", "b"),
    [
        (0.9, 4, 1, 0.5, 1.6793),
        (0.8, 4, 1, 0.3, 3.9764),
        (0.95, 5, 1, 0.2, 4.5545),
        (0.6, 3, 1, 0.9, 1.0132),
        (0.5, 4, 1, 0.2, math.inf),  # the logarithm's argument is -2: drafting again is always better
        (0.5, 3, 3, 0.2, 0),
        (1, 4, 1, 0.5, math.inf),
        (1, 4, 4, 0.5, math.inf),
        (0, 4, 1, 0.5, math.inf),
        (0, 2, 1, 3, 0),
        (0.9, 4, 1, 0, math.inf),
    ],
)
def test_theorem_17(p: float, e_hit: float, e_miss: float, t_p: float, b: float) -> None:
    assert analysis.critical_batch(p, e_hit, e_miss, t_p) == pytest.approx(b, abs=5e-5)


def test_theorem_17_is_where_corollary_16_says_the_two_backups_cross() -> None:
    draw, crossings = random.Random(1), 0
    for _ in range(300):
        p, e_hit, t = draw.uniform(0.05, 0.99), draw.uniform(1.2, 6), draw.uniform(0.05, 0.95)
        b = analysis.critical_batch(p, e_hit, 1, t)
        for batch in (1, 2, 3, 5, 8, 13):
            slow = analysis.ssd_speed_up(p, e_hit, e_hit, t, t, batch)
            fast = analysis.ssd_speed_up(p, e_hit, 1, t, 0, batch)
            if abs(batch - b) > 1e-6:
                assert (slow > fast) == (batch < b)
                crossings += batch < b < math.inf
    assert crossings > 50


@pytest.mark.parametrize(
    ("budget", "lookahead", "a", "r", "expected"),
    [
        (24, 7, 0.8, 0.5, (4.2010, 3.6203, 3.1199, 2.6886, 2.3170, 1.9967, 1.7207, 4.3359)),
        (16, 3, 0.9, 1, (2.8836, 2.7356, 2.5952, 7.7856)),
        (12, 5, 0.5, 1, (3.9207, 2.7724, 1.9604, 1.3862, 0.9802, 0.9802)),
        (12, 3, 1, 0.5, (0, 0, 0, 12)),
        (12, 3, 0, 0.5, (12, 0, 0, 0)),
        (5, 0, 0.7, 1, (5,)),
    ],
)
def test_theorem_12(budget: int, lookahead: int, a: float, r: float, expected: tuple[float, ...]) -> None:
    assert analysis.geometric_fan_out(budget, lookahead, a, r) == pytest.approx(expected, abs=5e-5)


def test_theorem_12_is_continuous_at_both_ends() -> None:
    for end in (0.0, 1.0):
        near = analysis.geometric_fan_out(24, 7, abs(end - 1e-12), 0.5)
        assert near == pytest.approx(analysis.geometric_fan_out(24, 7, end, 0.5), abs=1e-5)


@pytest.mark.parametrize(("a", "r"), [(0.8, 0.5), (0.9, 1.0), (0.5, 1.0), (0.97, 2.0)])
def test_theorem_18_gives_theorem_12_on_a_power_law(a: float, r: float) -> None:
    weights = analysis.outcome_weights([a] * 5)
    found = analysis.optimal_fan_out(20, weights, lambda f: 0.4 * r * f ** (-r - 1))
    assert found == pytest.approx(analysis.geometric_fan_out(20, 5, a, r), rel=1e-6)


def test_theorem_18_on_other_curves() -> None:
    """Stationary where there are guesses, and no row without any would pay the price."""
    weights = analysis.outcome_weights([0.7] * 6)

    def slope(f: float) -> float:
        return math.exp(-f / 2) / 2

    found = analysis.optimal_fan_out(6, weights, slope)
    prices = [w * slope(f) for w, f in zip(weights, found)]
    assert math.fsum(found) == pytest.approx(6)
    bought = [price for price, f in zip(prices, found) if f > 1e-6]
    assert len(bought) < len(weights)  # a corner: some rows get nothing
    assert bought == pytest.approx([bought[0]] * len(bought), rel=1e-6)
    assert max(price for price, f in zip(prices, found) if f <= 1e-6) <= bought[0] * (1 + 1e-6)


def test_theorem_15() -> None:
    """The smaller C, the more of the residual lies on the fixed set of the F likeliest draft tokens."""
    draw = np.random.default_rng(0)
    for _ in range(10_000):
        size = int(draw.integers(3, 12))
        target, draft = draw.dirichlet(np.full(size, 0.5)), draw.dirichlet(np.full(size, 0.5))
        guessed = np.argsort(-draft, kind="stable")[: int(draw.integers(1, size))]
        rates = []
        for scale in (1, 0.8, 0.5, 0.2, 0.05):
            residual = np.maximum(target - cache_aware(draft, len(guessed), scale), 0)
            rates.append(residual[guessed].sum() / residual.sum())
        assert all(later >= earlier - 1e-9 for earlier, later in zip(rates, rates[1:]))


def test_theorem_19() -> None:
    """Exact, with fractions: the same acceptance, a strictly better hit rate."""
    target = np.array([Fraction(48, 100)] * 2 + [Fraction(2, 100)] * 2)
    draft = np.array([Fraction(49, 100)] * 2 + [Fraction(1, 100)] * 2)
    scaled = cache_aware(draft, 2, Fraction(47, 147))
    assert scaled.tolist() == [Fraction(47, 100)] * 2 + [Fraction(3, 100)] * 2
    assert np.minimum(target, draft).sum() == np.minimum(target, scaled).sum() == Fraction(98, 100)
    assert acceptance(target.astype(float), scaled.astype(float)) == pytest.approx(0.98)
    half = Fraction(1, 2)
    assert [analysis.residual_hit_rate(target, q, 2) for q in (draft, scaled)] == [half, 1]
    assert [analysis.residual_hit_rate(target, q, 1) for q in (draft, scaled)] == [0, half]
    assert [analysis.residual_hit_rate(target, q, 2, exclude_rejected=False) for q in (draft, scaled)] == [0, 1]
    assert analysis.residual_hit_rate(target, target, 1) == 1


def test_rows_that_sit_out() -> None:
    """Two rows that hit half of the time, by hand: nobody sits out in half of the rounds, and one in the others."""
    tokens = 0.5 * 4 + 0.5 * 2
    expected = (1.5 / 2) * tokens / (1 + 0.5 * 0.25 * 0.8)
    assert analysis.defer_speed_up(0.5, 4, 2, t_p=0.5, t_b=0.8, batch=2) == pytest.approx(expected)
    for p_hit in (0.0, 0.3, 1.0):
        alone = analysis.ssd_speed_up(p_hit, 4, 2, 1.3, 0.8, interrupt=False)
        assert analysis.defer_speed_up(p_hit, 4, 2, 1.3, 0.8, batch=1) == pytest.approx(alone)
    assert analysis.defer_speed_up(1, 4, 2, 0.5, 0.8, batch=64) == pytest.approx(4)
    assert analysis.defer_speed_up(0, 4, 2, 0.5, 0.8, batch=8) == pytest.approx(2 / 1.8)  # all wait, every time


@pytest.mark.parametrize(("p_hit", "batch"), [(0.8, 4), (0.3, 3), (0.6, 16)])
def test_rows_that_sit_out_by_playing_it(p_hit: float, batch: int) -> None:
    draw = random.Random(batch)
    out: set[int] = set()
    tokens = time = 0.0
    for _ in range(40_000):
        missing = {row for row in range(batch) if row not in out and draw.random() >= p_hit}
        hits = batch - len(out) - len(missing)
        if len(missing) == batch:
            tokens, time, out = tokens + 2 * batch, time + 1.8, set()
        else:
            tokens, time, out = tokens + 4 * hits + 2 * len(out), time + 1, missing
    expected = analysis.defer_speed_up(p_hit, 4, 2, t_p=0.5, t_b=0.8, batch=batch)
    assert tokens / batch / time == pytest.approx(expected, rel=0.02)


def test_leviathan() -> None:
    assert analysis.tokens_per_round(0.8, 5) == pytest.approx(3.68928)
    assert analysis.tokens_per_round(0.8, 5) - 1 == pytest.approx(2.68928)  # of them drafted
    assert analysis.tokens_per_round(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert analysis.tokens_per_round(1, 5) == 6
    assert analysis.tokens_per_round(0, 5) == 1
    assert analysis.sd_speed_up(0.8, 5, 0.1) == pytest.approx(3.68928 / 1.5)
    weights = analysis.outcome_weights([0.8] * 5)
    assert math.fsum(weights) == pytest.approx(1)
    assert math.fsum(w * (k + 1) for k, w in enumerate(weights)) == pytest.approx(3.68928)
