"""The groups of ranks as parts: what the launcher and the service say about them, kept up to date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from saguaro.errors import LinkError
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.service_protocol import Status
from saguaro.supervisor.state import PartState

_POLL = 0.5  # seconds between two questions to the service
_SILENT = 30.0  # seconds without an answer after which the target is not ready; a long round answers when it ends


class Groups:
    """`on_change` is called when a part's state may have changed."""

    def __init__(self, launcher: Launcher, *, on_change: Callable[[], None]) -> None:
        self._launcher = launcher
        self._on_change = on_change
        self.status: Status | None = None  # the last answer; None while the target group is away
        self._answering: int | None = None  # the target's process that gave it

    async def watch(self) -> None:
        """Ask for ever. Raises LaunchError when the target group is gone for good."""
        while True:
            self._launcher.check()
            pid = self._launcher.pid("target")
            try:
                self.status = await self._ask(pid)
                self._answering = pid
            except LinkError:
                self.status = None
            self._on_change()
            await asyncio.sleep(_POLL)

    async def _ask(self, pid: int | None) -> Status:
        """Raises LinkError as soon as the group that is asked has ended."""
        question = asyncio.ensure_future(self._launcher.client.status(_SILENT))
        try:
            while not question.done():
                await asyncio.wait([question], timeout=0.1)
                if self._launcher.pid("target") != pid or pid is None:
                    raise LinkError("the target group is being started again")
            return question.result()
        finally:
            question.cancel()
            with suppress(asyncio.CancelledError, LinkError):
                await question

    def parts(self) -> dict[str, PartState]:
        restarts = self._launcher.restarts
        pid = self._launcher.pid("target")
        able = self.status is not None and pid is not None and pid == self._answering
        why = "" if able else "it does not answer" if pid else "it has ended"
        parts = {"target": PartState("ready" if able else "restarting", pid, restarts["target"], why)}
        drafts = self.status.drafts if self.status and able else []
        for replica, role in enumerate(self._launcher.drafts):
            there = replica < len(drafts) and drafts[replica]
            alone = "decoding goes on with fewer branches" if any(drafts) else "decoding goes on without speculation"
            pid = self._launcher.pid(role)
            parts[role] = PartState("ready" if there else "away", pid, restarts[role], "" if there else alone)
        return parts

    async def until_idle(self, grace: float) -> bool:
        """Whether everything that runs or waits has finished within `grace` seconds."""
        deadline = time.monotonic() + grace
        while (left := deadline - time.monotonic()) > 0:
            with suppress(LinkError):
                status = await self._launcher.client.status(left)
                if not status.running and not status.waiting:
                    return True
            await asyncio.sleep(0.05)
        return False
