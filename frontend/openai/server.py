"""uvicorn, which says where it listens and ends in good order."""

from __future__ import annotations

import asyncio
import logging
from types import FrameType

import uvicorn

_log = logging.getLogger("saguaro")


class Server(uvicorn.Server):
    """Says the address it listens on, and ends in good order."""

    def __init__(self, config: uvicorn.Config, grace_s: float) -> None:
        super().__init__(config)
        self._grace_s = grace_s

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        _log.info("ready: http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        asyncio.get_running_loop().call_later(self._grace_s, self.config.app.state.endpoints.triton.end_streams)  # type: ignore[union-attr]
        await super().shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's, which would raise the signal once more at the end, and exit with its number."""
        self.force_exit = self.should_exit and sig == 2
        self.should_exit = True
