"""What a client and the service say to each other over the local socket: MessagePack, typed, bounded."""

from __future__ import annotations

import msgspec

from saguaro.errors import ConfigError, ProtocolError
from saguaro.orchestrator.metrics import RequestStats
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import FinishReason, Mode, SamplingParams, Setting, TokenLogprobs

MAX_MESSAGE = 16 * 2**20


class Submit(msgspec.Struct, frozen=True, tag=True):
    """`mode` and `lookahead` may lower what the deployment allows, never raise it; None takes the deployment's.

    A lower `priority` goes first. With `timeout_s` the request ends that long after it has come in, with what it has
    by then and the finish reason "timeout", also when it is still waiting.
    """

    request: int  # the client's number for it
    prompt: list[int]
    params: SamplingParams
    mode: Mode | None = None
    lookahead: int | None = None
    trace: bool = False
    delivered: list[int] = []  # tokens an earlier service had generated and the client has: the stream goes on after
    resumed: bool = False  # an earlier service had taken it: no queue is too full for it
    priority: int = 0
    timeout_s: float | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request: int


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    pass


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new request; with `end`, those that wait or run end at once with a DrainingError."""

    end: bool = False


class GetMetrics(msgspec.Struct, frozen=True, tag=True):
    pass


class GetSettings(msgspec.Struct, frozen=True, tag=True):
    pass


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What a round emitted for a request. With `finish_reason` it is the last one and carries the figures."""

    request: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    spans: list[Span] = []
    logprobs: list[TokenLogprobs] = []  # one per token, if the request asked for them


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request cannot be served; nothing else is affected."""

    request: int
    error: str  # name of the SaguaroError subclass
    message: str


class Status(msgspec.Struct, frozen=True, tag=True):
    epoch: int  # identifies one start of the service: when it changes, requests must be submitted again
    health: str  # ok, or degraded while a configured draft, or a replica of it, is away
    mode: Mode  # what new requests get now
    mode_reason: str  # and why
    running: int
    waiting: int
    free_target_blocks: int
    target_blocks: int
    free_draft_blocks: int
    draft_blocks: int
    stale_answers: int
    cached_target_blocks: int  # hold a prefix that a prompt may share; free unless a running request holds them too
    preemptions: int  # running requests that had to give their blocks back, since the start
    draining: bool  # it takes no new requests and finishes those it has
    drafts: list[bool] = []  # whether each replica of the draft is connected


class Metrics(msgspec.Struct, frozen=True, tag=True):
    text: str  # in Prometheus' text format


class Settings(msgspec.Struct, frozen=True, tag=True):
    best: list[Setting]  # of each mode that may run, for one sequence, by what is measured so far


Command = Submit | Cancel | GetStatus | GetMetrics | GetSettings | Drain | Shutdown
Event = Tokens | Failed | Status | Metrics | Settings

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])


def encode(message: Command | list[Event]) -> bytes:
    """A client sends commands one by one; what a round has for it arrives together."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises ProtocolError for anything a client of this version would not send."""
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a command of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}")
    try:
        return _commands.decode(data)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ProtocolError(f"a command cannot be read: {error}") from error


def decode_events(data: bytes) -> list[Event]:
    """Raises ProtocolError for anything a service of this version would not send."""
    try:
        return _events.decode(data)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ProtocolError(f"events cannot be read: {error}") from error
