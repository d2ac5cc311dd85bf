"""The client's side of the service's socket: submit, stream, cancel, and carry on after a restart of the service.

The client knows every prompt and the tokens delivered so far. When another service answers in the place of the one it
submitted to, it resubmits both, and because random numbers are a function of seed and position the stream goes on with
the text it would have had.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from saguaro import errors
from saguaro.orchestrator.service_protocol import (
    MAX_MESSAGE,
    Cancel,
    Command,
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
    decode_events,
    encode,
)
from saguaro.orchestrator.types import Mode, SamplingParams, Setting

_POLL = 0.1  # seconds between two looks at whether the service's processes are there
_NO_TIME = 1e-9  # seconds; a request whose time is over still gets its end from the service
_SILENCE = 1.0  # seconds without an event after which the service is asked who it is


T = TypeVar("T")


def _answer(waiting: Iterable[asyncio.Future[T]], value: T) -> None:
    for answer in waiting:
        if not answer.done():
            answer.set_result(value)


def _no_check() -> None:
    """For a client that did not start the service and cannot look at its processes."""


@dataclass
class _Request:
    submit: Submit
    submitted: float  # on the monotonic clock, in seconds
    delivered: list[int] = field(default_factory=list)
    events: asyncio.Queue[Tokens | Exception] = field(default_factory=asyncio.Queue)

    def resubmit(self) -> Submit:
        """For another service: with the tokens delivered so far and what is left of the time."""
        timeout = self.submit.timeout_s
        if timeout is not None:
            timeout = max(_NO_TIME, timeout - (time.monotonic() - self.submitted))
        return msgspec.structs.replace(self.submit, delivered=self.delivered, resumed=True, timeout_s=timeout)


class Client:
    """To be made and used within one event loop.

    `check` is called while waiting and raises when the service is gone for good. `patience` bounds how long a service
    may stay silent; then, and when `check` raises, every stream ends with that error.
    """

    def __init__(self, socket: Path, check: Callable[[], None] = _no_check, *, patience: float = 600.0) -> None:
        self._check = check
        self._patience = patience
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._statuses: deque[asyncio.Future[Status]] = deque()
        self._metrics: deque[asyncio.Future[str]] = deque()
        self._settings: deque[asyncio.Future[list[Setting]]] = deque()
        self._epoch: int | None = None  # of the service the requests were submitted to
        self._failure: Exception | None = None  # why nothing can be received any more
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"ipc://{socket}")
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        mode: Mode | None = None,
        lookahead: int | None = None,
        trace: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Tokens, None]:
        """What each round emits; the last event has a `finish_reason`. Closing the iterator early cancels the request.

        A lower `priority` goes first. After `timeout_s` seconds, restarts of the service included, the request ends
        with what it has and the finish reason "timeout".

        Raises the error the service refused the request with, LaunchError or LinkError when the service is gone.
        """
        if self._epoch is None:
            await self.status(self._patience)  # whom it is submitted to; a restart must be noticed
        if params.seed is None:  # drawn here, because a restart must not draw another one
            params = replace(params, seed=secrets.randbits(64))
        number = next(self._numbers)
        submit = Submit(number, prompt, params, mode, lookahead, trace, priority=priority, timeout_s=timeout_s)
        request = self._requests[number] = _Request(submit, time.monotonic())
        try:
            await self._send(request.submit)
            while True:
                event = await request.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            if self._requests.pop(number, None) and self._failure is None:
                await self._send(Cancel(number))

    async def status(self, timeout: float = 30.0) -> Status:
        """Raises LinkError when the service does not answer in time."""
        return await self._ask(GetStatus(), self._statuses, timeout)

    async def metrics(self, timeout: float = 30.0) -> str:
        """The service's metrics in Prometheus' text format. Raises LinkError when it does not answer in time."""
        return await self._ask(GetMetrics(), self._metrics, timeout)

    async def settings(self, timeout: float = 30.0) -> list[Setting]:
        """The best setting of each mode for one sequence, by what the service has measured so far.

        Raises LinkError when it does not answer in time.
        """
        return await self._ask(GetSettings(), self._settings, timeout)

    async def drain(self, *, end: bool = False) -> None:
        """Ask the service to take no new requests; with `end`, to end those it has with a DrainingError."""
        await self._send(Drain(end))

    async def shutdown(self) -> None:
        """Ask the service to stop all its processes in order."""
        await self._send(Shutdown())

    async def close(self) -> None:
        """Let go of the service, which then cancels what is still running for this client."""
        self._failure = self._failure or errors.LinkError("the client is closed")
        self._receiver.cancel()
        with suppress(asyncio.CancelledError):
            await self._receiver
        self._context.destroy(linger=500)

    async def _ask(self, question: Command, waiting: deque[asyncio.Future[T]], timeout: float) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        try:
            async with asyncio.timeout(timeout):
                await self._send(question)  # waits where too much is queued for a service that is away
                return await answer
        except TimeoutError:
            raise errors.LinkError(f"the service did not answer within {timeout:g} s") from None
        finally:
            waiting.remove(answer)

    async def _send(self, command: Command) -> None:
        if self._failure:
            raise self._failure
        data = encode(command)
        if len(data) > MAX_MESSAGE:  # the service would hang up on whoever sent it
            raise errors.ConfigError(f"the request has {len(data)} bytes and the limit is {MAX_MESSAGE}: shorten it")
        await self._socket.send(data)

    async def _receive(self) -> None:
        """Sort in what arrives, and look after the service when nothing does."""
        heard = asked = time.monotonic()
        try:
            while True:
                if await self._socket.poll(_POLL * 1000):
                    heard = asked = time.monotonic()
                    for event in decode_events(await self._socket.recv()):
                        await self._sort(event)
                    continue
                self._check()
                now = time.monotonic()
                busy = self._requests or self._statuses or self._metrics or self._settings
                if not busy:
                    heard = now
                elif now - heard > self._patience:
                    raise errors.LinkError(f"the service has been silent for {self._patience:g} s")
                elif now - asked > _SILENCE:
                    asked = now
                    await self._send(GetStatus())
                    for waiting, question in ((self._metrics, GetMetrics()), (self._settings, GetSettings())):
                        if waiting:  # asked of a service that has died meanwhile
                            await self._send(question)
        except (errors.SaguaroError, zmq.ZMQError) as error:
            self._failure = error
            for request in self._requests.values():
                request.events.put_nowait(error)
            unanswered: list[asyncio.Future[Any]] = [*self._statuses, *self._metrics, *self._settings]
            for answer in unanswered:
                if not answer.done():
                    answer.set_exception(error)

    async def _sort(self, event: Event) -> None:
        if isinstance(event, Metrics):
            _answer(self._metrics, event.text)
            return
        if isinstance(event, Settings):
            _answer(self._settings, event.best)
            return
        if isinstance(event, Status):
            _answer(self._statuses, event)
            if self._epoch not in (None, event.epoch):
                await self._resubmit()
            self._epoch = event.epoch
            return
        request = self._requests.get(event.request)
        if request is None:  # cancelled, or over
            return
        if isinstance(event, Failed):
            request.events.put_nowait(getattr(errors, event.error)(event.message))
        else:
            request.delivered.extend(event.tokens)
            request.events.put_nowait(event)
        if isinstance(event, Failed) or event.finish_reason:
            # Over, whether its reader has seen that or not: another service must not generate its end once more.
            del self._requests[event.request]

    async def _resubmit(self) -> None:
        """Another service has taken over: hand it what the last one was working on, tokens delivered so far included.

        A request that reached it already, because it was submitted during the restart, is recognised by its number.
        """
        for request in self._requests.values():
            await self._send(request.resubmit())
