"""Two MPI jobs joined by connect/accept, so that either can die without taking the other along.

The verifier listens and leaves a port for each speculator in a rendezvous directory. A speculator that is ready to work
says so there and connects; the verifier then accepts, so that nobody blocks in `accept` for one that is still loading.
MPI has nothing to sleep on: who waits probes it, and sleeps between two probes until a bell rings (`bell`). Where a
message is likely, right after a call or a ring and as long after the last message as that came after the one before, it
stays awake for a moment, giving way to all others.

MPI_Finalize and MPI_Comm_disconnect are collective over connected jobs and would hang on a dead peer, so neither is
called: a rank ends through `leave`, after its messages are out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import mpi4py

mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  (the line above must come first)

from saguaro.errors import LinkError  # noqa: E402
from saguaro.orchestrator.channels.bell import Bell  # noqa: E402

_TAG = 1
_MAX_UNSENT = 64  # messages; a peer that takes none of them is as good as gone
_PEER_CHECK = 0.05  # seconds between two looks at whether the peer's process still exists
_AWAKE = 0.5e-3  # seconds around a moment at which a message is likely; to be woken takes a fifth of that


def place() -> tuple[int, int]:
    """This rank's number in its job, and how many there are."""
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def library() -> str:
    """The MPI that is loaded, such as "MPICH 5.0.2"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def remove_shared_memory() -> None:
    """Unlink the shared-memory files MPI made for this job; the mappings stay valid.

    MPI does it only in MPI_Finalize, so a rank that is killed would leave them behind for ever. Collective: every rank
    must have mapped them before the first one unlinks.
    """
    MPI.COMM_WORLD.Dup().Barrier()  # the world's own messages are TensorRT-LLM's, where it runs
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/")[2]
        if path.startswith("mpich"):
            with contextlib.suppress(FileNotFoundError):  # a rank of the same node was faster
                os.unlink(f"/dev/shm/{path.split()[0]}")


def leave(status: int) -> NoReturn:
    """End this rank now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Appears complete or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({**content, "pid": os.getpid()}))
    os.replace(partial, path)


class MpiChannel:
    """One end of an inter-communicator of two single processes."""

    def __init__(self, comm: MPI.Intercomm, peer: int, bell: Bell) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self._peer = peer  # its process id
        self._bell = bell
        self._unsent: deque[tuple[MPI.Request, bytes]] = deque()
        self._closed = False
        self._received = self._due = 0.0  # when the last message came, and when the next one does if rounds are alike
        self._checked = 0.0  # when for the peer's process, on the monotonic clock

    def send(self, data: bytes) -> None:
        self._check()
        while self._unsent and self._unsent[0][0].Test():
            self._unsent.popleft()
        if len(self._unsent) >= _MAX_UNSENT:
            self._closed = True
            raise LinkError(f"the peer has not taken the last {_MAX_UNSENT} messages")
        try:
            self._unsent.append((self._comm.Isend([data, MPI.BYTE], dest=0, tag=_TAG), data))
        except MPI.Exception as error:
            self._fail(error)
        self._bell.ring()

    def receive(self, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        since = end - timeout
        status = MPI.Status()
        if self._closed:
            raise LinkError("the channel is closed")
        while True:
            try:
                # Twice: the first look lets MPI take in what has come, which the second one finds.
                if self._comm.Iprobe(0, _TAG, status) or self._comm.Iprobe(0, _TAG, status):
                    data = bytearray(status.Get_count(MPI.BYTE))
                    self._comm.Recv([data, MPI.BYTE], source=0, tag=_TAG)
                    now = time.monotonic()
                    self._due, self._received = 2 * now - self._received, now
                    return bytes(data)
            except MPI.Exception as error:
                self._fail(error)
            self._check()
            now = time.monotonic()
            if now >= end:
                return None
            early = self._due - _AWAKE - now
            if now - since < _AWAKE or -2 * _AWAKE < early <= 0:
                os.sched_yield()  # the core is anybody's who can use it, the peer's above all
                continue
            # Twice as long each time: a ring may have been lost.
            sleep = min(end - now, _PEER_CHECK, now - since)
            if self._bell.wait(min(sleep, early) if early > 0 else sleep):
                since = time.monotonic()

    def close(self) -> None:
        """Flush what the peer is still taking, for at most a second."""
        if self._closed:
            return
        deadline = time.monotonic() + 1
        try:
            while self._unsent and time.monotonic() < deadline:
                self._check()
                if self._unsent[0][0].Test():
                    self._unsent.popleft()
                else:
                    time.sleep(0.001)
        except (LinkError, MPI.Exception):
            pass  # closing: there is nobody left to tell
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise LinkError("the channel is closed")
        now = time.monotonic()
        if now - self._checked < _PEER_CHECK:
            return
        self._checked = now
        try:
            os.kill(self._peer, 0)
        except ProcessLookupError:
            self._closed = True
            raise LinkError(f"the peer's process {self._peer} is gone") from None

    def _fail(self, error: MPI.Exception) -> NoReturn:
        self._closed = True
        raise LinkError(f"MPI reports that the peer cannot be reached: {error}") from error


def _bells(rendezvous: Path, name: str) -> tuple[Path, Path]:
    """Where the verifier is rung at, and where the speculator of this name."""
    return rendezvous / f"{name}.bell", rendezvous / f"{name}.back"


class Listener:
    """The verifier's side: one speculator of this name at a time, as often as one comes."""

    def __init__(self, rendezvous: Path, name: str = "draft") -> None:
        self._ready = rendezvous / f"{name}.ready"
        self._port = MPI.Open_port()
        self._self = MPI.COMM_SELF.Dup()  # its own, because several listeners may be accepting at a time
        self._accepting: threading.Thread | None = None
        self._accepted: deque[MpiChannel] = deque()
        self._looked = -_PEER_CHECK  # when for one that is ready
        self._bell = Bell(*_bells(rendezvous, name))
        _write(rendezvous / f"{name}.port", {"port": self._port})

    def poll(self) -> MpiChannel | None:
        """A newly connected speculator, if there is one. Never waits."""
        if self._accepted:
            return self._accepted.popleft()
        now = time.monotonic()
        if now - self._looked < _PEER_CHECK or (self._accepting is not None and self._accepting.is_alive()):
            return None
        self._looked = now
        if self._ready.exists():
            peer = json.loads(self._ready.read_text())
            self._ready.unlink()
            # `accept` blocks; in a thread it can block nobody even if the speculator dies at this very moment.
            self._accepting = threading.Thread(target=self._accept, args=(peer,), daemon=True)
            self._accepting.start()
        return None

    def _accept(self, peer: dict[str, Any]) -> None:
        self._accepted.append(MpiChannel(self._self.Accept(self._port), peer["pid"], self._bell))


def connect(rendezvous: Path, timeout: float, name: str = "draft") -> MpiChannel:
    """The side of the speculator of this name. Raises LinkError when no verifier listens within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    port_file = rendezvous / f"{name}.port"
    while not port_file.exists():
        if time.monotonic() > deadline:
            raise LinkError(f"no target group opened a port in {rendezvous} within {timeout:.0f} s")
        time.sleep(0.02)
    peer = json.loads(port_file.read_text())
    bell = Bell(*_bells(rendezvous, name)[::-1])
    _write(rendezvous / f"{name}.ready", {})
    try:
        return MpiChannel(MPI.COMM_SELF.Connect(peer["port"]), peer["pid"], bell)
    except MPI.Exception as error:
        raise LinkError(f"the target group's port cannot be reached: {error}") from error
