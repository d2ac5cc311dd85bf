"""A speculator that answers late, twice, never, or about another sequence: nothing of it is ever applied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from harness import Pair
from saguaro.errors import LinkError, ProtocolError
from saguaro.orchestrator.channels.inproc import inproc_pair
from saguaro.orchestrator.draft_link import NO_ANSWER, DraftLink
from saguaro.orchestrator.draft_links import DraftLinks
from saguaro.orchestrator.protocol import Answer, AnswerRow, Bye, Hello, Message, decode, encode
from saguaro.orchestrator.types import SamplingParams, Speculation
from test_round import pair

PARAMS = SamplingParams(temperature=1.0, seed=17, max_tokens=40)


def tampered(change: Callable[[Message], list[Message]]) -> Pair:
    """A pair whose speculator's answers pass through `change`."""
    both = pair()
    original = both.channel.answer

    def answer(data: bytes) -> None:
        for message in change(decode(data)):
            original(encode(message))

    both.channel.answer = answer  # type: ignore[method-assign]
    return both


def test_an_answer_that_comes_twice_is_applied_once_and_counted() -> None:
    both = tampered(lambda message: [message, message])
    sequence = both.sequence([0, 1], PARAMS)
    assert both.finish([sequence])[0] == pair().run([0, 1], PARAMS, "ar")
    asked = [record for record in sequence.rounds if record.hit is not None]
    both.link.look()  # right after an answer it does not look
    both.link.look()
    assert both.link.counts.stale_answers == len(asked)
    assert any(record.hit for record in asked)


def test_an_answer_of_another_round_or_deployment_is_dropped_and_counted() -> None:
    for change in (
        lambda message: [replace(message, round=message.round - 1), message],
        lambda message: [replace(message, deployment=message.deployment + 1), message],
    ):
        both = tampered(change)
        sequence = both.sequence([0, 1], PARAMS)
        assert both.finish([sequence])[0] == pair().run([0, 1], PARAMS, "ar")
        assert both.link.counts.stale_answers == len([r for r in sequence.rounds if r.hit is not None])


def test_an_answer_about_another_sequence_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Not even for a sequence of the batch, if that one did not ask."""

    def swap(message: Message) -> list[Message]:
        if not isinstance(message.body, Answer):
            return [message]
        rows = tuple(AnswerRow(row.sequence % 2 + 1, row.hit, row.speculation) for row in message.body.rows)
        return [replace(message, body=replace(message.body, rows=rows))]

    both = tampered(swap)
    asking, plain = both.sequence([0, 1], PARAMS), both.sequence([2], PARAMS, "ar")
    assert both.finish([asking, plain]) == [pair().run([0, 1], PARAMS, "ar"), pair().run([2], PARAMS, "ar")]
    assert {record.hit for record in (*asking.rounds, *plain.rounds)} == {None}
    assert "sequence 2 was not asked about" in caplog.text


def test_more_tokens_than_were_asked_for_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def stretch(message: Message) -> list[Message]:
        if not isinstance(message.body, Answer):
            return [message]
        rows = tuple(replace(row, speculation=Speculation((0,) * 9)) for row in message.body.rows)
        return [replace(message, body=replace(message.body, rows=rows))]

    both = tampered(stretch)
    assert both.run([0, 1], PARAMS) == pair().run([0, 1], PARAMS, "ar")
    assert "not for that many tokens" in caplog.text


def test_an_answer_that_never_comes_costs_one_deadline_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    both = tampered(lambda message: [])
    sequence = both.sequence([0, 1], PARAMS)
    assert both.finish([sequence])[0] == pair().run([0, 1], PARAMS, "ar")
    assert {record.hit for record in sequence.rounds} == {None}
    assert caplog.text.count("did not answer round") == 1
    assert len(both.channel.sent) == 2  # the prefill and one round; then nothing more is asked


def test_garbage_loses_the_link_not_the_request(caplog: pytest.LogCaptureFixture) -> None:
    both = pair()
    original = both.channel.answer
    both.channel.answer = lambda data: original(data[:-1])  # type: ignore[method-assign]
    assert both.run([0, 1], PARAMS) == pair().run([0, 1], PARAMS, "ar")
    assert both.link.lost
    assert "announces" in caplog.text


def test_a_speculator_that_goes_while_nothing_is_asked_is_missed() -> None:
    near, far = inproc_pair()
    far.send(encode(Message(0, 0, Hello("map", 5, 10, 4, 4))))
    links = DraftLinks()
    links.put(0, DraftLink(near, deployment=1, timeout=1))
    assert links.regroup()
    assert not links.regroup()
    assert links.connected == [True]
    far.close()
    assert not links.regroup()
    assert links.connected == [False]
    assert not links.present


def test_a_speculator_introduces_itself_or_is_refused() -> None:
    near, far = inproc_pair()
    with pytest.raises(LinkError, match="did not introduce itself within 0 s"):
        DraftLink(near, deployment=1, timeout=1, hello_timeout=0.0)
    far.send(encode(Message(0, 0, Bye())))
    with pytest.raises(ProtocolError, match="first message is a Bye, not a Hello"):
        DraftLink(near, deployment=1, timeout=1)
    far.send(encode(Message(0, 0, Hello("map", 5, 10, 4, 4))))
    link = DraftLink(near, deployment=1, timeout=1)
    assert link.ready
    far.close()
    link.ask([])
    assert link.answer() == NO_ANSWER  # gone: said, not raised
    assert link.lost
    assert not link.ready
    link.close()
