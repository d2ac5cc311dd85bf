import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from saguaro.errors import ConfigError, EngineError, ProtocolError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.randomness import GUMBEL_MAX, Purpose, gumbel, uniform, uniforms
from saguaro.orchestrator.sampling import (
    Candidates,
    Query,
    Trial,
    accept_ratio,
    acceptance,
    cache_aware,
    check_vocabulary,
    coupled_acceptance,
    draw,
    draw_draft,
    needs_history,
    residual,
)
from saguaro.orchestrator.sampling import choose as choose_all
from saguaro.orchestrator.sampling import propose as propose_all
from saguaro.orchestrator.sampling import verify as verify_all
from saguaro.orchestrator.scores import _mass, adjusted, filtered, near_ties
from saguaro.orchestrator.types import Outcome, RequestSampling, SamplingParams, SparseProbs, Speculation

DRAWS = 200_000
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # others may use the machine
NO_TAIL = [()]


def request(seed=7, prompt_length=1, stop_ids=(), **params):
    return RequestSampling(SamplingParams(**params), seed, prompt_length, stop_ids)


def logits_of(*rows):
    """Float64 logits whose softmax is the rows."""
    return torch.tensor(rows, dtype=torch.float64).log()


def scores(*chain):
    """[R, V] scores of the target's chain, whose softmax is p."""
    return target_scores(*chain).dense()


def target_scores(logits, request, context, tails, allowed=None):
    return filtered(adjusted(logits, request, context, tails, allowed), request.params)


def verify(logits, request, rule, context, speculation, allowed=None):
    """One trial."""
    (outcome,) = verify_all(logits, [Trial(request, context, speculation, allowed)], rule)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def propose(logits, request, rule, context, tails, width, allowed=None, **options):
    """One query."""
    (found,) = propose_all(logits, [Query(request, context, tails, width, allowed)], rule, **options)
    return found


def choose(row, seed, position, ids=None):
    """One row."""
    ids = None if ids is None else ids.numpy()[None]
    return int(choose_all(row.numpy()[None], np.array([0]), np.array([seed], np.uint64), np.array([position]), ids)[0])


def probs_of(table):
    return torch.softmax(table, -1, dtype=torch.float64)


def random_logits(rows, vocab_size, seed=0, spread=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64) * spread).to(dtype)


# The chain, against the processors of transformers as oracle


