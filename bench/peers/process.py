"""A peer in a process of its own, so that threads and memory of one are none of another's."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType

from saguaro.bench.peers.peer import Answer, Method, Peer
from saguaro.errors import EngineError, LinkError

_START_S = 600.0  # to load
_ANSWER_S = 600.0
_STOP_S = 30.0


class PeerProcess:
    """The peer, loaded, as a context manager. Raises EngineError with what it said when it fails, LinkError when it is
    silent for too long."""

    def __init__(self, peer: Peer, methods: Sequence[Method]) -> None:
        self._name = peer.name
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, peer, tuple(methods)))
        self._process.start()
        theirs.close()

    def __enter__(self) -> PeerProcess:
        try:
            self._receive(_START_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        self._link.send((method, tuple(prompt), max_tokens))
        answer = self._receive(_ANSWER_S)
        assert isinstance(answer, Answer)
        return answer

    def _receive(self, seconds: float) -> object:
        if not self._link.poll(seconds):
            raise LinkError(f"{self._name} said nothing for {seconds:.0f} s")
        try:
            value = self._link.recv()
        except EOFError:
            self._process.join(_STOP_S)
            raise EngineError(f"{self._name}: its process ended with status {self._process.exitcode}") from None
        if isinstance(value, str):
            raise EngineError(f"{self._name}: {value}")
        return value

    def _stop(self) -> None:
        self._link.close()  # the other side closes its peer then
        self._process.join(_STOP_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(link: Connection, peer: Peer, methods: Sequence[Method]) -> None:
    """Answers until the link is closed. What libraries print goes to standard error."""
    os.dup2(2, 1)
    try:
        peer.load(methods)
        link.send(None)
        while True:
            link.send(peer.generate(*link.recv()))
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        traceback.print_exc()
        link.send(f"{type(error).__name__}: {error}")
    finally:
        peer.close()
