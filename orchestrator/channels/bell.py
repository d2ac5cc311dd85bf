"""What wakes a peer of the same machine that waits for a message: MPI itself can only be asked again and again.

A ring is a datagram without content between sockets of the runtime directory. It says that a message is on its way, no
more: one that is lost, or rings for a message already taken, costs a look at MPI.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from pathlib import Path


class Bell:
    """Rings at `peer` and is rung at `own`, where there is a socket from now on."""

    def __init__(self, own: Path, peer: Path) -> None:
        own.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(own))
        self._peer = str(peer)

    def ring(self) -> None:
        with suppress(OSError):  # nobody is there, which the channel notices, or many rings are waiting already
            self._socket.sendto(b"", self._peer)

    def wait(self, seconds: float) -> bool:
        """Sleep until it rings, `seconds` at most; whether it did. Rings are not counted."""
        rung = bool(select.select([self._socket], [], [], seconds)[0])  # `poll` would round up to milliseconds
        while rung:
            try:
                self._socket.recv(1)
            except BlockingIOError:
                break
        return rung