@pytest.mark.parametrize("penalty", [0.7, 1.1, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = random_logits(2, 40)
    context, tails = [3, 3, 7, 39], [(), (5,)]
    found = scores(logits, request(prompt_length=3, repetition_penalty=penalty), context, tails)
    for row, tail in enumerate(tails):
        ids = torch.tensor([[*context, *tail]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1])
        assert torch.equal(found[row : row + 1], expected)


@pytest.mark.parametrize(
    "filters", list(itertools.product([0, 1, 5, 100, 300, 5000], [1.0, 0.9, 0.3], [0.0, 0.05, 0.5]))
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_temperature_and_filters_are_those_of_transformers_in_that_order(filters, temperature):
    top_k, top_p, min_p = filters
    logits = random_logits(3, 400, dtype=torch.float64)
    found = scores(logits, request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), [0], [()] * 3)
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    assert torch.equal(found > -math.inf, expected > -math.inf)
    torch.testing.assert_close(probs_of(found), probs_of(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad_words", [((4,),), ((3, 9), (7,)), ((2, 3, 9), (9, 9)), ((1, 2, 3, 4, 5, 6),)])
def test_bad_words_are_those_of_transformers(bad_words):
    logits = random_logits(3, 12)
    context, tails = [1, 2], [(), (3,), (3, 9)]
    found = scores(logits, request(bad_words=bad_words), context, tails)
    for row, tail in enumerate(tails):
        processor = NoBadWordsLogitsProcessor([list(word) for word in bad_words], eos_token_id=None)
        assert torch.equal(found[row : row + 1], processor(torch.tensor([[*context, *tail]]), logits[row : row + 1]))


def test_stops_are_banned_until_min_tokens_were_emitted_also_inside_a_trunk():
    logits = random_logits(4, 12)
    context, tails = [1, 2, 5], [(), (3,), (3, 9), (3, 9, 9)]
    found = scores(logits, request(prompt_length=2, stop_ids=(4,), stop_token_ids=(6,), min_tokens=3), context, tails)
    processor = MinNewTokensLengthLogitsProcessor(2, 3, torch.tensor([4, 6]))
    for row, tail in enumerate(tails):
        assert torch.equal(found[row : row + 1], processor(torch.tensor([[*context, *tail]]), logits[row : row + 1]))


def test_presence_and_frequency_count_every_emitted_token_and_no_prompt_token():
    logits = torch.zeros(3, 8, dtype=torch.float64)
    context, tails = [1, 2, 5, 5], [(), (5,), (5, 6)]  # prompt: 1, 2
    found = scores(logits, request(prompt_length=2, presence_penalty=0.5, frequency_penalty=0.1), context, tails)
    expected = torch.zeros(3, 8, dtype=torch.float64)
    expected[0, 5] = -0.5 - 0.2
    expected[1, 5] = -0.5 - 0.3
    expected[2, 5], expected[2, 6] = -0.5 - 0.3, -0.5 - 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_penalties_advance_per_token_when_four_are_accepted_a_round():
    """I-10: after 12 tokens in rounds of 4 the logits are penalised by the counts of all 12."""
    emitted = [1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1, 3]
    params = request(prompt_length=1, frequency_penalty=0.5)
    base = torch.zeros(1, 6, dtype=torch.float64)
    for start in range(0, 12, 4):
        trunk = emitted[start : start + 4]
        rows = scores(base.expand(5, -1), params, [0, *emitted[:start]], [trunk[:k] for k in range(5)])
        for k in range(5):
            counts = Counter(emitted[: start + k])
            assert rows[k].tolist() == [-0.5 * counts[token] for token in range(6)]


def test_the_steps_come_in_the_documented_order():
    """Bias before penalty (a biased logit is what is divided), penalties before temperature, bans before filters."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]], dtype=torch.float64)
    found = scores(logits, request(logit_bias={1: 4.0}, repetition_penalty=2.0, temperature=0.5), [1], NO_TAIL)
    expected = torch.tensor([[1.0, (2.0 + 4.0) / 2, 3.0, 0.0]], dtype=torch.float64) / 0.5
    torch.testing.assert_close(probs_of(found), probs_of(expected), rtol=1e-14, atol=0)
    banned = scores(logits, request(bad_words=((2,),), top_k=1), [1], NO_TAIL)
    assert banned.argmax() == 1
    assert (banned > -math.inf).sum() == 1
    masked = scores(logits, request(top_k=2), [1], NO_TAIL, torch.tensor([[True, True, False, True]]))
    assert (masked > -math.inf).tolist() == [[True, True, False, False]]


def test_top_k_keeps_ties_with_the_last_one_and_top_p_the_first_of_equal_ones():
    tied = torch.zeros(1, 300)
    tied[0, 250] = 1.0
    assert (scores(tied, request(top_k=5), [0], NO_TAIL) > -math.inf).all()
    nucleus = scores(torch.zeros(1, 300), request(top_p=0.1), [0], NO_TAIL)
    assert (nucleus[0] > -math.inf).nonzero().flatten().tolist() == list(range(30))
    both = scores(torch.tensor([[0.0, 1, 1, 1, 0, -1]]), request(top_k=2, top_p=0.5), [0], NO_TAIL)
    assert (both[0] > -math.inf).nonzero().flatten().tolist() == [1, 2]
    # Ties with the k-th value weigh in for top-p even where they reach beyond any short list.
    long = torch.full((1, 300), -1.0)
    long[0, [7, 70, 170]] = torch.tensor([0.0, -0.1, -0.2])
    kept = scores(long, request(top_k=5, top_p=0.05), [0], NO_TAIL)[0] > -math.inf
    ahead = 1 + math.exp(-0.1) + math.exp(-0.2)
    ties = math.ceil((0.05 * (ahead + 297 / math.e) - ahead) * math.e)
    assert kept.nonzero().flatten().tolist() == sorted([7, 70, 170, *[t for t in range(300) if t != 7][:ties]])


@pytest.mark.parametrize("seed", range(4))
def test_filters_on_a_large_vocabulary_are_the_definition(seed):
    """Lists are short, grouped and grown on demand; the definition sorts everything. Rounded logits have many ties."""
    generator = np.random.default_rng(seed)
    table = np.round(generator.normal(size=(2, 30_000)) * [[0.3], [3.0]], 1)
    for top_k, top_p, min_p in [
        (0, 0.9, 0.0),
        (50, 1.0, 0.0),
        (50, 0.8, 0.0),
        (0, 1.0, 0.2),
        (700, 0.99, 0.01),
        (0, 1e-9, 0),
    ]:
        found = scores(torch.from_numpy(table), request(top_k=top_k, top_p=top_p, min_p=min_p), [0], [(), ()])
        for row, values in enumerate(table):
            order = np.argsort(-values, kind="stable")
            ranked = values[order]
            keep = np.ones(len(values), dtype=bool)
            if top_k:
                keep &= ranked >= ranked[top_k - 1]
            weights = np.where(keep, np.exp(ranked - ranked[0]), 0)
            before = np.cumsum(weights) - weights
            keep &= before / weights.sum() < top_p
            keep &= np.exp(ranked - ranked[0]) >= min_p
            assert set(np.flatnonzero(found[row].numpy() > -np.inf)) == set(order[keep])
            kept = order[keep]
            assert found[row, kept].tolist() == table[row, kept].tolist()


ALL_PARAMS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"temperature": 1.3, "top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 3},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"frequency_penalty": 0.5, "logit_bias": {3: 2.0, 9: -100.0}, "bad_words": ((5,), (1, 2))},
    {"min_tokens": 12, "stop_token_ids": (4, 7), "temperature": 2.0},
]


@pytest.fixture
def two_threads():
    """With more than one thread, torch may sum a single row in another order than a row among others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("params", ALL_PARAMS)
@pytest.mark.parametrize("vocab_size", [50, 20_000])
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_in_any_batch(params, vocab_size):
    logits = random_logits(5, vocab_size)
    context, tails = [1, 2, 3, 3], [(5, 1, 2, 9)[:k] for k in range(5)]
    together = scores(logits, request(**params), context, tails)
    for row in range(5):
        alone = scores(logits[row : row + 1], request(**params), context, tails[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.usefixtures("two_threads")
def test_the_mass_of_a_row_has_the_same_bits_in_any_batch():
    logits = random_logits(5, 70_000)
    best = logits.amax(-1, keepdim=True)
    together = _mass(logits, best, 0.8)
    alone = [_mass(logits[row : row + 1], best[row : row + 1], 0.8) for row in range(5)]
    assert torch.equal(together, torch.cat(alone))
    torch.testing.assert_close(together.log(), ((logits - best).double() / 0.8).logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_history_is_read_only_where_it_is_needed(params):
    logits = random_logits(2, 50)
    if not needs_history(SamplingParams(**params)):
        real = scores(logits, request(**params), [1, 2, 3, 3], [(), (5,)])
        lengths_only = scores(logits, request(**params), range(4), [(), (0,)])
        assert torch.equal(real, lengths_only)


def test_penalties_and_bad_words_of_several_tokens_need_the_history():
    needing = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1.0},
        {"bad_words": ((1, 2),)},
    ]
    assert all(needs_history(SamplingParams(**params)) for params in needing)
    assert not needs_history(SamplingParams(bad_words=((3,),), min_tokens=4, logit_bias={1: 1.0}, top_p=0.5))


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_logits_are_left_as_they_are(params):
    logits = random_logits(2, 50)
    before = logits.clone()
    scores(logits, request(**params), [1, 2, 3], [(), (5,)])
    propose(logits, request(**params), "coupled", [1, 2, 3], [(), (5,)], 8)
    assert torch.equal(logits, before)


def test_half_precision_is_promoted_and_float64_kept():
    logits = random_logits(1, 50, dtype=torch.bfloat16)
    found = scores(logits, request(temperature=0.5), [0], NO_TAIL)
    assert found.dtype == torch.float32
    torch.testing.assert_close(probs_of(found), probs_of(logits.float() / 0.5), rtol=1e-6, atol=0)
    assert scores(logits.double(), request(), [0], NO_TAIL).dtype == torch.float64


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-20, 1e-6, 100.0])
def test_no_temperature_overflows(temperature):
    logits = torch.tensor([[1e4, -1e4, 1e4 - 1, 0.0]])
    found = probs_of(scores(logits, request(temperature=temperature), [0], NO_TAIL))
    assert found.isfinite().all()
    assert found.argmax() == 0
    if temperature < 1e-3:
        assert found[0, 0] == 1


def test_an_empty_row_is_refused_and_names_the_reasons():
    banned = request(bad_words=((0,), (1,)))
    with pytest.raises(ConfigError, match=r"no token may follow at position 3: bad_words, min_tokens.*all 2 tokens"):
        verify(torch.zeros(1, 2), banned, "coupled", [0, 0, 1], Speculation())
    for params in ({}, {"top_p": 0.5}, {"temperature": 0.5, "top_k": 1}, {"min_p": 0.5}, {"temperature": 0.0}):
        nothing = torch.zeros(1, 2, dtype=torch.bool)
        with pytest.raises(ConfigError, match="position 1"):
            verify(torch.zeros(1, 2), request(**params), "coupled", [0], Speculation(), nothing)


KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {2: 1.5}},
    {"temperature": 0.0, "bad_words": ((4,),), "frequency_penalty": 0.5},
)


@settings(untimed, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from(["coupled", "ratio"]))
def test_a_round_of_many_decides_as_each_alone(seed, count, rule):
    """Whatever is looked at at once: here a row or two."""
    generator = np.random.default_rng(seed)
    trials, tables = [], []
    for index in range(count):
        size = int(generator.integers(0, 4))
        tokens = tuple(generator.integers(0, 23, size).tolist())
        context = generator.integers(0, 23, int(generator.integers(1, 6))).tolist()
        drawn = request(int(generator.integers(2**63)), **KINDS[int(generator.integers(len(KINDS)))])
        allowed = torch.from_numpy(generator.random((size + 1, 23)) < 0.5) if generator.random() < 0.3 else None
        trials.append(Trial(drawn, context, Speculation(tokens), allowed))
        tables.append(random_logits(size + 1, 23, seed + index))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_AT_ONCE", int(generator.integers(1, 200)))
        together = verify_all(torch.cat(tables), trials, rule)
    for outcome, table, trial in zip(together, tables, trials, strict=True):
        (alone,) = verify_all(table, [trial], rule)
        if isinstance(alone, ConfigError):
            assert str(outcome) == str(alone)
        else:
            assert outcome == alone


@settings(untimed, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from(["coupled", "ratio"]), st.booleans(), st.booleans())
def test_what_is_proposed_to_many_is_proposed_to_each_alone(seed, count, rule, confidence, weights):
    generator = np.random.default_rng(seed)
    queries, tables = [], []
    for index in range(count):
        tails = [tuple(generator.integers(0, 23, int(n)).tolist()) for n in generator.integers(0, 4, 3)]
        context = generator.integers(0, 23, int(generator.integers(1, 6))).tolist()
        drawn = request(int(generator.integers(2**63)), **KINDS[int(generator.integers(len(KINDS)))])
        allowed = torch.from_numpy(generator.random((3, 23)) < 0.5) if generator.random() < 0.3 else None
        first = bool(generator.random() < 0.5)
        queries.append(Query(drawn, context, tails, int(generator.integers(2, 9)), allowed, first))
        tables.append(random_logits(3, 23, seed + index))
    asked = {"confidence": confidence, "weights": weights}
    together = propose_all(torch.cat(tables), queries, rule, **asked)
    for found, table, query in zip(together, tables, queries, strict=True):
        (alone,) = propose_all(table, [query], rule, **asked)
        assert found.ids.tolist() == alone.ids.tolist()
        (ranked,) = propose_all(table, [replace(query, first=False)], rule, **asked)
        assert found.ids[:, 0].tolist() == ranked.ids[:, 0].tolist()
        assert weights or found.weights is None
        if found.weights is not None:
            assert np.array_equal(found.weights[:, 0], ranked.weights[:, 0])
        for name in ("probs", "confidence", "weights"):
            mine, own = getattr(found, name), getattr(alone, name)
            assert (mine is None) == (own is None)
            assert mine is None or np.array_equal(mine, own)


def test_rows_choose_with_their_own_seeds_and_positions(monkeypatch):
    table = random_logits(40, 301).numpy()
    table[7] = -np.inf  # nothing may follow; the others do not notice
    seeds, positions = np.arange(40, dtype=np.uint64) * 2**58, np.arange(40) * 3
    rows = np.random.default_rng(0).permutation(40)
    together = choose_all(table, rows, seeds, positions)
    ids = np.argsort(-table, kind="stable")
    listed = choose_all(np.take_along_axis(table, ids, 1), rows, seeds, positions, ids)
    monkeypatch.setattr(sampling, "_IN_CACHE", 700)  # two rows at a time
    assert choose_all(table, rows, seeds, positions).tolist() == together.tolist()
    for place, row in enumerate(rows):
        if row != 7:
            expected = unpruned(torch.from_numpy(table[row]), int(seeds[place]), int(positions[place]))
            assert together[place] == listed[place] == expected


def test_an_empty_row_matters_only_if_it_is_reached():
    logits = torch.tensor([[0.0, 9.0, 0.0]] * 3)
    allowed = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    for params, rule in itertools.product(
        ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-3}), ("coupled", "ratio")
    ):
        rejected = verify(logits, request(**params), rule, [0], Speculation((2, 2)), allowed)
        assert rejected == Outcome(0, 1)
        with pytest.raises(ConfigError, match="position 2"):
            verify(logits, request(**params), rule, [0], Speculation((1, 2)), allowed)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_the_engines_fault(bad):
    logits = torch.tensor([[0.0, bad, 1.0]])
    for params in ({}, {"temperature": 0.0}, {"top_k": 1}):
        with pytest.raises(EngineError, match="not finite numbers"):
            verify(logits, request(**params), "coupled", [0], Speculation())
        with pytest.raises(EngineError, match="not finite numbers"):
            propose(logits, request(**params), "coupled", [0], NO_TAIL, 2)


