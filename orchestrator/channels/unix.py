"""Two jobs of one machine joined by a socket in their runtime directory, for an MPI that cannot connect jobs.

The runtime directory is the user's alone, so nobody else can connect. Sending happens in a thread, because a message
may be larger than what the kernel takes for a peer that is at work.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from saguaro.errors import LinkError

_MAX_UNSENT = 64  # messages; a peer that takes none of them is as good as gone
_MAX_MESSAGE = 256 * 2**20  # bytes; checked before anything is allocated
_HEADER = 8  # bytes: the length of the message, least significant byte first
_FLUSH = 1.0  # seconds to hand out what the peer is still taking


class UnixChannel:
    """One end of a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._received = bytearray()
        self._unsent: queue.Queue[bytes | None] = queue.Queue(_MAX_UNSENT)
        self._closed = False
        self._failure: OSError | None = None  # of the sending thread
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def send(self, data: bytes) -> None:
        self._check()
        try:
            self._unsent.put_nowait(data)
        except queue.Full:
            self._fail(f"the peer has not taken the last {_MAX_UNSENT} messages")

    def receive(self, timeout: float) -> bytes | None:
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            if (message := self._whole_message()) is not None:
                return message
            left = deadline - time.monotonic()
            if not self._readable.poll(max(0.0, left) * 1e3):
                if left <= 0:
                    return None
                continue
            try:
                data = self._socket.recv(2**20)
            except OSError as error:
                self._fail(f"the peer is gone ({error})")
            if not data:
                self._fail("the peer is gone")
            self._received += data

    def close(self) -> None:
        """Flush what the peer is still taking, for at most a second."""
        if self._closed:
            return
        self._closed = True
        with suppress(queue.Full):  # then the peer takes nothing anyway
            self._unsent.put_nowait(None)
            self._sender.join(_FLUSH)
        self._shut()

    def _whole_message(self) -> bytes | None:
        if len(self._received) < _HEADER:
            return None
        size = int.from_bytes(self._received[:_HEADER], "little")
        if size > _MAX_MESSAGE:
            self._fail(f"the peer announces a message of {size} bytes; {_MAX_MESSAGE} are the most")
        if len(self._received) < _HEADER + size:
            return None
        message = bytes(self._received[_HEADER : _HEADER + size])
        del self._received[: _HEADER + size]
        return message

    def _send_all(self) -> None:
        try:
            while (data := self._unsent.get()) is not None:
                self._socket.sendall(len(data).to_bytes(_HEADER, "little") + data)
        except OSError as error:
            self._failure = error

    def _check(self) -> None:
        if self._closed:
            raise LinkError("the channel is closed")
        if self._failure is not None and not self._received:
            self._fail(f"the peer is gone ({self._failure})")

    def _fail(self, why: str) -> NoReturn:
        self._closed = True
        self._shut()
        raise LinkError(why)

    def _shut(self) -> None:
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the sending thread as well
        self._socket.close()


class Listener:
    """The verifier's side: a speculator of this name whenever one comes."""

    def __init__(self, rendezvous: Path, name: str = "draft") -> None:
        path = rendezvous / f"{name}.sock"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._socket.listen()

    def poll(self) -> UnixChannel | None:
        """A newly connected speculator, if there is one. Never waits."""
        try:
            return UnixChannel(self._socket.accept()[0])
        except BlockingIOError:
            return None


def connect(rendezvous: Path, timeout: float, name: str = "draft") -> UnixChannel:
    """The side of the speculator of this name. Raises LinkError when no verifier listens within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(str(rendezvous / f"{name}.sock"))
            return UnixChannel(connection)
        except (FileNotFoundError, ConnectionRefusedError):  # it is loading yet
            if time.monotonic() > deadline:
                connection.close()
                raise LinkError(f"no target group opened a socket in {rendezvous} within {timeout:.0f} s") from None
        time.sleep(0.02)
