"""A request that no draft can guess is decoded plainly, and nothing else changes: no token, and no other request."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness import Pair
from saguaro.engines.scripted import ScriptedEngine, Table
from saguaro.orchestrator import prospects
from saguaro.orchestrator.prospects import FIRST_PAUSE, FRUITLESS, LONGEST_PAUSE, PROBE, Prospects
from saguaro.orchestrator.protocol import DraftRow, Round, decode
from saguaro.orchestrator.types import Backup, SamplingParams
from test_round import DRAFT, TARGET, params, prompts, scripted

HARD = 120  # tokens that the draft always gets wrong in texts that begin with 0


def counting(hard: int = HARD) -> Pair:
    """Texts that count up, over and over; so does the draft but for the first `hard` tokens of some."""

    def table(step: int) -> Table:
        def after(context: tuple[int, ...]) -> list[int]:
            wrong = step * (context[0] == 0 and len(context) < hard)
            return [int(token == (context[-1] + 1 + wrong) % 5) for token in range(5)]

        return after

    target, draft = (ScriptedEngine(table(step), 5, 400, 16, 100) for step in (0, 1))
    return Pair(target, draft, lookahead=2, budget=3)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def asked(pair: Pair, sequence: int) -> list[DraftRow | None]:
    """What was asked for it in each round that the speculator was told of."""
    bodies = [decode(data).body for data in pair.channel.sent]
    rounds = [body for body in bodies if isinstance(body, Round)]
    return [next((row for row in body.rows if row.sequence == sequence), None) for body in rounds]


def test_pauses_double_and_one_accepted_token_ends_it() -> None:
    of = Prospects()
    for _ in range(3):  # a token now and then
        assert not any(of.observe(2, 0) for _ in range(FRUITLESS - 1))
        of.observe(2, 1)
    assert not any(of.observe(0, 0) for _ in range(1000))  # nothing drafted says nothing
    assert [of.observe(2, 0) for _ in range(FRUITLESS)] == [False] * (FRUITLESS - 1) + [True]
    fruitless = FRUITLESS
    pauses = []
    for _ in range(6):
        assert of.collapsed
        pause = 0
        while of.plain:
            pause += 1
            was_returning = of.returning
            assert not of.observe(0, 0)
            assert of.plain != was_returning
        pauses.append(pause)
        assert pause <= fruitless
        assert not any(of.observe(2, 0) for _ in range(PROBE))  # said once
        fruitless += pause + PROBE
    assert pauses == [FIRST_PAUSE, 64, 128, 256, LONGEST_PAUSE, LONGEST_PAUSE]
    while of.plain:
        of.observe(0, 0)
    of.observe(2, 1)
    assert not of.collapsed
    assert not any(of.observe(2, 0) for _ in range(FRUITLESS - 1))  # as at the start
    assert of.observe(2, 0)


def test_a_hopeless_request_takes_nothing_from_its_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    """Theirs are the rounds they have alone; it decodes plainly but for probes, which the draft is ready for."""
    caplog.set_level(logging.INFO, "saguaro")
    both, alone = counting(), counting()
    easy = [both.sequence([1 + i], greedy(90)) for i in range(2)]
    hopeless = both.sequence([0], greedy(110))
    both.finish([*easy, hopeless])
    for i, sequence in enumerate(easy):
        by_itself = alone.sequence([1 + i], greedy(90))
        alone.finish([by_itself])
        assert sequence.rounds == by_itself.rounds
        assert not sequence.prospects.collapsed
    assert hopeless.tokens == [i % 5 for i in range(111)]
    drafted = [record.drafted > 0 for record in hopeless.rounds[1:]]
    speculated = [True] * FRUITLESS + [False] * FIRST_PAUSE + [True] * PROBE + [False] * 33
    assert drafted == speculated
    rows = [row for row in asked(both, hopeless.id) if row]
    ready = next(index for index, row in enumerate(rows) if row.prefill and row.start > 0)
    assert len(rows[ready].tokens) == FIRST_PAUSE  # it catches up while the target verifies
    assert (len(rows[ready + 1].tokens), rows[ready + 1].prefill) == (1, False)
    assert caplog.text.count("decodes plainly for now: none of its last 40 speculations") == 1


def test_a_text_that_becomes_easy_is_speculated_for_again() -> None:
    both = counting()
    sequence = both.sequence([0], greedy(HARD + 160))
    both.finish([sequence])
    assert sequence.tokens == [i % 5 for i in range(HARD + 161)]
    assert not sequence.prospects.collapsed
    # Of the 160 easy tokens at most a pause, which is no longer than the hard part, was decoded plainly.
    assert len(sequence.rounds) < HARD + 64 + 160 / 2
    assert all(record.accepted == 2 for record in sequence.rounds[-10:-1])


def test_it_survives_a_preemption_and_a_new_draft() -> None:
    both = counting(400)
    sequence = both.sequence([0], greedy(200))
    while not sequence.prospects.collapsed:
        both.step([sequence])
    sequence.release()
    both.step([sequence])
    both.start(0)
    both.links[0] = both.connect(0, [sequence])
    both.finish([sequence])
    assert sequence.tokens == [i % 5 for i in range(201)]
    assert sum(record.drafted > 0 for record in sequence.rounds) <= FRUITLESS + 3 * PROBE


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fruitless speculation is enough."""
    for name in ("FRUITLESS", "PROBE", "FIRST_PAUSE"):
        monkeypatch.setattr(prospects, name, 1)
    monkeypatch.setattr(prospects, "LONGEST_PAUSE", 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backup", ["primary", "defer", "ngram"])
@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(params, prompts, st.sampled_from(["sd", "ssd"])), min_size=1, max_size=4), st.integers(1, 4))
def test_coupled_emits_plain_decodings_tokens(backup: Backup, requests: list[tuple], k: int) -> None:
    both = Pair(scripted(TARGET), scripted(DRAFT), lookahead=k, backup=backup, max_batch_tokens=7)
    sequences = [both.sequence(prompt, p, mode) for p, prompt, mode in requests]
    plain = [Pair(scripted(TARGET), scripted(DRAFT)).run(prompt, p, "ar") for p, prompt, _ in requests]
    assert both.finish(sequences) == plain


@pytest.mark.usefixtures("impatient")
def test_ratio_keeps_the_targets_law() -> None:
    """Chi-square of the third and fourth token against the closed form, fixed seeds: what is asked for the fourth
    depends on whether the second was accepted, and on no draw that is still to come."""
    count, batch = 300, 100
    law = np.array(TARGET, dtype=float) / 100
    joint = np.einsum("a,ab,bc,cd->cd", law[0], law, law, law).ravel()
    seen: Counter[tuple[int, ...]] = Counter()
    rested = 0
    for start in range(0, count, batch):
        both = Pair(scripted(TARGET, blocks=1000), scripted(DRAFT, blocks=3000), rule="ratio", lookahead=1, budget=2)
        sequences = [both.sequence([0], SamplingParams(max_tokens=5, seed=start + i)) for i in range(batch)]
        seen.update(tuple(tokens[2:4]) for tokens in both.finish(sequences))
        rested += sum(s.rounds[1].accepted == 0 and s.rounds[2].hit is None for s in sequences)
    observed = np.array([seen[index] for index in np.ndindex(5, 5)])
    often = joint * count >= 5
    found, expected = ([*cells[often], cells[~often].sum()] for cells in (observed, joint * count))
    assert stats.chisquare(found, expected).pvalue > 1e-3
    assert rested > 50