def test_token_ids_beyond_the_vocabulary_are_refused_at_admission_and_harmless_below():
    for field, value in (("logit_bias", {10: 1.0}), ("bad_words", ((1, 10),)), ("stop_token_ids", (-1,))):
        params = SamplingParams(**{field: value})
        with pytest.raises(ConfigError, match=rf"{field} names token id .*0 to 9"):
            check_vocabulary(params, 10)
        check_vocabulary(SamplingParams(), 10)
        logits = random_logits(1, 10)
        found = scores(logits, RequestSampling(params, 1, 1, stop_ids=(12,)), [0, 1], NO_TAIL)
        assert torch.equal(found, logits)
    penalised = scores(random_logits(1, 10), request(repetition_penalty=1.5), [200, 3], NO_TAIL)
    assert torch.equal(penalised, scores(random_logits(1, 10), request(repetition_penalty=1.5), [3, 3], NO_TAIL))


def test_a_huge_bias_is_not_an_infinity():
    found = scores(torch.zeros(1, 4), request(logit_bias={1: 1e300, 2: -1e300}), [0], NO_TAIL)
    assert probs_of(found).tolist() == [[0, 1, 0, 0]]


def test_every_parameter_is_read_by_the_chain_or_belongs_to_the_scheduler():
    """I-09, I-11: a parameter that nothing reads would be dropped silently."""
    source = (Path(sampling.__file__).parent / "scores.py").read_text()
    ends = {
        "ignore_eos",
        "max_tokens",
        "seed",
        "logprobs",
        "stop",
        "include_stop_str_in_output",
        "n",
        "json_schema",
        "regex",
        "grammar",
    }  # ends and seeds are RequestSampling's and the scheduler's
    for name in SamplingParams.__dataclass_fields__:
        assert name in ends or f"params.{name}" in source, name


