"""Guesses ranked by the draft's own probabilities, and branches that end where they are hardly needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats

from harness import Pair
from saguaro.engines.base import ForwardBatch, ForwardOutput
from saguaro.orchestrator import sampling
from saguaro.orchestrator.drafters.base import Guess, Trunk
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.fan_out_policy import Lists, uniform
from saguaro.orchestrator.protocol import Bye, Hello, Message, Round, decode, encode
from saguaro.orchestrator.randomness import gumbel
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.types import Outcome, RequestSampling, Rule, SamplingParams, Speculation
from saguaro.plugins.fan_out import FanOut
from test_drafters import row
from test_round import DRAFT, TARGET, scripted

Q = np.array(DRAFT, dtype=float) / 100  # [token before, token]
TOKENS = range(len(DRAFT))


def ranked(least: float | None, rule: Rule = "coupled") -> tuple[ModelDrafter, list[int]]:
    """A drafter, and the number of rows of each of its forwards."""
    engine, rows = scripted(DRAFT), []
    forward = engine.forward

    def counted(batch: ForwardBatch) -> ForwardOutput:
        rows.append(len(batch.token_ids))
        return forward(batch)

    engine.forward = counted  # type: ignore[method-assign]
    return ModelDrafter(engine, rule, Lists(uniform), least_probability=least), rows


def spread(budget: int, lookahead: int) -> FanOut:
    """Any list of so many guesses: only their number matters."""
    return FanOut((budget, *(0 for _ in range(lookahead))))


texts = st.lists(st.sampled_from(TOKENS), min_size=2, max_size=6)
sent_tokens = st.lists(st.sampled_from(TOKENS), max_size=3).map(tuple)
leasts = st.sampled_from([0.0, 0.0213, 0.107, 0.293])  # never a product of probabilities


@settings(deadline=None)
@given(texts, sent_tokens, st.integers(0, 9), leasts)
def test_the_likeliest_outcomes_are_guessed(text: list[int], sent: tuple[int, ...], budget: int, least: float) -> None:
    probabilities: dict[Outcome, float] = {}
    reached, before = 1.0, text[-1]
    for k, token in enumerate([*sent, None]):
        probabilities |= {Outcome(k, t): reached * Q[before, t] for t in TOKENS if t != token}
        if token is not None:
            reached, before = reached * Q[before, token], token
    drafter, _ = ranked(least)
    asked = row(text)
    drafter.catch_up([asked])
    trunk = Trunk.under_verification(asked, Speculation(sent))
    [guesses] = drafter.predict([trunk], [spread(budget, len(sent))])

    for guess in guesses:
        assert guess.probability == pytest.approx(probabilities[guess.outcome])
    best = sorted((p for p in probabilities.values() if p >= max(least, 1e-9)), reverse=True)[:budget]
    assert sorted((guess.probability for guess in guesses), reverse=True) == pytest.approx(best)
    order = [(guess.outcome.accepted, -guess.probability) for guess in guesses]
    assert order == sorted(order)  # by acceptance length, best first


@settings(deadline=None)
@given(texts, sent_tokens, leasts, st.integers(1, 4), st.data())
def test_a_branch_grows_while_it_may_be_needed_and_costs_no_row_after_that(
    text: list[int], sent: tuple[int, ...], least: float, lookahead: int, data: st.DataObject
) -> None:
    possible = sorted(Outcome(k, t) for k, s in enumerate([*sent, None]) for t in TOKENS if t != s)
    outcomes = sorted(data.draw(st.lists(st.sampled_from(possible), max_size=5, unique=True)))
    guesses = [Guess(outcome, data.draw(st.sampled_from([0.05, 0.3, 0.9]))) for outcome in outcomes]
    expected: list[list[int]] = []
    for guess in guesses:
        reach, tokens = guess.probability, [guess.outcome.bonus]
        while len(tokens) <= lookahead and (reach >= least or len(tokens) == 1):
            reach *= Q[tokens[-1]].max()
            tokens.append(int(Q[tokens[-1]].argmax()))
        expected.append(tokens[1:])

    drafter, rows = ranked(least)
    asked = row(text, lookahead=lookahead)
    drafter.catch_up([asked])
    trunk = Trunk.under_verification(asked, Speculation(sent))
    drafter.predict([trunk], [spread(1, len(sent))])
    del rows[:]
    [drafted] = drafter.draft([trunk], [guesses])
    assert [list(speculation.tokens) for speculation in drafted] == expected
    depths = range(max(map(len, expected), default=0))
    assert rows == [sum(len(tokens) > depth for tokens in expected) for depth in depths]


def test_sequences_with_branches_of_different_lengths_are_drafted_as_if_alone() -> None:
    def guesses(probabilities: Sequence[float]) -> list[Guess]:
        return [Guess(Outcome(0, token), p) for token, p in enumerate(probabilities)]

    several = [(row([0, 1, 4], sequence=1, lookahead=3), [0.9, 0.06, 0.5]), (row([2, 3], sequence=2), [0.06])]
    several += [(row([4, 4, 4], sequence=3, lookahead=4), [0.2, 0.9])]
    drafter, _ = ranked(0.05)
    asked = [each for each, _ in several]
    drafter.catch_up(asked)
    trunks = [Trunk.under_verification(each, Speculation()) for each in asked]
    drafter.predict(trunks, [FanOut((1,)) for _ in trunks])
    together = drafter.draft(trunks, [guesses(probabilities) for _, probabilities in several])
    alone = [drafter.draft([trunk], [guesses(p)])[0] for trunk, (_, p) in zip(trunks, several, strict=True)]
    assert together == alone
    assert len({len(speculation.tokens) for speculations in alone for speculation in speculations}) > 2


@pytest.mark.parametrize(
    ("rule", "temperature", "least", "cut"),
    [("coupled", 1.0, 0.0, True), ("ratio", 0.0, 0.0, True), ("ratio", 1.0, 0.0, False), ("coupled", 1.0, None, False)],
)
def test_nothing_more_is_drafted_once_somebody_waits(
    rule: Rule, temperature: float, least: float | None, cut: bool
) -> None:
    """But where a length that depends on time could bias a text, or where lists are to be followed."""
    drafter, rows = ranked(least, rule)
    asked = row([0, 1, 2], lookahead=4, temperature=temperature)
    drafter.catch_up([asked])
    trunk = Trunk.under_verification(asked, Speculation())
    drafter.predict([trunk], [FanOut((1,))])
    guesses = [Guess(Outcome(0, 3)), Guess(Outcome(0, 4))]
    [whole] = drafter.draft([trunk], [guesses])
    looks = iter([False, True])
    del rows[:]
    [drafted] = drafter.draft([trunk], [guesses], lambda: next(looks, True))
    tokens = 2 if cut else 4
    assert rows == [2] * tokens
    assert [speculation.tokens for speculation in drafted] == [each.tokens[:tokens] for each in whole]


def test_a_round_that_comes_early_ends_the_work_ahead_and_is_served() -> None:
    """Once, in its turn: each of these rounds is there as soon as the one before has been answered."""
    asked = row([0, 1, 4], lookahead=3)
    first = Round((asked,))
    hit = replace(asked, start=6, tokens=(4,), outcome=Outcome(3, 4))  # the draft says 4 after 4
    waiting = deque(encode(Message(number, 7, body)) for number, body in enumerate([first, Round((hit,)), Bye()], 1))
    sent: list[Message] = []

    class Early:
        def send(self, data: bytes) -> None:
            sent.append(decode(data))

        def receive(self, timeout: float) -> bytes | None:
            return waiting.popleft()

    drafter, _ = ranked(0.0)
    Speculator(drafter, Early(), Lists(uniform), Hello("", 5, 80, 200, 4)).run()  # type: ignore[arg-type]
    hello, *answers = sent
    assert isinstance(hello.body, Hello)
    assert [(answer.round, answer.body.rows[0].hit) for answer in answers] == [(1, False), (2, True)]  # type: ignore[union-attr]
    lengths = [len(answer.body.rows[0].speculation.tokens) for answer in answers]  # type: ignore[union-attr]
    assert lengths == [3, 1]  # what happened is drafted whole, what may happen as far as there was time
    assert not waiting


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_a_weight_is_how_often_a_target_chooses_the_token(temperature: float) -> None:
    """Whose logits are the draft's with Gumbel noise, and who draws with the noise of the same seed and position."""
    generator, draws = np.random.default_rng(3), 20_000
    logits = generator.normal(0, 0.9, 6)
    request = RequestSampling(SamplingParams(temperature=temperature, seed=11), 11, 1)
    query = sampling.Query(request, range(7), [()], 6)
    [found] = sampling.propose(torch.from_numpy(logits)[None], [query], "coupled", weights=True)
    assert found.weights is not None
    targets = logits + generator.gumbel(size=(draws, 6))
    if temperature > 0:
        targets = targets / temperature + gumbel(np.full(6, 11, np.uint64), np.full(6, 7), np.arange(6))
    chosen = np.bincount(targets.argmax(1), minlength=6)
    weights = np.empty(6)
    weights[found.ids[0]] = found.weights[0]
    assert weights.sum() == pytest.approx(1)
    assert found.weights[0].tolist() == sorted(found.weights[0], reverse=True)
    often = weights * draws >= 5
    expected = np.append(weights[often], weights[~often].sum()) * draws
    observed = np.append(chosen[often], chosen[~often].sum())
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_where_the_draft_cannot_say_the_lists_hold() -> None:
    drafter, _ = ranked(0.3, "ratio")
    asked = row([0, 1, 2], temperature=1.0)
    drafter.catch_up([asked])
    trunk = Trunk.under_verification(asked, Speculation((1, 4)))
    [guesses] = drafter.predict([trunk], [FanOut((2, 0, 3))])
    assert [(guess.outcome.accepted, guess.probability) for guess in guesses] == [(0, 1.0)] * 2 + [(2, 1.0)] * 3
    [drafted] = drafter.draft([trunk], [guesses])
    assert {len(speculation.tokens) for speculation in drafted} == {asked.lookahead}


def test_ranked_guesses_hit_more_often_than_an_even_list() -> None:
    rates = []
    for least in (None, 0.0):
        pair = Pair(
            scripted(TARGET, blocks=2000), scripted(DRAFT, blocks=4000), lookahead=3, budget=4, least_probability=least
        )
        params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30) for seed in range(20)]
        sequences = [pair.sequence([seed % 5], each) for seed, each in enumerate(params)]
        pair.finish(sequences)
        hits = [record.hit for sequence in sequences for record in sequence.rounds if record.hit is not None]
        rates.append(sum(hits) / len(hits))
    assert rates[1] > rates[0] + 0.03
