from hypothesis import given
from hypothesis import strategies as st

from saguaro.orchestrator.fan_out_policy import fixed, uniform


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