# choose


def unpruned(row, seed, position):
    totals = row.numpy().astype(np.float64) + gumbel(seed, position, np.arange(len(row)))
    return int(totals.argmax())  # the lowest id on a tie


@settings(untimed, max_examples=150)
@given(
    st.lists(
        st.one_of(st.floats(-30, 5, width=32), st.sampled_from([-math.inf, 0.0, -17.4, -20.2, 1e30, -1e30, 1e9])),
        min_size=1,
        max_size=80,
    ).filter(lambda row: max(row) > -math.inf),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_pruning_never_changes_the_choice(row, seed, position, dtype):
    table = torch.tensor(row, dtype=dtype)
    assert choose(table, seed, position) == unpruned(table, seed, position)


@settings(untimed, max_examples=150)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(2, 200),
    st.one_of(st.floats(-3, 17), st.sampled_from([1e9, 1e12, -1e12])),
    st.sampled_from([0.0, 1e-6, 1e-15, 1.0]),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_pruning_is_exact_for_rows_made_of_near_ties(seed, vocab_size, level, spread, dtype, data):
    """Scores that undo the noise, so that every total is about `level`: the worst case for any bound."""
    noise = gumbel(seed, 3, np.arange(vocab_size))
    jitter = np.array(data.draw(st.lists(st.integers(-2, 2), min_size=vocab_size, max_size=vocab_size))) * spread
    table = torch.from_numpy(level - noise + jitter).to(dtype)
    assert choose(table, seed, 3) == unpruned(table, seed, 3)


def test_pruning_on_a_large_vocabulary():
    for seed, spread in itertools.product(range(6), (0.0, 0.5, 3.0, 6.0)):
        table = random_logits(1, 20_001, seed, spread)[0]
        assert choose(table, seed, 5) == unpruned(table, seed, 5)


LUCKY = 138  # with seed 1 at position 26 its noise is the greatest there is


def neighbours(value, dtype):
    """The representable numbers around a value, which decide ties and roundings."""
    steps = [np.asarray(value, dtype=dtype)]
    for direction in (-np.inf, np.inf):
        step = steps[0]
        for _ in range(4):
            step = np.nextafter(step, np.asarray(direction, dtype=dtype))
            steps.append(step)
    return [float(step) for step in steps]


@pytest.mark.parametrize("base", [0.0, 3.7, -1e4, 1e12, 2.0**49 + 1, -1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_as_far_below_as_the_bound_allows_still_wins(base, dtype):
    noise = gumbel(1, 26, np.arange(200))
    assert noise[LUCKY] == pytest.approx(GUMBEL_MAX)
    winners = set()
    for leader in (0, 150):
        table = torch.full((200,), -1e30, dtype=dtype)
        table[leader] = base
        reach = float(table[leader]) + noise[leader]
        for score in neighbours(reach - noise[LUCKY], np.float32 if dtype == torch.float32 else np.float64):
            table[LUCKY] = score
            winner = choose(table, 1, 26)
            assert winner == unpruned(table, 1, 26)
            winners.add(winner == LUCKY)
    assert winners == {True, False}


@pytest.mark.parametrize("base", [0.0, 1e9, 1e12, 1e15])
def test_a_token_just_outside_the_near_ones_still_wins(base):
    """Tokens 4 and a little below the leader, with just the noise that takes them past it: the second stage's edge."""
    noise = gumbel(2, 5, np.arange(100_000))
    leader = 77_777
    needed = np.argsort(np.abs(noise - noise[leader] - 4))[:10]
    for token in needed:
        table = torch.full((100_000,), -1e30, dtype=torch.float64)
        table[leader] = base
        reach = float(table[leader]) + noise[leader]
        for score in neighbours(reach - noise[token], np.float64):
            table[token] = score
            assert choose(table, 2, 5) == unpruned(table, 2, 5)


def test_ties_go_to_the_lowest_id():
    row = torch.zeros(6, dtype=torch.float64)
    totals = gumbel(5, 8, np.arange(6))
    row += torch.from_numpy(3.0 - totals)  # rounding aside, all totals are 3
    assert choose(row, 5, 8) == unpruned(row, 5, 8)
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert verify(tied, request(temperature=0.0), "coupled", [0], Speculation()) == Outcome(0, 1)
    assert verify(tied.bfloat16(), request(temperature=0.0), "ratio", [0], Speculation()) == Outcome(0, 1)
    # Past 1e17 the noise is lost in rounding: real ties between near tokens, dense and as a list.
    huge = torch.full((9,), 1e18, dtype=torch.float64)
    assert choose(huge, 5, 8) == 0
    assert choose(huge, 5, 8, torch.tensor([4, 3, 8, 2, 7, 6, 5, 1, 9])) == 1


def test_a_list_and_the_whole_vocabulary_choose_the_same():
    table = random_logits(1, 500)[0]
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    for position in range(50):
        assert choose(table, 3, position) == choose(table[order], 3, position, order)


def test_choose_draws_from_p():
    """The marginal law of argmax(log p + noise), over positions; `choose` itself is that argmax."""
    p = np.array([0.5, 0.3, 0.15, 0.04, 0.009, 0.001])
    row = torch.from_numpy(np.log(p))
    totals = np.log(p) + gumbel(99, np.arange(DRAWS)[:, None], np.arange(6))
    chosen = totals.argmax(-1)
    assert chisquare(np.bincount(chosen, minlength=6), p * DRAWS).pvalue > 1e-4
    assert [choose(row, 99, position) for position in range(500)] == chosen[:500].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_coupled_acceptance_is_the_measured_one(seed):
    generator = np.random.default_rng(seed)
    p, q = generator.dirichlet(np.ones(6) * 0.5, 2)
    noise = gumbel(seed, np.arange(DRAWS)[:, None], np.arange(6))
    measured = ((np.log(p) + noise).argmax(-1) == (np.log(q) + noise).argmax(-1)).mean()
    expected = coupled_acceptance(p, q)
    assert abs(measured - expected) < 4 * math.sqrt(expected * (1 - expected) / DRAWS)


def coupled_acceptance_by_definition(p, q):
    support = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in support)


PROBABILITIES = st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any).map(lambda w: np.array(w) / sum(w))


@untimed
@given(PROBABILITIES, PROBABILITIES)
def test_coupled_acceptance_is_its_formula_and_within_its_limits(p, q):
    found = coupled_acceptance(p, q)
    assert found == pytest.approx(coupled_acceptance_by_definition(p, q), abs=1e-12)
    distance = np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) - 1e-12 <= found <= 1 - distance + 1e-12


