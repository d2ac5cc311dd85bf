"""The backup `defer`: a row that missed sits one round out, and the rows that hit never wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Pair
from saguaro.orchestrator.metrics import chrome_trace
from saguaro.orchestrator.protocol import Answer, AnswerRow, Message, Round, decode
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Rule, SamplingParams
from saguaro.orchestrator.verifier import RoundResult
from test_draft_link import tampered
from test_round import pair, params, prompts

SEEDED = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40) for seed in range(6)]


def batch_of(both: Pair) -> list[Sequence]:
    return [both.sequence([0], p) for p in SEEDED]


def answers_of(both: Pair) -> list[Answer]:
    """Every answer of the speculator, as they come."""
    found: list[Answer] = []
    original = both.channel.answer

    def answer(data: bytes) -> None:
        body = decode(data).body
        assert isinstance(body, Answer)
        found.append(body)
        original(data)

    both.channel.answer = answer  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(params, prompts, st.sampled_from(["sd", "ssd", "ssd"])), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_only_time_is_shifted(rule: Rule, requests: list[tuple], k: int, budget: int) -> None:
    """Tokens, hits, and what was drafted and accepted are those of `primary`, under either rule: the same law."""

    def run(backup: str) -> list[Sequence]:
        both = pair(rule=rule, lookahead=k, budget=budget, backup=backup)
        sequences = [both.sequence(prompt, p, mode) for p, prompt, mode in requests]
        both.finish(sequences)
        return sequences

    for late, now in zip(run("defer"), run("primary"), strict=True):
        assert late.tokens == now.tokens
        assert late.rounds == now.rounds


def test_rows_that_hit_never_wait_for_one_that_missed() -> None:
    """In rounds with hits the draft model has run nothing before it answers, and the missing rows are not verified."""
    both = pair(lookahead=2, budget=3, backup="defer")
    events: list[str] = []
    for engine, name in ((both.draft, "draft"), (both.target, "verify")):
        forward = engine.forward
        engine.forward = lambda b, name=name, forward=forward: (events.append(name), forward(b))[1]  # type: ignore[method-assign]
    original = both.channel.answer
    both.channel.answer = lambda data: (events.append("answer"), original(data))[1]  # type: ignore[method-assign, assignment]
    answers = answers_of(both)
    batch = batch_of(both)
    for _ in range(2):
        both.step(batch)  # the pair's one thread prepares behind the prompts when it is asked for the first answer
    sat_out = {sequence.id for sequence in batch if sequence.deferred}
    seen = {"hidden": 0, "all missed": 0}
    while not any(sequence.finish_reason for sequence in batch):
        events.clear()
        answers.clear()
        lengths = {sequence.id: sequence.length for sequence in batch}
        result = both.step(batch)
        rows = answers[0].rows if answers else ()
        missing = {row.sequence for row in rows if row.speculation is None}
        if missing or any(row.hit for row in rows):
            assert events[0] == "answer"
        if missing:
            seen["hidden"] += 1
            assert {row.sequence for row in rows if row.hit or row.sequence in sat_out}  # somebody is verified
        elif rows and not any(row.hit for row in rows) and not sat_out:
            seen["all missed"] += 1
            assert events.index("answer") > events.index("draft")
        assert result.deferred == len(missing)
        assert not missing & sat_out  # nobody sits out twice in a row
        for sequence in batch:
            assert (sequence.length == lengths[sequence.id]) == (sequence.id in missing)
        sat_out = missing
    assert seen["hidden"] > 5
    assert seen["all missed"] == 0  # six rows never miss all at once here


def test_a_row_that_is_alone_is_drafted_for_at_once() -> None:
    both = pair(lookahead=2, budget=2, backup="defer")
    answers = answers_of(both)
    sequence = both.sequence([0], SEEDED[0])
    both.finish([sequence])
    assert {row.hit for answer in answers for row in answer.rows} == {True, False}
    assert all(row.speculation is not None for answer in answers for row in answer.rows)


@pytest.mark.parametrize("mode", ["ar", "sd"])
def test_a_row_hides_behind_plain_decoding_but_not_behind_drafting_in_turn(mode: str) -> None:
    """What is drafted for anyway, in `sd`, makes the round wait: then nobody sits out."""
    both = pair(lookahead=2, budget=2, backup="defer")
    batch = [both.sequence([0], SEEDED[0]), both.sequence([0], SEEDED[1], mode)]  # type: ignore[arg-type]
    deferred = [both.step(batch).deferred for _ in range(12)]
    missed = sum(record.hit is False for record in batch[0].rounds) + batch[0].deferred  # the last one is still to come
    assert missed > 0
    assert sum(deferred) == {"ar": missed, "sd": 0}[mode]


def deferring(both: Pair, batch: list[Sequence]) -> RoundResult:
    """Rounds until one that somebody sits out."""
    while True:
        result = both.step(batch)
        if result.deferred:
            return result


def test_a_draft_that_dies_while_a_row_sits_out_and_comes_back() -> None:
    """The row goes on in the next round without a draft; and a new draft does not make it sit out once more."""
    plain = [pair().run([0], p, "ar") for p in SEEDED]
    for back_at_once in (True, False):
        both = pair(lookahead=2, budget=3, backup="defer")
        batch = batch_of(both)
        deferring(both, batch)
        waiting = next(sequence for sequence in batch if sequence.deferred)
        before = waiting.length
        fresh = pair(lookahead=2, budget=3, backup="defer")
        fresh.speculator._channel = both.speculator._channel
        if not back_at_once:
            both.link.lost = True
            both.step(batch)
            assert (waiting.length, waiting.deferred) == (before + 1, False)
            both.link.lost = False
        both.channel.speculator = fresh.speculator
        both.verifier.attach(both.link, batch)
        assert all(sequence.draft_length == 0 for sequence in batch)
        both.step(batch)
        assert waiting.length > before
        running = [sequence for sequence in batch if not sequence.finish_reason]
        both.finish(running)
        assert [sequence.tokens[1:] for sequence in batch] == plain


def test_a_row_that_is_preempted_or_cancelled_while_it_sits_out_leaves_nothing() -> None:
    both = pair(lookahead=2, budget=3, backup="defer")
    batch = batch_of(both)
    deferring(both, batch)
    waiting = next(sequence for sequence in batch if sequence.deferred)
    waiting.release()  # its turn to give way; it is computed again
    assert not waiting.deferred
    deferring(both, batch)
    cancelled = next(sequence for sequence in batch if sequence.deferred)
    cancelled.release()
    batch.remove(cancelled)
    both.finish(batch)  # every block comes back
    for sequence in batch:
        assert sequence.tokens[1:] == pair().run([0], sequence.request.params, "ar")


def test_a_speculator_that_defers_what_it_must_not_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    def never_ready(message: Message) -> list[Message]:
        assert isinstance(message.body, Answer)
        rows = tuple(AnswerRow(row.sequence, False, None) for row in message.body.rows)
        return [Message(message.round, message.deployment, Answer(rows, (), 0, 0))]

    both = tampered(never_ready)
    batch = [both.sequence([0], SEEDED[0]), both.sequence([0], SEEDED[1])]
    assert both.finish(batch) == [pair().run([0], p, "ar") for p in SEEDED[:2]]
    assert "every row of a round sit it out" in caplog.text
    beside = tampered(never_ready)
    batch = [beside.sequence([0], SEEDED[0]), beside.sequence([0], SEEDED[1], "ar")]
    assert beside.finish(batch) == [pair().run([0], p, "ar") for p in SEEDED[:2]]
    assert "has sat out one round already" in caplog.text
    assert len(batch[0].rounds) == 40  # every other round without a speculation


def test_a_deferred_row_is_not_sent_its_tokens_again() -> None:
    both = pair(lookahead=2, budget=3, backup="defer")
    batch = batch_of(both)
    for sequence in batch:
        both.step([sequence])
    both.verifier.attach(both.link, batch)  # from now on the draft has to catch up with all of them
    deferring(both, batch)
    both.step(batch)
    body = decode(both.channel.sent[-1]).body
    assert isinstance(body, Round)
    late = [row for row in body.rows if row.deferred]
    assert late
    assert all(len(row.tokens) == 1 for row in late)


def test_the_trace_shows_who_was_verified_meanwhile() -> None:
    both = pair(lookahead=2, budget=3, backup="defer")
    batch = batch_of(both)
    events: list[dict[str, Any]] = chrome_trace(2 * deferring(both, batch).spans)["traceEvents"]
    slices = {name: [e for e in events if e["name"] == name and e["pid"] == 3] for name in ("verify", "deferred")}
    waiting = {sequence.id for sequence in batch if sequence.deferred}
    assert {event["tid"] for event in slices["deferred"]} == waiting
    assert {event["tid"] for event in slices["verify"]} == {s.id for s in batch} - waiting
    (verify,) = [event for event in events if event["name"] == "verify" and event["pid"] == 1]
    assert verify["args"]["sequences"] == tuple(s.id for s in batch if s.id not in waiting)
    for event in slices["deferred"]:
        assert event["ts"] <= verify["ts"] + verify["dur"]
        assert verify["ts"] <= event["ts"] + event["dur"]
