"""Both acceptance rules emit exactly the target's law, over hits and misses; and the mutants the oracles must catch."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from oracles import (
    ONE,
    assert_coupled,
    assert_lossless,
    assert_lossless_over_cache,
    drawn,
    nothing,
    pointed,
    pruned,
    random_tokens,
    round_law,
)
from oracles import best as choice_of
from saguaro.orchestrator.sampling import accept_coupled, accept_ratio, cache_aware, draw, residual
from saguaro.orchestrator.types import Outcome, SparseProbs, Speculation

V = 3
OUTCOMES = [Outcome(k, token) for k in range(3) for token in range(V)]


def random_table(rng, parts=6):
    """Rows of multiples of 1/parts, zeros included."""

    def row():
        cuts = sorted(rng.choices(range(parts + 1), k=V - 1))
        return tuple(Fraction(high - low, parts) for low, high in zip([0, *cuts], [*cuts, parts]))

    return tuple(row() for _ in range(V))


def scaled_table(table, fan_out, scale):
    return tuple(tuple(cache_aware(np.array(row, dtype=object), fan_out, scale).tolist()) for row in table)


def truncated_table(table, size):
    """Each row's best `size` tokens, renormalised: the draft's sparse q."""

    def row(probs):
        kept = sorted(range(V), key=lambda token: -probs[token])[:size]
        total = sum(probs[token] for token in kept)
        return tuple(probs[token] / total if token in kept else Fraction(0) for token in range(V))

    return tuple(row(probs) for probs in table)


def reduced_table(table, left_out):
    """A draft whose head leaves a token out: each row over the others, renormalised; even where nothing remains."""

    def row(probs):
        total = sum(probs) - probs[left_out]
        rest = [probs[token] / total if total else Fraction(1, V - 1) for token in range(V)]
        return tuple(Fraction(0) if token == left_out else rest[token] for token in range(V))

    return tuple(row(probs) for probs in table)


def draft_tables(rng, table):
    scale = rng.choice([Fraction(0), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10)])
    yield table
    yield scaled_table(table, rng.choice([1, 2]), scale)
    yield truncated_table(table, 2)
    yield scaled_table(truncated_table(table, 2), 1, scale)
    yield reduced_table(table, rng.randrange(V))
    yield scaled_table(reduced_table(table, rng.randrange(V)), 1, scale)


def backups(table, lookahead):
    return {
        "primary": drawn(table, lookahead),
        "greedy": pointed(table, lookahead),
        "random": random_tokens(V, lookahead),
        "none": nothing,
    }


# ratio


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_ratio_emits_the_targets_law_in_one_round(lookahead):
    rng = random.Random(lookahead)
    for _ in range(40):
        target, draft = random_table(rng), random_table(rng)
        for table in draft_tables(rng, draft):
            assert_lossless(accept_ratio, target, drawn(table, lookahead), last=rng.randrange(V))


def test_ratio_emits_the_targets_law_whatever_point_masses_are_proposed():
    rng = random.Random(3)
    for _ in range(25):
        target, draft = random_table(rng), random_table(rng)
        assert_lossless(accept_ratio, target, pointed(draft, 2), last=0)
        assert_lossless(accept_ratio, target, random_tokens(V, 2), last=0)


def test_ratio_on_every_point_of_the_grid():
    """The shortened grid of the other tests measures what the whole grid does."""
    rng = random.Random(4)
    for _ in range(6):
        target, draft = random_table(rng, parts=3), random_table(rng, parts=3)
        assert_lossless(accept_ratio, target, drawn(draft, 2), last=0, every=True)
        assert round_law(accept_ratio, target, drawn(draft, 2), 0, every=True) == round_law(
            accept_ratio, target, drawn(draft, 2), 0
        )


@pytest.mark.parametrize("backup", ["primary", "greedy", "random", "none"])
def test_ratio_emits_the_targets_law_over_hits_and_misses(backup):
    rng = random.Random(backup)
    for _ in range(8):
        target, draft = random_table(rng), random_table(rng)
        table = rng.choice(list(draft_tables(rng, draft)))
        predictions = [(), OUTCOMES, *(rng.sample(OUTCOMES, k) for k in (1, 2, 4, 6))]
        assert_lossless_over_cache(
            accept_ratio,
            target,
            drawn(table, 2),
            predictions,
            branch=drawn(table, 2),
            backup=backups(random_table(rng), 1)[backup],
            last=rng.randrange(V),
        )


@pytest.mark.parametrize("least", [Fraction(1, 2), Fraction(2, 3), Fraction(1)])
def test_ratio_emits_the_targets_law_when_speculations_end_where_the_draft_is_unsure(least):
    """Confidence is a matter of the distribution, known before the draw: after hits, misses, and of any length."""
    rng = random.Random(str(least))
    lengths = set()
    for _ in range(12):
        target, draft = random_table(rng), random_table(rng)
        last = rng.randrange(V)
        lengths |= {len(speculation.tokens) for _, speculation in pruned(draft, 2, least)(last)}
        assert_lossless(accept_ratio, target, pruned(draft, 2, least), last=last)
    assert len(lengths) > 1
    for _ in range(3):
        target, draft = random_table(rng), random_table(rng)
        assert_lossless_over_cache(
            accept_ratio,
            target,
            pruned(draft, 2, least),
            [(), OUTCOMES, rng.sample(OUTCOMES, 3)],
            branch=pruned(draft, 2, least),
            backup=pruned(random_table(rng), 2, least),
            last=rng.randrange(V),
        )


def test_the_oracle_catches_a_speculation_that_ends_at_an_unlikely_token():
    """Ended by what was drawn, it keeps likely tokens more often than their distribution says."""
    with pytest.raises(AssertionError, match="wrong probability"):
        assert_lossless(accept_ratio, TARGET, pruned(DRAFT, 1, Fraction(2, 5), by_drawn=True), last=0)


# Mutants of `ratio`: each of these mistakes has been made in public code (the feature matrix names where).


def ratio_with(accepts, replace):
    """`accept_ratio` with its test and its replacement exchanged."""

    def accept(target_probs, speculation, accept_uniforms, bonus_uniform):
        for k, token in enumerate(speculation.tokens):
            drafts = speculation.draft_probs
            draft = SparseProbs((token,), (ONE,)) if drafts is None else drafts[k]
            q = dict(zip(draft.ids, draft.probs))[token]
            if not accepts(accept_uniforms[k], target_probs[k], token, q, drafts is None):
                return Outcome(k, draw(replace(target_probs[k], draft, drafts is None), bonus_uniform))
        return Outcome(len(speculation.tokens), draw(target_probs[len(speculation.tokens)], bonus_uniform))

    return accept


def right_test(u, p, token, q, point):
    return u * q < p[token]


def right_replacement(p, draft, point):
    return residual(p, draft)


def lenient_test(u, p, token, q, point):
    return u * q <= p[token]


def reversed_residual(p, draft, point):
    rest = -p
    rest[list(draft.ids)] += np.array(draft.probs, dtype=object)
    rest = np.maximum(rest, 0)
    return rest / rest.sum() if rest.sum() > 0 else p


def unchanged_target(p, draft, point):
    return p


def greedy_test_on_misses(u, p, token, q, point):
    return token == p.argmax() if point else u * q < p[token]


def target_on_misses(p, draft, point):
    return p if point else residual(p, draft)


TARGET = ((Fraction(3, 6), Fraction(2, 6), Fraction(1, 6)),) * 3
DRAFT = ((Fraction(1, 6), Fraction(2, 6), Fraction(3, 6)),) * 3
ALMOST = ((Fraction(4, 6), Fraction(2, 6), Fraction(0)),) * 3


def test_the_exchangeable_rule_is_right_when_nothing_is_exchanged():
    assert_lossless(ratio_with(right_test, right_replacement), TARGET, drawn(DRAFT, 2), last=0)
    assert_lossless(ratio_with(right_test, right_replacement), TARGET, random_tokens(V, 2), last=0)


@pytest.mark.parametrize(
    ("mutant", "target", "drafter"),
    [
        pytest.param(ratio_with(right_test, reversed_residual), TARGET, drawn(DRAFT, 2), id="residual q - p"),
        pytest.param(ratio_with(right_test, unchanged_target), TARGET, drawn(DRAFT, 2), id="no residual"),
        pytest.param(ratio_with(lenient_test, right_replacement), TARGET, drawn(DRAFT, 2), id="u <= p/q"),
        pytest.param(ratio_with(lenient_test, right_replacement), ALMOST, drawn(DRAFT, 1), id="u <= p/q where p = 0"),
        pytest.param(
            ratio_with(greedy_test_on_misses, target_on_misses), TARGET, pointed(TARGET, 2), id="greedy test on a miss"
        ),
        pytest.param(
            ratio_with(greedy_test_on_misses, target_on_misses), TARGET, random_tokens(V, 2), id="and random backup"
        ),
        pytest.param(ratio_with(right_test, target_on_misses), TARGET, pointed(DRAFT, 1), id="point mass, no residual"),
    ],
)
def test_the_oracle_catches_wrong_rules(mutant, target, drafter):
    with pytest.raises(AssertionError, match="wrong probability"):
        assert_lossless(mutant, target, drafter, last=0)


@pytest.mark.parametrize(
    ("from_table", "recorded"),
    [
        pytest.param(scaled_table(DRAFT, 1, Fraction(1, 2)), DRAFT, id="scaled after recording"),
        pytest.param(DRAFT, scaled_table(DRAFT, 1, Fraction(1, 2)), id="recorded as scaled"),
        pytest.param(truncated_table(DRAFT, 2), DRAFT, id="truncated after recording"),
    ],
)
def test_the_oracle_catches_a_recorded_q_that_was_not_drawn_from(from_table, recorded):
    with pytest.raises(AssertionError, match="wrong probability"):
        assert_lossless(accept_ratio, TARGET, drawn(from_table, 2, recorded), last=0)


def test_the_oracle_catches_a_wrong_rule_on_misses_only():
    mutant = ratio_with(greedy_test_on_misses, target_on_misses)
    hits_only, rarely = [OUTCOMES], [[Outcome(2, 0)]]
    cache = {"branch": drawn(DRAFT, 1), "backup": pointed(TARGET, 1), "last": 0}
    assert_lossless_over_cache(mutant, TARGET, drawn(DRAFT, 2), hits_only, **cache)
    with pytest.raises(AssertionError, match="two rounds"):
        assert_lossless_over_cache(mutant, TARGET, drawn(DRAFT, 2), rarely, **cache)


def test_the_biased_miss_rule_has_the_bias_that_was_published():
    """Erratum E-14: p_max = .6, and a backup that is always the argmax: 1 instead of .6."""
    target = ((Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)),) * 3
    law = round_law(ratio_with(greedy_test_on_misses, target_on_misses), target, pointed(target, 1), 0)
    assert sum(mass for tokens, mass in law.items() if tokens[0] == 0) == 1


def test_the_reversed_residual_emits_the_draft():
    """Erratum E-1: min(p, q) + max(0, q - p) = q."""
    law = round_law(ratio_with(right_test, reversed_residual), TARGET, drawn(DRAFT, 1), 0)
    first = [sum((mass for tokens, mass in law.items() if tokens[0] == x), Fraction(0)) for x in range(V)]
    assert first == list(DRAFT[0])


# coupled

VECTORS = [(0, 0, 0), (5, 0, 2), (0, 3, 3), (-4, 1, 6)]  # with exact ties between tokens


def coupled_draft(scores, lookahead):
    def drafter(last, position, noise):
        tokens = [last]
        for vector in noise[position : position + lookahead]:
            tokens.append(choice_of(scores[tokens[-1]], vector))
        return tokens[1:]

    return drafter


def fixed_draft(*tokens):
    return lambda _last, _position, _noise: tokens


def random_scores(rng):
    return [[rng.randrange(-3, 4) for _ in range(V)] for _ in range(V)]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_coupled_emits_plain_decodings_tokens_for_every_noise(lookahead):
    rng = random.Random(lookahead)
    for _ in range(12):
        target, draft = random_scores(rng), random_scores(rng)
        left_out = rng.randrange(V)
        reduced = [[-math.inf if t == left_out else score for t, score in enumerate(row)] for row in draft]
        drafters = [
            coupled_draft(draft, lookahead),  # a hit
            coupled_draft(reduced, lookahead),  # of a reduced head
            fixed_draft(*rng.choices(range(V), k=lookahead)),  # a backup that knows nothing
            coupled_draft(target, 1),  # a perfect one
            fixed_draft(),  # none
        ]
        rng.shuffle(drafters)
        assert_coupled(accept_coupled, target, VECTORS, 4, rng.randrange(V), drafters)


def accept_always(choices, tokens):
    *_, bonus = choices
    return Outcome(len(tokens), bonus)


def accept_one_too_many(choices, tokens):
    listed = list(choices)
    right = accept_coupled(listed, tokens)
    accepted = min(right.accepted + 1, len(tokens))
    return Outcome(accepted, listed[accepted])


def bonus_of_the_first_row(choices, tokens):
    listed = list(choices)
    return Outcome(accept_coupled(listed, tokens).accepted, listed[0])


@pytest.mark.parametrize("mutant", [accept_always, accept_one_too_many, bonus_of_the_first_row])
def test_the_coupled_oracle_catches_wrong_rules(mutant):
    target, draft = [[0, 2, 1], [1, 0, 2], [2, 1, 0]], [[2, 0, 1], [1, 0, 2], [0, 1, 2]]
    assert_coupled(accept_coupled, target, VECTORS, 3, 0, [coupled_draft(draft, 2)])
    with pytest.raises(AssertionError, match="plain decoding"):
        assert_coupled(mutant, target, VECTORS, 3, 0, [coupled_draft(draft, 2)])


def test_accept_coupled_reads_no_choice_beyond_the_outcome():
    def choices():
        yield 4
        yield 5
        raise AssertionError("read too far")

    assert accept_coupled(choices(), [4, 6, 7]) == Outcome(1, 5)
    with pytest.raises(ValueError, match="3 choices"):
        accept_coupled([1, 2], [1, 2])


def test_ratio_reads_no_row_beyond_the_outcome_and_refuses_an_impossible_draft():
    half = np.array([Fraction(1, 2), Fraction(1, 2), Fraction(0)], dtype=object)

    def rows():
        yield half
        raise AssertionError("read too far")

    point = Speculation((2, 0))
    assert accept_ratio(rows(), point, [Fraction(0), Fraction(0)], Fraction(0)) == Outcome(0, 0)
    foreign = Speculation((2,), (SparseProbs((0, 1), (0.5, 0.5)),))
    with pytest.raises(ValueError, match="draft token 2 at index 0"):
        accept_ratio([half, half], foreign, [Fraction(0)], Fraction(0))