@untimed
@given(PROBABILITIES, PROBABILITIES)
def test_theorem_1_acceptance_is_one_minus_total_variation(p, q):
    assert acceptance(p, q) == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=1e-6)


# ratio: draws, residual, cache-aware sampling


def as_sparse(q):
    support = np.flatnonzero(q)
    return SparseProbs(tuple(support.tolist()), tuple(q[support].tolist()))


def test_residual_check_values():
    """Feature matrix row 4 and I-06; zero residual falls back to p."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    assert residual(p, as_sparse(q)).tolist() == [1, 0, 0]
    assert residual(p, as_sparse(p)).tolist() == p.tolist()
    assert residual(p, SparseProbs((1,), (1.0,))) == pytest.approx([0.5 / 0.7, 0, 0.2 / 0.7])


@untimed
@given(PROBABILITIES, st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 5e-324])))
def test_a_draw_inverts_the_distribution_and_never_returns_an_impossible_token(p, u):
    token = draw(p, u)
    assert p[token] > 0
    assert p[:token].sum() <= u + 1e-12
    assert p[: token + 1].sum() >= u - 1e-12


def test_draw_survives_rounding_at_both_ends():
    almost_one = 1 - 2**-53
    assert draw(np.array([0.0, 0.5, 0.5, 0.0]), 0.0) == 1
    assert draw(np.array([0.0, 0.5, 0.5, 0.0]), almost_one) == 2
    assert draw(np.array([0.0, 1.0, 0.0]), almost_one) == 1
    assert draw(np.full(10, 0.1), almost_one) == 9
    assert draw(np.array([1.0, 1e-300, 0.0]), almost_one) == 0
    for total in [*np.linspace(0.5, 2.0, 301), *(1 + k * 2.0**-52 for k in range(4)), 1 - 2**-53]:
        assert draw(np.array([0.0, total, 0.0]), almost_one) == 1
    with pytest.raises(ValueError, match="without mass"):
        draw(np.zeros(3), 0.5)


def test_acceptance_is_strict_and_gives_no_impossible_token_even_at_zero():
    """Feature matrix row 3."""
    p = np.array([[0.0, 1.0], [0.0, 1.0]])
    speculation = Speculation((0,), (SparseProbs((0, 1), (0.5, 0.5)),))
    assert accept_ratio(p, speculation, [0.0], 0.0) == Outcome(0, 1)
    assert accept_ratio(p, Speculation((0,)), [0.0], 0.0) == Outcome(0, 1)
    half = np.array([[0.25, 0.75], [0.5, 0.5]])
    assert accept_ratio(half, speculation, [0.5], 0.0).accepted == 0
    assert accept_ratio(half, speculation, [0.5 - 2**-53], 0.0) == Outcome(1, 0)


def test_theorem_19():
    p, q = np.array([0.48, 0.48, 0.02, 0.02]), np.array([0.49, 0.49, 0.01, 0.01])
    shaped = cache_aware(q, 2, 47 / 147)
    assert shaped == pytest.approx([0.47, 0.47, 0.03, 0.03], abs=1e-12)
    assert acceptance(p, q) == pytest.approx(0.98)
    assert acceptance(p, shaped) == pytest.approx(0.98)

    def hit_rate(draft, fan_out):
        """Chance that the bonus token is guessed, given a rejection: guesses are q's best but the rejected token."""
        best = np.argsort(-q, kind="stable")
        hit = rejected = 0.0
        for token in range(4):
            chance = max(draft[token] - p[token], 0)
            guesses = [x for x in best if x != token][:fan_out]
            rest = residual(p, as_sparse(draft))
            rejected += chance
            hit += chance * rest[guesses].sum()
        return hit / rejected

    assert hit_rate(q, 2) == pytest.approx(0.5)
    assert hit_rate(shaped, 2) == pytest.approx(1.0)
    assert hit_rate(q, 1) == pytest.approx(0.0, abs=1e-12)
    assert hit_rate(shaped, 1) == pytest.approx(0.5)


