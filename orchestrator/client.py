"""The client's side of the service's socket: submit, stream, cancel."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from saguaro import errors
from saguaro.orchestrator.service_protocol import (
    Cancel,
    Command,
    Failed,
    GetStatus,
    Shutdown,
    Status,
    Submit,
    Tokens,
    decode_event,
    encode,
)
from saguaro.orchestrator.types import Mode, SamplingParams

_POLL_MS = 100


class Client:
    """`check` is called while waiting and raises when the service is gone, so that no wait outlives it."""

    def __init__(self, socket: Path, check: Callable[[], None]) -> None:
        self._check = check
        self._numbers = itertools.count()
        self._events: defaultdict[int, deque[Tokens | Failed]] = defaultdict(deque)
        self._statuses: deque[Status] = deque()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{socket}")

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        mode: Mode | None = None,
        lookahead: int | None = None,
        trace: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Hand a prompt over; the number returned names the request in `stream` and `cancel`."""
        number = next(self._numbers)
        self._send(Submit(number, prompt, params, mode, lookahead, trace, priority, timeout_s))
        return number

    def stream(self, request: int) -> Iterator[Tokens]:
        """What each round emits; the last one has a `finish_reason`. Raises the error the service refused it with."""
        while True:
            while not self._events[request]:
                self._receive()
            event = self._events[request].popleft()
            if isinstance(event, Failed):
                del self._events[request]
                raise getattr(errors, event.error)(event.message)
            yield event
            if event.finish_reason:
                del self._events[request]
                return

    def cancel(self, request: int) -> None:
        self._send(Cancel(request))

    def status(self, timeout: float = 30.0) -> Status:
        """Raises LinkError when the service does not answer in time."""
        self._send(GetStatus())
        deadline = time.monotonic() + timeout
        while not self._statuses:
            if time.monotonic() > deadline:
                raise errors.LinkError(f"the service did not answer within {timeout:.0f} s")
            self._receive()
        return self._statuses.popleft()

    def shutdown(self) -> None:
        """Ask the service to stop all its processes in order."""
        self._send(Shutdown())

    def close(self) -> None:
        self._context.destroy(linger=500)

    def _send(self, command: Command) -> None:
        self._socket.send(encode(command))

    def _receive(self) -> None:
        """Sort in one event, or look whether the service is still there."""
        if not self._socket.poll(_POLL_MS):
            self._check()
            return
        event = decode_event(self._socket.recv())
        if isinstance(event, Status):
            self._statuses.append(event)
        else:
            self._events[event.request].append(event)
