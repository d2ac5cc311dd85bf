"""Two roles in one process: tests, and trying things out in a notebook."""

from __future__ import annotations

import queue

from saguaro.errors import LinkError


class InprocChannel:
    """One end of a pair made by `inproc_pair`."""

    def __init__(self, inbox: queue.SimpleQueue[bytes | None], outbox: queue.SimpleQueue[bytes | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False

    def send(self, data: bytes) -> None:
        if self._closed:
            raise LinkError("the channel is closed")
        self._outbox.put(data)

    def receive(self, timeout: float) -> bytes | None:
        if self._closed:
            raise LinkError("the channel is closed")
        try:
            data = self._inbox.get(timeout=timeout) if timeout > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if data is None:
            self._closed = True
            raise LinkError("the peer closed the channel")
        return data

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outbox.put(None)


def inproc_pair() -> tuple[InprocChannel, InprocChannel]:
    """Two connected ends."""
    first: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    second: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    return InprocChannel(first, second), InprocChannel(second, first)