@untimed
@given(PROBABILITIES, PROBABILITIES, st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_theorem_15_a_smaller_c_puts_more_of_the_residual_on_the_guesses(p, q, fan_out, one, other):
    best = np.argsort(-q, kind="stable")[:fan_out]
    rates = []
    for scale in sorted((one, other)):
        rest = np.maximum(p - cache_aware(q, fan_out, scale), 0)
        rates.append(rest[best].sum() / rest.sum() if rest.sum() > 1e-9 else None)
    if None not in rates and q[np.argsort(-q, kind="stable")[fan_out:]].sum() > 0:
        assert rates[0] >= rates[1] - 1e-7


@untimed
@given(PROBABILITIES, st.integers(0, 6), st.floats(0, 1))
def test_cache_aware_scales_the_top_f_only(q, fan_out, scale):
    shaped = cache_aware(q, fan_out, scale)
    assert shaped.sum() == pytest.approx(1)
    order = np.argsort(-q, kind="stable")
    above, below = order[:fan_out], order[fan_out:]
    if q[below].sum() > 0 and fan_out > 0:
        total = scale * q[above].sum() + q[below].sum()
        assert shaped[above] == pytest.approx(scale * q[above] / total)
        assert shaped[below] == pytest.approx(q[below] / total)
    assert cache_aware(q, fan_out, 1.0) is q  # off is off, to the bit


# The draft


def test_a_greedy_draft_ranks_by_score():
    logits = random_logits(4, 3000)
    for rule in ("coupled", "ratio"):
        found = propose(logits, request(temperature=0.0), rule, [0], [()] * 4, 9)
        assert found.probs is None
        assert np.array_equal(found.ids, logits.topk(9, -1).indices)


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_a_coupled_draft_with_the_targets_logits_always_proposes_the_targets_choice(params):
    logits = random_logits(5, 300, spread=6.0)
    context, tails = [1, 2, 3, 3], [(5, 1, 2, 9)[:k] for k in range(5)]
    for seed in range(10):
        sampled = request(seed, **params)
        found = propose(logits, sampled, "coupled", context, tails, 200)
        for row, tail in enumerate(tails):
            target = verify(logits[row : row + 1], sampled, "coupled", [*context, *tail], Speculation())
            assert found.ids[row, 0] == target.bonus


def test_a_coupled_draft_ranks_the_listed_by_score_and_noise_and_the_filtered_last():
    logits = random_logits(3, 100)
    tails = [(), (1,), (1, 2)]
    found = propose(logits, request(temperature=0.5, top_k=4), "coupled", [0, 0], tails, 10)
    for row, tail in enumerate(tails):
        listed = logits[row].topk(10).indices.numpy()
        totals = logits[row].double().numpy()[listed] / 0.5 + gumbel(7, 2 + len(tail), listed)
        kept, dropped = listed[:4], listed[4:]
        expected = [*kept[np.argsort(-totals[:4])], *dropped[np.argsort(-totals[4:])]]
        assert found.ids[row].tolist() == expected


def test_a_ratio_draft_is_the_renormalised_top_of_the_chain():
    logits = random_logits(2, 500)
    found = propose(logits, request(temperature=0.7), "ratio", [0], [(), ()], 16)
    top = (logits.double() / 0.7).topk(16, -1)
    assert np.array_equal(found.ids, top.indices)
    np.testing.assert_allclose(found.probs, torch.softmax(top.values, -1), rtol=1e-5)
    assert found.probs.dtype == np.float64


@pytest.mark.parametrize("params", ALL_PARAMS)
@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_a_draft_row_is_the_same_in_any_batch(params, rule):
    logits = random_logits(5, 4000)
    context, tails = [1, 2, 3, 3], [(5, 1, 2, 9)[:k] for k in range(5)]
    together = propose(logits, request(**params), rule, context, tails, 12)
    for row in range(5):
        alone = propose(logits[row : row + 1], request(**params), rule, context, tails[row : row + 1], 12)
        assert np.array_equal(together.ids[row : row + 1], alone.ids)
        if together.probs is not None:
            assert np.array_equal(together.probs[row : row + 1], alone.probs)


def test_a_draft_wider_than_the_vocabulary_or_without_any_token_still_proposes():
    assert propose(torch.zeros(1, 5), request(), "coupled", [0], NO_TAIL, 64).ids.shape == (1, 5)
    nothing = torch.zeros(1, 5, dtype=torch.bool)
    for rule in ("coupled", "ratio"):
        found = propose(torch.zeros(1, 5), request(top_p=0.5), rule, [0], NO_TAIL, 3, nothing)
        assert found.ids.shape == (1, 3)
        if found.probs is not None:
            assert found.probs.sum() == pytest.approx(1)


def test_guesses_leave_out_the_token_under_verification():
    """Feature matrix row 23: never guessed at its own row; at row K nothing is excluded."""
    candidates = Candidates(np.array([[4, 2, 9, 1], [7, 8, 3, 0]]), None)
    assert candidates.guesses(0, 2, excluded=4) == (2, 9)
    assert candidates.guesses(0, 2, excluded=5) == (4, 2)
    assert candidates.guesses(1, 3) == (7, 8, 3)
    assert candidates.guesses(1, 3, excluded=8) == (7, 3, 0)


@pytest.mark.parametrize(("fan_out", "scale"), [(0, 1.0), (2, 1.0), (2, 0.5), (1, 0.0), (3, 0.25)])
def test_the_recorded_q_is_the_one_drawn_from(fan_out, scale):
    """I-03, feature matrix row 27: temperature 0.7 and top-k 2 leave two tokens, drawn as recorded."""
    logits = random_logits(1, 50)
    for top_k in (2, 5):
        candidates = propose(logits, request(temperature=0.7, top_k=top_k), "ratio", [0], NO_TAIL, 16)
        points = (np.arange(1000) + 0.5) / 1000
        drawn = [draw_draft(candidates, 0, u, fan_out, scale) for u in points]
        recorded = drawn[0][1]
        assert all(probs == recorded for _, probs in drawn)
        if scale > 0:
            assert len(recorded.ids) == top_k
        assert sum(recorded.probs) == pytest.approx(1, abs=1e-15)
        counts = Counter(token for token, _ in drawn)
        for token, probability in zip(recorded.ids, recorded.probs):
            assert counts[token] / 1000 == pytest.approx(probability, abs=1 / 500)
        assert set(counts) <= set(recorded.ids)
    off = draw_draft(candidates, 0, 0.3)
    assert draw_draft(candidates, 0, 0.3, 2, 1.0) == off


def test_candidates_without_probabilities_are_not_drawn_from():
    with pytest.raises(ValueError, match="no probabilities"):
        draw_draft(Candidates(np.zeros((1, 1), np.int64), None), 0, 0.5)


# verify


def test_i01_filters_bind_whatever_is_drafted():
    p = [0.5, 0.3, 0.15, 0.05]
    params = request(top_p=0.75)
    target = scores(logits_of(p), params, [0], NO_TAIL)
    assert probs_of(target)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    drafts = {
        0: Speculation(),
        1: Speculation((3,), (SparseProbs((0, 3), (0.1, 0.9)),)),
        2: Speculation((0, 2)),
        3: Speculation((1, 1, 3), (SparseProbs((1,), (1.0,)),) * 2 + (SparseProbs((3,), (1.0,)),)),
    }
    for rule, (lookahead, draft) in itertools.product(("coupled", "ratio"), drafts.items()):
        counts = Counter()
        for start in range(200):
            outcome = verify(logits_of(*[p] * (lookahead + 1)), params, rule, range(start), draft)
            counts[outcome.bonus] += 1
            counts.update(draft.tokens[: outcome.accepted])
        assert set(counts) == {0, 1}


def test_i02_a_sampled_draft_is_accepted_as_theorem_1_says():
    """p = (.6, .4), q = (.5, .5): .90, not the .50 of a point mass; the output follows p either way."""
    count, sampled, table = 2000, request(5), logits_of([0.6, 0.4], [0.6, 0.4])
    candidates = propose(logits_of([0.5, 0.5]), sampled, "ratio", [0], NO_TAIL, 2)
    first, accepted = Counter(), 0
    for start in range(1, count + 1):
        token, q = draw_draft(candidates, 0, uniform(5, start, Purpose.DRAFT))
        outcome = verify(table, sampled, "ratio", range(start), Speculation((token,), (q,)))
        accepted += outcome.accepted
        first[token if outcome.accepted else outcome.bonus] += 1
    assert abs(accepted / count - 0.90) < 0.02
    assert chisquare([first[0], first[1]], [0.6 * count, 0.4 * count]).pvalue > 1e-4


def test_i02_as_point_masses_the_same_drafts_are_accepted_half_the_time():
    count, sampled, table = 1500, request(3), logits_of([0.6, 0.4], [0.6, 0.4])
    first, accepted = Counter(), 0
    for start in range(1, count + 1):
        token = int(uniform(3, start, Purpose.DRAFT) >= 0.5)
        outcome = verify(table, sampled, "ratio", range(start), Speculation((token,)))
        accepted += outcome.accepted
        first[token if outcome.accepted else outcome.bonus] += 1
    assert abs(accepted / count - 0.5) < 0.05
    assert chisquare([first[0], first[1]], [0.6 * count, 0.4 * count]).pvalue > 1e-4


def test_i05_a_greedy_draft_at_a_temperature_is_a_point_mass():
    """Token 0 with probability .60; dividing by the draft's soft .5 would accept it always."""
    count, sampled, table = 1500, request(4), logits_of([0.6, 0.4], [0.6, 0.4])
    zeros = 0
    for start in range(1, count + 1):
        outcome = verify(table, sampled, "ratio", range(start), Speculation((0,)))
        zeros += outcome.accepted or outcome.bonus == 0
    assert abs(zeros / count - 0.6) < 4 * math.sqrt(0.24 / count)


def test_row_32_a_random_backup_token_is_accepted_with_its_target_probability():
    p = np.array([[0.7, 0.2, 0.1]] * 2)
    grid = np.arange(1000) / 1000
    for token in range(3):
        accepted = sum(accept_ratio(p, Speculation((token,)), [u], 0.5).accepted for u in grid)
        assert accepted == round(1000 * p[0, token])


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_verify_under_ratio_is_its_parts(params):
    """The exact core, p from the chain, and the uniforms of the right positions and purposes."""
    context = [1, 2, 3]
    for seed in range(40):
        logits, sampled = random_logits(4, 40, seed), request(seed, **params)
        q = propose(
            random_logits(3, 40, seed) + random_logits(3, 40, seed + 1, 0.5), sampled, "ratio", context, [()] * 3, 8
        )
        drafted = [draw_draft(q, k, uniform(seed, 3 + k, Purpose.DRAFT), 2, 0.5) for k in range(3)]
        speculation = Speculation(tuple(token for token, _ in drafted), tuple(probs for _, probs in drafted))
        tails = [speculation.tokens[:k] for k in range(4)]
        p = probs_of(scores(logits, sampled, context, tails)).numpy()
        accepts, bonus = uniforms(seed, [3, 4, 5], Purpose.ACCEPT), uniform(seed, 3, Purpose.BONUS)
        expected = accept_ratio(p, speculation, accepts, bonus)
        assert verify(logits, sampled, "ratio", context, speculation) == expected
        assert 0 <= expected.accepted <= 3  # feature matrix row 5: 1 to K+1 tokens a round


def test_the_rules_coincide_at_temperature_zero():
    for seed in range(40):
        logits = random_logits(4, 30, seed)
        greedy = logits.argmax(-1).tolist()
        for changed in range(4):
            tokens = [token if k != changed else (token + 1) % 30 for k, token in enumerate(greedy[:3])]
            probs = tuple(SparseProbs((token,), (1.0,)) for token in tokens)
            for speculation in (Speculation(tuple(tokens)), Speculation(tuple(tokens), probs)):
                outcomes = {
                    verify(logits, request(seed, temperature=0.0), rule, [0], speculation)
                    for rule in ("coupled", "ratio")
                }
                assert outcomes == {Outcome(changed, greedy[changed])}


def test_a_ratio_probability_is_not_lost_in_a_float32_sum():
    """A tail of 150,000 tokens of 3e-8 each weighs 0.0045: a float32 accumulator beside a 1 would drop it."""
    logits = torch.full((2, 150_001), math.log(3e-8))
    logits[:, 0] = 0.0
    heavy = 1 / (1 + 150_000 * 3e-8)
    drawn = uniforms(1, np.arange(100_000), Purpose.ACCEPT)
    above = np.flatnonzero((drawn > heavy + 1e-5) & (drawn < heavy + 3e-4))
    below = np.flatnonzero((drawn < heavy - 1e-5) & (drawn > heavy - 3e-4))
    for start, accepted in ((int(above[0]), 0), (int(below[0]), 1)):
        assert verify(logits, request(1), "ratio", range(start), Speculation((0,))).accepted == accepted


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (Speculation((5,)), "draft token 0 is 5; the target's ids are 0 to 4"),
        (Speculation((-1,)), "draft token 0 is -1"),
        (Speculation((1,), (SparseProbs((0, 2), (0.5, 0.5)),)), "does not contain"),
        (Speculation((1,), (SparseProbs((1, 2), (0.5, 0.4)),)), "is not one"),
        (Speculation((1,), (SparseProbs((1, 1), (0.5, 0.5)),)), "is not one"),
        (Speculation((1,), (SparseProbs((1, 7), (0.5, 0.5)),)), "is not one"),
        (Speculation((1,), (SparseProbs((1, 2), (1.5, -0.5)),)), "is not one"),
        (Speculation((1,), (SparseProbs((1, 2), (math.nan, 0.5)),)), "is not one"),
        (Speculation((1,), (SparseProbs((1, 2), (1.0,)),)), "is not one"),
    ],
)
def test_an_impossible_speculation_is_a_protocol_error(speculation, message):
    with pytest.raises(ProtocolError, match=message):
        verify(torch.zeros(2, 5), request(), "ratio", [0], speculation)


