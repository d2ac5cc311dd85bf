import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saguaro.errors import ProtocolError
from saguaro.orchestrator import protocol
from saguaro.orchestrator.protocol import (
    Answer,
    AnswerRow,
    Bye,
    CurveFit,
    DraftRow,
    GrammarRef,
    Hello,
    Message,
    Report,
    Round,
    Span,
    Step,
    Verified,
    decode,
    encode,
)
from saguaro.orchestrator.types import Outcome, RequestSampling, SamplingParams, SparseProbs, Speculation

REQUEST = RequestSampling(SamplingParams(temperature=0.5, seed=7), seed=7, prompt_length=3, stop_ids=(2,))
ROW = DraftRow(4, 11, (5,), Outcome(1, 5), False, 3, 8, (0, 2), REQUEST, GrammarRef(b"\x00\xff", "start: /a/"))

REQUEST_FIELD = DraftRow.__struct_fields__.index("request")

probs = st.builds(
    lambda ids: SparseProbs(tuple(ids), tuple(1 / len(ids) for _ in ids)),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
)
speculations = st.lists(st.tuples(st.integers(0, 200_000), probs), max_size=4).flatmap(
    lambda items: st.sampled_from(
        [
            Speculation(tuple(token for token, _ in items)),
            Speculation(tuple(token for token, _ in items), tuple(q for _, q in items)),
        ]
    )
)
answers = st.builds(AnswerRow, st.integers(0, 99), st.booleans(), st.none() | speculations)
rows = st.builds(
    DraftRow,
    sequence=st.integers(0, 2**31),
    start=st.integers(0, 10_000),
    tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=5).map(tuple),
    outcome=st.none() | st.builds(Outcome, st.integers(0, 8), st.integers(0, 200_000)),
    prefill=st.booleans(),
    lookahead=st.integers(0, 8),
    budget=st.integers(0, 64),
    table=st.lists(st.integers(0, 5000), max_size=6).map(tuple),
    request=st.just(REQUEST),
    deferred=st.booleans(),
)
steps = st.lists(st.builds(Step, st.integers(1, 99), st.integers(0, 9), st.booleans()), max_size=2).map(tuple)
shares = st.floats(0, 1)
curves = st.builds(CurveFit, st.booleans(), st.booleans(), st.integers(0, 3), shares, shares, shares, st.floats(0, 1e4))
bodies = st.one_of(
    st.builds(Hello, st.text(max_size=64), *[st.integers(0, 2**31)] * 4, steps),
    st.builds(
        Round,
        st.lists(rows, max_size=3).map(tuple),
        st.booleans(),
        st.lists(st.integers(0, 9)).map(tuple),
        st.none() | st.sampled_from(["primary", "suffix"]),
    ),
    st.builds(
        Answer,
        st.lists(st.builds(AnswerRow, st.integers(0, 99), st.booleans(), st.none() | speculations), max_size=3).map(
            tuple
        ),
        st.lists(st.builds(Span, st.sampled_from(["prepare"]), st.integers(0, 9), st.integers(0, 9)), max_size=2).map(
            tuple
        ),
        st.integers(0, 99),
        st.integers(0, 9),
        steps,
        st.none() | st.builds(Report, st.lists(curves, max_size=2).map(tuple), st.just({"suffix": (0.5, 0.25)})),
    ),
    st.just(Bye()),
    st.builds(Verified, st.lists(answers, max_size=3).map(tuple)),
)


@given(st.builds(Message, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), bodies))
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_golden_bytes() -> None:
    """A change here is a change of the protocol: raise its version."""
    header = struct.pack("<4sHHQQI", b"SGRO", 7, 4, 3, 9, 1)
    assert encode(Message(3, 9, Bye())) == header + b"\x90"
    answer = Answer((AnswerRow(4, True, Speculation((1, 2))),), (), 5, 2)
    sits_out = Answer((AnswerRow(4, False, None),), (Span("prepare", 6, 7, (4,)),), 0, 0)
    assert encode(Message(1, 2, sits_out))[28:].hex() == "96919304c2c09195a7707265706172650607910400000090c0"
    verified = encode(Message(1, 2, Verified((AnswerRow(4, False, None),))))
    assert verified[:8].hex() == "5347524f07000500"
    assert verified[28:].hex() == "91919304c2c0"
    assert encode(Message(1, 2, answer)).hex() == (
        "5347524f07000300010000000000000002000000000000000f00000096919304c392920102c090050290c0"
    )


def test_a_row_costs_a_few_hundred_bytes_and_no_kv_crosses() -> None:
    """Outcomes are O(batch), whatever the length of the sequence (feature-matrix 1.1, row 41)."""
    one, two = (len(encode(Message(1, 1, Round((ROW,) * n)))) for n in (1, 2))
    assert two - one < 300
    fields = {name for body in (DraftRow, AnswerRow, Speculation) for name in body.__struct_fields__}
    assert not {name for name in fields if "kv" in name or "key" in name or "value" in name}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SG", "shorter than its header"),
        (struct.pack("<4sHHQQI", b"HTTP", 1, 4, 0, 0, 1) + b"\x80", "not a Saguaro process"),
        (struct.pack("<4sHHQQI", b"SGRO", 8, 4, 0, 0, 1) + b"\x80", "version 8, this side 7"),
        (struct.pack("<4sHHQQI", b"SGRO", 7, 99, 0, 0, 1) + b"\x80", "kind 99"),
        (struct.pack("<4sHHQQI", b"SGRO", 7, 4, 0, 0, 2**31) + b"\x80", "announces 2147483648 payload bytes"),
        (struct.pack("<4sHHQQI", b"SGRO", 7, 2, 0, 0, 1) + b"\x80", "ROUND message cannot be read"),
    ],
)
def test_what_this_version_did_not_write_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(data)


@given(st.binary(max_size=200))
def test_garbage_is_refused_not_crashed_on(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(b"SGRO" + data)


def test_parameters_are_checked_when_they_arrive_too() -> None:
    """A peer cannot smuggle in what a client could not submit."""
    message = encode(Message(1, 1, Round((ROW,))))
    body = msgspec.msgpack.decode(message[28:])
    (row,) = body[0]
    request = msgspec.msgpack.decode(row[REQUEST_FIELD])
    request[0]["temperature"] = -1.0
    for wrong, why in ((msgspec.msgpack.encode(request), "temperature"), (request, "travels as bytes")):
        row[REQUEST_FIELD] = wrong
        payload = msgspec.msgpack.encode(body)
        with pytest.raises(ProtocolError, match=why):
            decode(struct.pack("<4sHHQQI", b"SGRO", 7, 2, 1, 1, len(payload)) + payload)


def test_an_oversized_message_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_PAYLOAD", 100)
    with pytest.raises(ProtocolError, match="exceeds the limit of 100"):
        encode(Message(1, 1, Round((ROW,) * 2)))
