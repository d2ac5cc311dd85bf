from saguaro.orchestrator.speculation_cache import SpeculationCache
from saguaro.orchestrator.types import Outcome, SparseProbs, Speculation


def test_a_hit_returns_what_was_stored_with_the_distributions_it_was_drawn_from() -> None:
    stored = Speculation((5, 6), (SparseProbs((5, 7), (0.5, 0.5)), SparseProbs((6,), (1.0,))))
    cache = SpeculationCache()
    cache.put_all([(1, Outcome(0, 3), stored), (1, Outcome(2, 3), Speculation((9,)))])
    assert cache.take(1, Outcome(0, 3)) is stored
    assert cache.take(1, Outcome(2, 3)) == Speculation((9,))


def test_outcomes_of_two_sequences_never_collide() -> None:
    cache = SpeculationCache()
    cache.put_all([(1, Outcome(0, 3), Speculation((1,))), (2, Outcome(0, 3), Speculation((2,)))])
    assert cache.take(2, Outcome(0, 3)) == Speculation((2,))
    assert cache.take(1, Outcome(0, 3)) == Speculation((1,))


def test_a_round_is_never_served_in_the_next_one() -> None:
    cache = SpeculationCache()
    cache.put_all([(1, Outcome(0, 3), Speculation((1,)))])
    cache.put_all([(2, Outcome(0, 4), Speculation((2,)))])
    assert cache.take(1, Outcome(0, 3)) is None
    assert len(cache) == 1


def test_a_speculation_is_taken_once() -> None:
    cache = SpeculationCache()
    cache.put_all([(1, Outcome(0, 3), Speculation((1,)))])
    assert cache.take(1, Outcome(0, 3)) is not None
    assert cache.take(1, Outcome(0, 3)) is None