def test_rows_must_match_the_speculation():
    with pytest.raises(ValueError, match="the trials have 3 rows, the logits 2"):
        verify(torch.zeros(2, 5), request(), "coupled", [0], Speculation((1, 2)))
    with pytest.raises(ValueError, match="2 rows of logits need as many tails, got 1"):
        scores(torch.zeros(2, 5), request(), [0], NO_TAIL)


# Whole generations over a toy pair: logits are a function of the last two tokens


class Toy:
    def __init__(self, seed, vocab_size=24, like=None):
        self.vocab_size = vocab_size
        self.one = random_logits(vocab_size, vocab_size, seed, 2.0, torch.float64)
        self.two = random_logits(vocab_size, vocab_size, seed + 1, 1.0, torch.float64)
        if like is not None:
            self.one, self.two = like.one + 0.2 * self.one, like.two + 0.2 * self.two

    def logits(self, history, tails):
        sequences = [[*history, *tail] for tail in tails]
        return torch.stack([self.one[s[-1]] + self.two[s[-2]] for s in sequences])


TARGET = Toy(10)
DRAFT = Toy(20, like=TARGET)
PROMPT = [3, 1, 4]


def draft_from(sampled, rule, history, lookahead, width=24):
    tokens, probs = [], []
    for _ in range(lookahead):
        tails = [tuple(tokens)]
        candidates = propose(DRAFT.logits(history, tails), sampled, rule, history, tails, width)
        if candidates.probs is None:
            tokens.append(int(candidates.ids[0, 0]))
        else:
            position = len(history) + len(tokens)
            token, q = draw_draft(candidates, 0, uniform(sampled.seed, position, Purpose.DRAFT), 2, 0.7)
            tokens.append(token)
            probs.append(q)
    return Speculation(tuple(tokens), tuple(probs) if probs else None)


