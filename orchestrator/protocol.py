"""Every message between verifier and speculator, and its bytes.

A message is a fixed header (magic, protocol version, kind, round, deployment, payload length) and a MessagePack
payload. Nothing is unpickled; lengths are checked before anything is allocated. How bytes travel is a channel's matter.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import msgspec

from saguaro.errors import ConfigError, ProtocolError
from saguaro.orchestrator.types import Backup, Outcome, RequestSampling, Speculation

VERSION = 7
MAX_PAYLOAD = 64 * 2**20
_MAGIC = b"SGRO"
_HEADER = struct.Struct("<4sHHQQI")  # magic, version, kind, round, deployment, payload bytes


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a message: its fields travel in order, without their names. Made, sent and read by the hundred in a round."""


class Kind(IntEnum):
    HELLO = 1
    ROUND = 2
    ANSWER = 3
    BYE = 4
    VERIFIED = 5


class Step(Part, frozen=True):
    """One forward over so many rows, and what is made of its logits."""

    rows: int
    nanoseconds: int
    trunk: bool = False  # a causal forward over trunks, from which outcomes are guessed
    replica: int = 0  # of the draft, whose it is


class Hello(Part, frozen=True):
    """Speculator -> verifier, once after connecting: what the verifier must know to own the draft's block tables."""

    token_map_sha256: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    steps: tuple[Step, ...] = ()  # measured before connecting


class GrammarRef(Part, frozen=True):
    """The grammar of an answer. Its text, of up to 64 KiB, is sent only where the speculator may not have it yet."""

    digest: bytes
    text: str | None


class DraftRow(Part, frozen=True):
    """One sequence in a round. All the speculator needs to serve it; nothing of it is remembered there but KV.

    `tokens` are the committed tokens from position `start` on, the first whose draft KV is not valid. With an
    `outcome` they are just its bonus token. A `prefill` row only asks to get ready: there is nothing to answer yet,
    because the target is prefilling too, or because the draft is still behind. If it is one chunk of several, its
    `budget` is 0 and `table` holds just its tokens.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    outcome: Outcome | None  # of the last round, the key of the cache; None: no branches can match
    prefill: bool
    lookahead: int  # draft tokens wanted
    budget: int  # branches to prepare; 0 for plain speculative decoding
    table: tuple[int, ...]  # draft blocks: committed tokens, trunk, and scratch for the branches
    request: RequestSampling  # its parameters without their grammar
    grammar: GrammarRef | None = None  # with its text in rows without an outcome: the first, and after any loss
    deferred: bool = False  # it sat out the last round, and does not sit out this one

    @property
    def length(self) -> int:
        """Committed tokens up to the last one sent."""
        return self.start + len(self.tokens)


class Round(Part, frozen=True):
    """Verifier -> speculator: the outcomes of the last round and the sequences that joined."""

    rows: tuple[DraftRow, ...]
    others: bool = False  # sequences are verified in this round for which no speculation is asked
    present: tuple[int, ...] = (0,)  # replicas of the draft that are asked
    backup: Backup | None = None  # what drafts after a miss; None: the speculator's own


class AnswerRow(Part, frozen=True):
    sequence: int
    hit: bool
    speculation: Speculation | None  # None: the row sits this round out, and its speculation comes with the next answer


class Span(Part, frozen=True):
    """A piece of work on the host's monotonic clock, in nanoseconds: for T_p, T_b and the trace."""

    name: str
    start: int
    end: int
    sequences: tuple[int, ...] = ()  # whose it was, where that is told apart
    replica: int = 0  # of the draft, if it did it


class CurveFit(Part, frozen=True):
    """Misses of F guesses fitted by scale * F^-exponent, in one situation."""

    hit: bool  # the speculation that was verified had been prepared
    accepted: bool  # all of it was accepted; otherwise a token was rejected
    band: int  # of the temperature: `estimators.BANDS`
    scale: float  # c
    exponent: float  # r
    r_squared: float
    rounds: float  # it rests on, with decay


class Report(Part, frozen=True):
    """What only the speculator can see: how its guesses rank, and what drafters without a model would have had
    accepted, by place in the speculation."""

    curves: tuple[CurveFit, ...] = ()
    acceptance: dict[Backup, tuple[float, ...]] = {}


class Answer(Part, frozen=True):
    """Speculator -> verifier: every row that is not a prefill, and what it did since the last answer."""

    rows: tuple[AnswerRow, ...]
    spans: tuple[Span, ...]
    branches: int  # prepared since then
    sequences: int  # that these were for, each counted once a round
    steps: tuple[Step, ...] = ()  # of the draft, prompts left out
    report: Report | None = None  # now and then


class Verified(Part, frozen=True):
    """Verifier -> each of several replicas: what all of them together have answered, and is now verified or sits out.

    Only then do they work ahead, each on its share of the outcomes.
    """

    rows: tuple[AnswerRow, ...]


class Bye(Part, frozen=True):
    """Either side is leaving in good order."""


Body = Hello | Round | Answer | Bye | Verified
_BODIES: dict[Kind, type[Any]] = {
    Kind.HELLO: Hello,
    Kind.ROUND: Round,
    Kind.ANSWER: Answer,
    Kind.BYE: Bye,
    Kind.VERIFIED: Verified,
}
_KINDS = {body: kind for kind, body in _BODIES.items()}


def _pack(value: object) -> bytes:
    if isinstance(value, RequestSampling):
        return value.packed
    raise NotImplementedError


def _unpack(kind: type[Any], data: object) -> RequestSampling:
    if not isinstance(data, bytes):
        raise ValueError(f"a {kind.__name__} travels as bytes")
    return RequestSampling.unpack(data)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(body, dec_hook=_unpack) for kind, body in _BODIES.items()
}


class Message(msgspec.Struct, frozen=True):
    round: int
    deployment: int  # identifies one start of one target group: answers to an earlier one are foreign
    body: Body


def encode(message: Message) -> bytes:
    """Raises ProtocolError when the message is larger than a peer would accept."""
    payload = _ENCODER.encode(message.body)
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError(
            f"a message of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD}: lower max_sequences"
        )
    kind = _KINDS[type(message.body)]
    return _HEADER.pack(_MAGIC, VERSION, kind, message.round, message.deployment, len(payload)) + payload


def decode(data: bytes) -> Message:
    """Raises ProtocolError for anything this version did not write."""
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a message of {len(data)} bytes is shorter than its header ({_HEADER.size} bytes)")
    magic, version, number, round_number, deployment, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(f"a message starts with {magic!r} instead of {_MAGIC!r}: the peer is not a Saguaro process")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side {VERSION}: install the same release"
        )
    if length != len(data) - _HEADER.size:
        raise ProtocolError(f"a message announces {length} payload bytes and carries {len(data) - _HEADER.size}")
    decoder = _DECODERS.get(number)
    if decoder is None:
        raise ProtocolError(f"message kind {number} is not known to protocol version {VERSION}")
    try:
        body = decoder.decode(data[_HEADER.size :])
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ProtocolError(f"a {Kind(number).name} message cannot be read: {error}") from error
    return Message(round_number, deployment, body)
