"""The leader's loop: take commands, admit, run a round, stream what it emitted.

Clients talk to it over one local socket and are numbered by it; a client that is slow or gone never holds it up.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from tokenizers import Tokenizer

from saguaro.errors import CapacityError, ConfigError, DrainingError, ProtocolError, SaguaroError
from saguaro.orchestrator.admission import Admission
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.grammar import Grammars, GrammarState, has_grammar
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.metrics import RoundWork, request_stats
from saguaro.orchestrator.protocol import Step
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.service_protocol import (
    MAX_MESSAGE,
    Cancel,
    Drain,
    Event,
    Failed,
    GetMetrics,
    GetSettings,
    GetStatus,
    Metrics,
    Settings,
    Shutdown,
    Status,
    Submit,
    Tokens,
    decode_command,
    encode,
)
from saguaro.orchestrator.target import Target
from saguaro.orchestrator.telemetry import Telemetry
from saguaro.orchestrator.types import Setting, TokenLogprobs
from saguaro.orchestrator.verifier import RoundResult, Verifier

_log = logging.getLogger(__name__)
_IDLE_MS = 20
_COMPILING_MS = 1  # between two looks at whether a grammar is ready, when there is nothing else to do
_COMPILE_S = 10.0  # seconds that a request waits for its grammar at most
_LEAVING = "the deployment is shutting down and takes no more requests: send it again in a moment, or to another one"


@dataclass
class _Request:
    """Where a sequence's tokens go, and what its figures are made of."""

    client: bytes
    number: int
    sequence: Sequence
    trace: bool
    submitted: int  # ns
    deadline: float  # on the monotonic clock, in seconds
    delivered: list[int]  # tokens the client has from an earlier service
    resumed: bool  # an earlier service had taken it
    grammar: Future[GrammarState | None] | None = None  # being compiled; the scheduler knows nothing of the request
    started: int = 0  # its first round, in ns
    first: int = 0  # its first tokens
    last: int = 0  # its latest tokens
    work: list[RoundWork] = field(default_factory=list)  # of each round after that of its first tokens


class _Round(msgspec.Struct, frozen=True):
    """A round that is over; its times in nanoseconds."""

    batch: list[Sequence]
    result: RoundResult
    setting: Setting
    start: int
    end: int


