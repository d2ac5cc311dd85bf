"""What is asked about a deployment over HTTP: `/health` (JSON) and `/metrics` (Prometheus text)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from aiohttp import web

from saguaro.errors import LaunchError
from saguaro.supervisor.state import RunState

SERVING = ("ok", "degraded")  # states in which requests are answered


class Monitor:
    """Serves until closed. `state` is read and `metrics` awaited for every question."""

    def __init__(self, host: str, port: int, state: Callable[[], RunState], metrics: Callable[[], Awaitable[str]]):
        self._address = (host, port)
        self._state = state
        self._metrics = metrics
        application = web.Application()
        application.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics_page)])
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self) -> None:
        """Raises LaunchError when the address cannot be used."""
        await self._runner.setup()
        host, port = self._address
        try:
            await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        except OSError as error:
            raise LaunchError(
                f"health and metrics cannot be served at {host}:{port} ({error.strerror}): change serving.host or "
                "serving.monitor_port in the deployment"
            ) from error

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        """200 while requests are answered, else 503."""
        state = self._state()
        body = {
            "status": state.status,
            "deployment": state.name,
            "mode": state.mode,
            "mode_reason": state.mode_reason,
            "parts": {name: asdict(part) for name, part in state.parts.items()},
        }
        return web.json_response(body, status=200 if state.status in SERVING else 503)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})


def part_metrics(state: RunState) -> str:
    """Exposition text of the parts: up or not, and how often each was started again."""
    lines = [
        "# HELP saguaro_part_up Whether the part can answer.",
        "# TYPE saguaro_part_up gauge",
        *(f'saguaro_part_up{{part="{name}"}} {int(part.state == "ready")}' for name, part in state.parts.items()),
        "# HELP saguaro_restarts_total How often the part was started again.",
        "# TYPE saguaro_restarts_total counter",
        *(f'saguaro_restarts_total{{part="{name}"}} {part.restarts}' for name, part in state.parts.items()),
    ]
    return "\n".join(lines) + "\n"
