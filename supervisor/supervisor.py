"""A served deployment: starts its parts in order, watches them, and stops them in the opposite order.

Target and draft group, Triton, OpenAI front end: each needs those before it. The launcher starts the groups again when
they die; a keeper does the same for each of the others. The engines stay loaded whatever happens to those.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from saguaro.errors import LaunchError, SaguaroError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.plan import service_socket
from saguaro.orchestrator.restarts import Restarts
from saguaro.supervisor.front_end import FrontEnd
from saguaro.supervisor.groups import Groups
from saguaro.supervisor.keeper import Keeper, Part
from saguaro.supervisor.monitor import Monitor, part_metrics
from saguaro.supervisor.state import PartState, RunState
from saguaro.supervisor.triton import Triton

_log = logging.getLogger(__name__)
_FLUSH = 15.0  # seconds a part gets to hand out what is finished; Triton never takes less than four
_HURRIED_FLUSH = 2.0  # and in a hurry: enough for the errors that end what runs
_METRICS_TIMEOUT = 5.0


class Stop:
    """What signals ask for: the first to stop in good order, the next to hurry."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


class Supervisor:
    """`state` says who this run is; `on_change` gets it anew whenever something has changed."""

    def __init__(
        self,
        config: DeploymentConfig,
        engines: tuple[Path, Path | None],
        state: RunState,
        *,
        openai: bool,
        on_change: Callable[[RunState], None],
    ) -> None:
        serving = config.serving
        self._config = config
        self._engines = engines
        self._openai = openai
        self._begin = state
        self._on_change = on_change
        self._last: RunState | None = None
        self._phase = "starting"
        self._groups: Groups | None = None
        self._started: dict[str, PartState] = {}  # groups that can work while others still start
        self._keepers: list[Keeper] = []
        self._launcher: Launcher | None = None
        self._monitor = Monitor(serving.host, serving.monitor_port, self.state, self._metrics)

    async def run(self, stop: Stop) -> None:
        """Until it is told to stop. Raises LaunchError when a part does not start, or is gone for good."""
        async with AsyncExitStack() as stack:
            await self._monitor.start()
            stack.push_async_callback(self._monitor.close)
            serving = asyncio.create_task(self._serve(stack, stop))
            asked = asyncio.create_task(stop.asked.wait())
            try:
                await asyncio.wait([serving, asked], return_when=asyncio.FIRST_COMPLETED)
                if stop.asked.is_set() and self._phase == "serving":
                    await self._drain(stop)
                if serving.done():
                    await serving  # says why
            finally:
                self._phase = "draining"
                self._changed()
                for task in (serving, asked):
                    task.cancel()
                await asyncio.gather(serving, asked, return_exceptions=True)

    def state(self) -> RunState:
        """As of now."""
        parts = dict(self._groups.parts() if self._groups else self._started)
        for keeper in self._keepers:
            parts[keeper.part.name] = PartState(keeper.state, keeper.part.pid, keeper.restarts.total, keeper.detail)
        if self._phase != "serving":
            status = self._phase
        elif any(part.state != "ready" for name, part in parts.items() if not name.startswith("draft")):
            status = "down"
        else:
            status = "ok" if all(part.state == "ready" for part in parts.values()) else "degraded"
        service = self._groups.status if self._groups else None
        mode, reason = (service.mode, service.mode_reason) if service else (None, None)
        return replace(self._begin, status=status, mode=mode, mode_reason=reason, parts=parts)

    def _changed(self) -> None:
        state = self.state()
        if state != self._last:
            if self._phase == "serving" and self._last and self._last.status != state.status:
                away = [name for name, part in state.parts.items() if part.state != "ready"]
                level = logging.INFO if state.status == "ok" else logging.WARNING
                _log.log(level, "health: %s%s", state.status, f" ({', '.join(away)} away)" if away else "")
            self._last = state
            self._on_change(state)

    async def _serve(self, stack: AsyncExitStack, stop: Stop) -> NoReturn:
        """Bring everything up, then keep it so."""
        begin = time.monotonic()
        config = self._config

        def ready(role: str) -> None:
            self._started[role] = PartState("ready")
            _log.info("ready: %s (%.1f s)", role, time.monotonic() - begin)
            self._changed()

        self._launcher = Launcher(config, *self._engines, on_ready=ready, folder=Path(self._begin.folder))
        self._started = {role: PartState("starting") for role in ("target", *self._launcher.drafts)}
        self._changed()
        await stack.enter_async_context(self._launcher)
        self._groups = Groups(self._launcher, on_change=self._changed)
        try:
            async with asyncio.TaskGroup() as watchers:
                watchers.create_task(self._groups.watch())
                for part in self._serving_parts(self._launcher):
                    await self._start_part(part, stack, stop, watchers)
                while self._groups.status is None:
                    await asyncio.sleep(0.05)
                self._phase = "serving"
                self._changed()
                for what, address in self._begin.addresses.items():
                    _log.info("serving: %-14s %s", what, address)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first to fail has ended the others
        raise LaunchError("nothing is left to watch")

    async def _start_part(self, part: Part, stack: AsyncExitStack, stop: Stop, watchers: asyncio.TaskGroup) -> None:
        keeper = Keeper(
            part,
            restarts=Restarts(self._config.serving.max_restarts),
            start_timeout=self._config.serving.start_timeout_s,
            on_change=self._changed,
        )
        self._keepers.append(keeper)

        async def end() -> None:
            await keeper.stop(_HURRIED_FLUSH if stop.hurried.is_set() else _FLUSH)

        stack.push_async_callback(end)
        _log.info("ready: %s (%.1f s)", part.name, await keeper.start())
        watchers.create_task(keeper.keep())

    def _serving_parts(self, launcher: Launcher) -> list[Part]:
        engine, socket = self._engines[0], service_socket(launcher.runtime)
        parts: list[Part] = [Triton(self._config, engine, socket, Path(self._begin.folder))]
        if self._openai:
            parts.append(FrontEnd(self._config, engine, socket))
        return parts

    async def _drain(self, stop: Stop) -> None:
        """Take nothing new, let what runs finish within the grace period, end the rest with an error that says why."""
        self._phase = "draining"
        self._changed()
        if self._launcher is None or self._groups is None:
            return
        grace = self._config.serving.grace_s
        _log.info("stopping: running requests have %g s to finish; a second signal ends them", grace)
        with suppress(SaguaroError):  # without a service there is nothing to finish
            await self._launcher.client.drain()
            idle = asyncio.create_task(self._groups.until_idle(grace))
            hurried = asyncio.create_task(stop.hurried.wait())
            await asyncio.wait([idle, hurried], return_when=asyncio.FIRST_COMPLETED)
            if not (idle.done() and idle.result()):
                _log.warning("requests that are not finished are ended")
                await self._launcher.client.drain(end=True)
            for task in (idle, hurried):
                task.cancel()
            await asyncio.gather(idle, hurried, return_exceptions=True)

    async def _metrics(self) -> str:
        """Of the parts always; of the service when it answers."""
        text = part_metrics(self.state())
        if self._groups and self._launcher:
            with suppress(SaguaroError):
                text += await self._launcher.client.metrics(_METRICS_TIMEOUT)
        return text