class Service:
    """`links` is asked between rounds for a newly connected speculator, and which replica of the draft it is."""

    def __init__(
        self,
        config: DeploymentConfig,
        target: Target,
        draft_pool: BlockPool,
        stop_ids: tuple[int, ...],
        socket: Path,
        links: Callable[[], tuple[int, DraftLink] | None],
        tokenizer: Tokenizer | None = None,
        grammars: Grammars | None = None,
        verify_steps: tuple[Step, ...] = (),
    ) -> None:
        self._config = config
        self._target_pool = BlockPool(target.num_blocks, target.block_size)
        self._draft_pool = draft_pool
        self._links = links
        serving = config.serving
        # An answer without a limit of its own ends where the model's context or the pool does.
        context = min(target.max_model_len, target.num_blocks * target.block_size)
        self._admission = Admission(config.speculation, target, stop_ids, tokenizer, self._target_pool, draft_pool)
        self._grammars = grammars
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._scheduler = Scheduler(
            self._target_pool,
            max_sequences=serving.max_sequences,
            max_model_len=context,
            max_batch_tokens=serving.max_batch_tokens,
            max_queue=serving.max_queue,
        )
        self._control = RoundControl(
            config.speculation,
            max_budget=config.max_budget,
            replicas=max(1, config.replicas),
            verify_steps=verify_steps,
        )
        self._verifier = Verifier(
            target,
            self._control.latest,
            max_model_len=context,
            max_batch_tokens=serving.max_batch_tokens,
            replicas=max(1, config.replicas),
        )
        self._telemetry = Telemetry(
            config,
            self._scheduler,
            self._verifier,
            self._control,
            target_pool=self._target_pool,
            draft_pool=draft_pool,
            compiling=lambda: self._compiling,
        )
        self._requests: dict[int, _Request] = {}
        self._unpublished: _Round | None = None
        self._gone: set[bytes] = set()  # clients
        self._next_id = 0
        self._epoch = secrets.randbits(64)
        self._running = True
        self._draining = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would drop events, and with them tokens, silently
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a client is gone
        self._socket.bind(f"ipc://{socket}")

    def run(self) -> None:
        """Serve until a client says Shutdown. The speculator is told before this returns."""
        try:
            while self._running:
                self._take_links()  # before anybody asks how things are
                self._take_commands()
                self._forget_clients()
                self._end_overdue()
                self._take_grammars()
                if batch := self._scheduler.schedule(self._control.lookahead):
                    self._round(batch)
                else:
                    self._publish()
        finally:
            self._verifier.link.close()
            self._compiler.shutdown(wait=False, cancel_futures=True)
            self._context.destroy(linger=500)

    def _round(self, batch: list[Sequence]) -> None:
        setting = self._verifier.setting = self._control.setting(len(batch))
        start = time.perf_counter_ns()
        try:
            result = self._verifier.step(batch, meanwhile=self._publish)
        finally:
            self._publish()  # of the round before, if this one has not come to it
        self._unpublished = _Round(batch, result, setting, start, time.perf_counter_ns())
        self._control.observe(batch, result)
        if any(sequence.finish_reason for sequence in batch):
            self._publish()  # what has ended must not take part in the next round

    def _publish(self) -> None:
        """Stream, count and learn from what the last round emitted, while the next one runs and nobody waits."""
        if self._unpublished is None:
            return
        latest, self._unpublished = self._unpublished, None
        self._verifier.target.settle()
        events: defaultdict[bytes, list[Event]] = defaultdict(list)  # by client
        work = RoundWork(latest.result.spans, latest.result.branches)
        for sequence, tokens in zip(latest.batch, latest.result.tokens, strict=True):
            request = self._requests[sequence.id]
            if not request.started:
                request.started = latest.start
                self._telemetry.started((latest.start - request.submitted) / 1e9)
            if request.first:
                request.work.append(work)
            if tokens:
                since = request.last or request.submitted
                self._telemetry.emitted(len(tokens), (latest.end - since) / 1e9, first=not request.first)
                request.first = request.first or latest.end
                request.last = latest.end
            if sequence.error:
                self._drop(request)
                failed = Failed(request.number, type(sequence.error).__name__, str(sequence.error))
                events[request.client].append(failed)
            elif sequence.finish_reason:
                events[request.client].append(self._finish(request, tokens, latest.end))
            elif tokens:
                events[request.client].append(Tokens(request.number, tokens, logprobs=_latest(sequence, tokens)))
        for client, its in events.items():
            self._send(client, *its)
        self._telemetry.round(latest.batch, latest.result)
        self._control.learn(latest.batch, latest.result, latest.setting)

    def _finish(self, request: _Request, tokens: list[int], now: int) -> Tokens:
        """Forget a request that has ended; what its client is to be told."""
        sequence = request.sequence
        stats = request_stats(sequence, request.work, request.submitted, request.first or now, now)
        spans = [span for round_ in request.work for span in round_.spans] if request.trace else []
        self._drop(request)
        logprobs = _latest(sequence, tokens)
        return Tokens(request.number, tokens, sequence.finish_reason, stats, spans, logprobs)

    def _forget_clients(self) -> None:
        if not self._gone:
            return
        self._publish()
        for request in [request for request in self._requests.values() if request.client in self._gone]:
            _log.info("a client is gone; its request %d is cancelled", request.sequence.id)
            self._drop(request)
        self._gone.clear()

    def _end_overdue(self) -> None:
        now = time.monotonic()
        overdue = [request for request in self._requests.values() if request.deadline <= now]
        if overdue:
            self._publish()
        for request in overdue:
            request.sequence.finish_reason = "timeout"
            self._send(request.client, self._finish(request, [], time.perf_counter_ns()))

    def _drop(self, request: _Request, refused: SaguaroError | None = None) -> None:
        del self._requests[request.sequence.id]
        if refused:
            self._telemetry.refused(refused)
        else:
            reason = request.sequence.finish_reason or "cancelled"  # its client has vanished
            self._telemetry.finished(reason, (time.perf_counter_ns() - request.submitted) / 1e9)
        if request.grammar:
            request.grammar.cancel()  # one that is being compiled ends for nobody
        else:
            self._scheduler.remove(request.sequence)

    def _take_grammars(self) -> None:
        """Queue requests whose grammar is ready; refuse those whose cannot be used, or takes too long."""
        for request in list(self._requests.values()):
            compiled = request.grammar
            if compiled is None:
                continue
            try:
                if compiled.done():
                    request.sequence.grammar = compiled.result()
                    self._enqueue(request)
                    request.grammar = None
                elif time.perf_counter_ns() - request.submitted > _COMPILE_S * 1e9:
                    if not compiled.running():
                        raise CapacityError(
                            f"the grammars of other requests took the {_COMPILE_S:g} s that a request waits for its "
                            "own: try again later"
                        )
                    raise ConfigError(f"the grammar was not compiled within {_COMPILE_S:g} s: make it simpler")
            except SaguaroError as error:
                self._drop(request, error)
                self._send(request.client, Failed(request.number, type(error).__name__, str(error)))

    def _take_links(self) -> None:
        arrived = self._links()
        if arrived is not None:
            replica, link = arrived
            self._telemetry.draft_connected()
            self._verifier.link.put(replica, link)
            self._control.draft(True, link.hello.steps, replica)
            _log.info("a draft is connected")
        if self._verifier.regroup(request.sequence for request in self._requests.values()):
            self._draft_pool.forget()
        for replica, connected in enumerate(self._verifier.link.connected):
            if not connected:
                self._control.draft(False, replica=replica)

    def _take_commands(self) -> None:
        """Everything that has arrived; waits a little when there is nothing else to do."""
        busy = self._scheduler.running or self._scheduler.waiting
        timeout = 0 if busy else _COMPILING_MS if self._compiling else _IDLE_MS
        while zmq.zmq_poll([(self._socket, zmq.POLLIN)], timeout):
            client, *frames = self._socket.recv_multipart()
            try:
                self._command(client, b"".join(frames))
            except ProtocolError as error:
                _log.warning("dropped what a client sent: %s", error)
            timeout = 0

    def _command(self, client: bytes, data: bytes) -> None:
        command = decode_command(data)
        self._publish()  # an answer must not overtake tokens
        match command:
            case Submit():
                try:
                    self._submit(client, command)
                except SaguaroError as error:
                    self._telemetry.refused(error)
                    self._send(client, Failed(command.request, type(error).__name__, str(error)))
            case Cancel():
                for request in list(self._requests.values()):
                    if (request.client, request.number) == (client, command.request):
                        request.sequence.finish_reason = "cancelled"
                        self._send(client, self._finish(request, [], time.perf_counter_ns()))
            case GetStatus():
                self._send(client, self._status())
            case Drain(end):
                self._draining = True
                for request in list(self._requests.values()) if end else []:
                    self._drop(request)
                    self._send(request.client, Failed(request.number, DrainingError.__name__, _LEAVING))
            case GetMetrics():
                self._send(client, Metrics(self._telemetry.text()))
            case GetSettings():
                self._send(client, Settings(self._control.best_settings()))
            case Shutdown():
                self._running = False

    def _submit(self, client: bytes, submit: Submit) -> None:
        """Raises ConfigError, CapacityError or DrainingError naming what is wrong with the request."""
        if self._draining:
            raise DrainingError(_LEAVING)
        if any((request.client, request.number) == (client, submit.request) for request in self._requests.values()):
            return  # submitted again after a restart, but it had reached this service already
        timeout = math.inf if submit.timeout_s is None else submit.timeout_s
        if not timeout > 0:
            raise ConfigError(f"timeout_s must be above 0, or left out for no limit, got {timeout}")
        sequence = self._admission.sequence(self._next_id, submit)
        now, deadline = time.perf_counter_ns(), time.monotonic() + timeout
        request = _Request(
            client, submit.request, sequence, submit.trace, now, deadline, submit.delivered, submit.resumed
        )
        if self._grammars and has_grammar(submit.params):
            if self._compiling >= self._config.serving.max_queue and not submit.resumed:
                raise CapacityError(
                    f"{self._compiling} requests wait for their grammars and serving.max_queue is "
                    f"{self._config.serving.max_queue}. Try again later, or raise it in the deployment"
                )
            request.grammar = self._compiler.submit(self._grammars.start, submit.params)
        else:
            self._enqueue(request)
        self._telemetry.submitted(submit.params, len(submit.prompt), len(submit.delivered))
        self._next_id += 1
        self._requests[sequence.id] = request

    def _enqueue(self, request: _Request) -> None:
        """Raises ConfigError or CapacityError as `Scheduler.add` does."""
        request.sequence.resume(request.delivered)
        self._scheduler.add(request.sequence, resumed=request.resumed)

    @property
    def _compiling(self) -> int:
        """Requests that wait for their grammar."""
        return sum(request.grammar is not None for request in self._requests.values())

    def _status(self) -> Status:
        drafts = self._verifier.link.connected[: self._config.replicas]
        return Status(
            epoch=self._epoch,
            health="ok" if all(drafts) else "degraded",
            mode=self._control.mode,
            mode_reason=self._control.reason,
            running=len(self._scheduler.running),
            waiting=self._scheduler.waiting + self._compiling,
            free_target_blocks=self._target_pool.free_blocks,
            target_blocks=self._target_pool.num_blocks,
            free_draft_blocks=self._draft_pool.free_blocks,
            draft_blocks=self._draft_pool.num_blocks,
            stale_answers=sum(counts.stale_answers for counts in self._verifier.link.counts),
            drafts=drafts,
            cached_target_blocks=self._target_pool.cached_blocks,
            preemptions=self._scheduler.preemptions,
            draining=self._draining,
        )

    def _send(self, client: bytes, *events: Event) -> None:
        """Queue events; the socket delivers it as fast as the client reads. What a request can queue is bounded by
        its max_tokens. A client that has vanished takes its requests along, between two rounds."""
        try:
            self._socket.send_multipart([client, encode(list(events))], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.add(client)


def _latest(sequence: Sequence, tokens: list[int]) -> list[TokenLogprobs]:
    """Log probabilities of the tokens just emitted; none when they were not asked for."""
    return sequence.logprobs[len(sequence.logprobs) - len(tokens) :] if sequence.logprobs else []