def generate(sampled, rule, mode, count, lookahead=3, fan_out=2, backup="none"):
    """ar: no speculation. sd: drafted after each outcome. ssd: drafted for guessed outcomes, else by the backup."""
    history, cache, hits = list(PROMPT), {}, 0
    speculation = Speculation()
    while len(history) < len(PROMPT) + count:
        tails = [speculation.tokens[:k] for k in range(len(speculation.tokens) + 1)]
        outcome = verify(TARGET.logits(history, tails), sampled, rule, history, speculation)
        if mode == "ssd":
            guessed = propose(DRAFT.logits(history, tails), sampled, rule, history, tails, fan_out + 1)
            for k, tail in enumerate(tails):
                sent = speculation.tokens[k] if k < len(speculation.tokens) else None
                for bonus in guessed.guesses(k, fan_out, sent):
                    cache[k, bonus] = draft_from(sampled, rule, [*history, *tail, bonus], lookahead)
        history += [*speculation.tokens[: outcome.accepted], outcome.bonus]
        speculation = Speculation()
        if mode == "sd":
            speculation = draft_from(sampled, rule, history, lookahead)
        elif mode == "ssd":
            key = (outcome.accepted, outcome.bonus)
            hits += key in cache
            if key in cache:
                speculation = cache[key]
            elif backup == "primary":
                speculation = draft_from(sampled, rule, history, lookahead)
            elif backup == "random":
                speculation = Speculation((len(history) % 24, 5))
            cache = {}
    return history[len(PROMPT) : len(PROMPT) + count], hits


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_with_a_seed_ar_sd_and_ssd_emit_the_same_tokens(params):
    sampled = request(42, prompt_length=len(PROMPT), stop_ids=(4,), **params)
    plain, _ = generate(sampled, "coupled", "ar", 30)
    for mode, lookahead, backup in [
        ("sd", 1, ""),
        ("sd", 4, ""),
        *(("ssd", 3, b) for b in ("none", "primary", "random")),
    ]:
        tokens, hits = generate(sampled, "coupled", mode, 30, lookahead, backup=backup)
        assert tokens == plain, (mode, lookahead, backup)
        assert mode != "ssd" or hits > 0


def test_i07_a_seed_decides_the_tokens_and_other_requests_do_not():
    def tokens(seed):
        return generate(request(seed, prompt_length=3, temperature=2.0), "ratio", "ssd", 20)[0]

    alone = tokens(42)
    others = [tokens(seed) for seed in (43, 44)]
    assert tokens(42) == alone
    assert alone not in others


def test_i09_frequency_penalties_bite_and_equal_plain_decoding():
    outputs = []
    for penalty in (-2.0, 2.0):
        sampled = request(1, prompt_length=3, temperature=0.0, frequency_penalty=penalty)
        plain = generate(sampled, "coupled", "ar", 24)[0]
        assert generate(sampled, "coupled", "sd", 24)[0] == plain
        assert generate(sampled, "coupled", "ssd", 24)[0] == plain
        outputs.append(plain)
    assert outputs[0] != outputs[1]


def test_ratio_over_rounds_follows_the_target():
    """End to end through propose, draw_draft and verify, hits and misses: the law of the first two tokens."""
    count = 1000
    counts = Counter()
    for seed in range(count):
        sampled = request(seed, prompt_length=3, top_k=2)
        counts[tuple(generate(sampled, "ratio", "ssd", 2, lookahead=1, fan_out=1)[0])] += 1
    expected = {}
    first = probs_of(scores(TARGET.logits(PROMPT, NO_TAIL), request(top_k=2), PROMPT, NO_TAIL))[0]
    for x in first.nonzero().flatten().tolist():
        second = probs_of(scores(TARGET.logits([*PROMPT, x], NO_TAIL), request(top_k=2), PROMPT, NO_TAIL))[0]
        for y in second.nonzero().flatten().tolist():
            expected[x, y] = float(first[x] * second[y]) * count
    assert set(counts) <= set(expected)
    assert chisquare([counts[key] for key in expected], list(expected.values())).pvalue > 1e-4


@given(seed=st.integers(0, 99), tolerance=st.sampled_from([0.0, 0.1, 1.0]))
def test_near_ties_are_rows_with_a_second_token_as_good(seed: int, tolerance: float) -> None:
    logits = torch.randint(0, 40, (6, 30), generator=torch.Generator().manual_seed(seed)) / 8
    best = logits.sort(-1, descending=True).values
    assert near_ties(logits, tolerance) == (best[:, 0] - best[:, 1] <= tolerance).nonzero().flatten().tolist()
