"""Brings a part up, notices that it has died or hangs, and starts it again within its budget."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn, Protocol

from saguaro.errors import LaunchError, LinkError
from saguaro.orchestrator.restarts import Restarts

_log = logging.getLogger(__name__)
_POLL = 0.1  # seconds between two looks at whether the part is there
_PROBE_EVERY = 2.0  # seconds between two probes
_PROBE_TIMEOUT = (
    20.0  # seconds a probe may take: it shares few cores with the models, and a needless restart breaks streams
)
_SILENT_PROBES = 3  # in a row, after which a part that is there counts as hanging

State = Literal["starting", "ready", "unready", "restarting", "failed", "stopped"]


class Part(Protocol):
    """Something that is started, can be asked whether it can answer, and is stopped. Started again after a stop."""

    name: str

    @property
    def pid(self) -> int | None: ...

    @property
    def last_lines(self) -> str:
        """What it said last, to explain an end or a silence."""

    async def start(self) -> None:
        """Raises LaunchError when it cannot be started."""

    async def end(self) -> str | None:
        """Why it can be of no more use, in one clause; None as long as it runs."""

    async def probe(self) -> bool:
        """Whether a request would be answered now. False: it is in order but needs a part that is away.

        Raises LinkError when it does not answer.
        """

    async def stop(self, grace: float) -> None:
        """End it within about `grace` seconds and take away what it would leave. Harmless when done twice."""


class Keeper:
    """One part and its state. `on_change` is called whenever that changes."""

    def __init__(
        self,
        part: Part,
        *,
        restarts: Restarts,
        start_timeout: float,
        on_change: Callable[[], None] = lambda: None,
        probe_every: float = _PROBE_EVERY,
        probe_timeout: float = _PROBE_TIMEOUT,
    ) -> None:
        self.part = part
        self.restarts = restarts
        self.state: State = "stopped"
        self.detail = ""
        self._start_timeout = start_timeout
        self._on_change = on_change
        self._probe_every = probe_every
        self._probe_timeout = probe_timeout

    async def start(self) -> float:
        """Seconds until it could answer. Raises LaunchError naming it and its last lines when it cannot in time."""
        begin = time.monotonic()
        self._become("starting")
        try:
            await self._bring_up()
        except BaseException as error:
            self._become("failed", str(error))
            raise
        return time.monotonic() - begin

    async def keep(self) -> NoReturn:
        """Watch it for ever. Raises LaunchError when it has died more often than it may."""
        reason = await self._until_ill()
        while True:
            pause = self.restarts.take()
            if pause is None:
                self._become("failed", reason)
                raise LaunchError(f"{reason}. It is not started again: serving.max_restarts is used up")
            _log.warning("%s; it is started again in %.0f s", reason, pause)
            self._become("restarting", reason)
            await self.part.stop(0)
            await asyncio.sleep(pause)
            try:
                await self._bring_up()
            except LaunchError as error:
                reason = str(error)
                continue
            _log.warning("ready again: %s", self.part.name)
            reason = await self._until_ill()

    async def stop(self, grace: float) -> None:
        await self.part.stop(grace)
        self._become("stopped")

    async def _bring_up(self) -> None:
        await self.part.start()
        self.restarts.started()
        deadline = time.monotonic() + self._start_timeout
        while (left := deadline - time.monotonic()) > 0:
            if reason := await self.part.end():
                raise LaunchError(reason)
            with suppress(LinkError, TimeoutError):
                async with asyncio.timeout(min(left, self._probe_timeout)):
                    if await self.part.probe():
                        self._become("ready")
                        return
            await asyncio.sleep(_POLL)
        raise LaunchError(
            f"{self.part.name} was not ready within {self._start_timeout:g} s: raise serving.start_timeout_s in the "
            f"deployment if it only needs longer; its last lines: {self.part.last_lines}"
        )

    async def _until_ill(self) -> str:
        """Why it has to be started again."""
        silent = 0
        while True:
            probe = asyncio.ensure_future(asyncio.wait_for(self.part.probe(), self._probe_timeout))
            try:
                while not probe.done():
                    if reason := await self.part.end():
                        return reason
                    await asyncio.wait([probe], timeout=_POLL)
                try:
                    able, silent = probe.result(), 0
                    self._become("ready" if able else "unready")
                except (LinkError, TimeoutError) as error:
                    silent += 1
                    self._become("unready", str(error) or f"no answer within {self._probe_timeout:g} s")
                    if silent == _SILENT_PROBES and not await self.part.end():
                        return f"{self.part.name} does not answer; its last lines: {self.part.last_lines}"
            finally:
                probe.cancel()
            pause = time.monotonic() + self._probe_every
            while time.monotonic() < pause:
                if reason := await self.part.end():
                    return reason
                await asyncio.sleep(min(_POLL, self._probe_every))

    def _become(self, state: State, detail: str = "") -> None:
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            self._on_change()
