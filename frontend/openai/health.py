"""Is the deployment well? Asked of both ends: Triton's model, and the service behind it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from saguaro.errors import SaguaroError
from saguaro.frontend.openai.triton import Triton
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.types import Mode

_FRESH_S = 1.0  # for which an answer is good for everybody who asks
_TIMEOUT_S = 3.0


ANSWERING = ("ok", "degraded")  # states in which new requests are answered


@dataclass(frozen=True)
class Health:
    """`status` is ok, degraded (the draft is away; answers are the same, only slower), draining or down."""

    status: str
    triton: str
    service: str
    mode: Mode | None  # what new requests get now; None when the service does not say
    mode_reason: str | None = None


class HealthCheck:
    """To be made within the event loop."""

    def __init__(self, triton: Triton, socket: Path) -> None:
        self._triton = triton
        self._client = Client(socket)
        self._lock = asyncio.Lock()
        self._known: Health | None = None
        self._asked = 0.0

    async def get(self) -> Health:
        """At most `_FRESH_S` old; however many ask, the model is asked once."""
        async with self._lock:
            if self._known is None or time.monotonic() - self._asked > _FRESH_S:
                self._known = await self._ask()
                self._asked = time.monotonic()
            return self._known

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self) -> Health:
        alive, (service, mode, reason) = await asyncio.gather(self._triton.alive(), self._service())
        triton = "ok" if alive else "down"
        return Health("down" if not alive else service, triton, service, mode, reason)

    async def _service(self) -> tuple[str, Mode | None, str | None]:
        try:
            status = await self._client.status(_TIMEOUT_S)
        except SaguaroError:
            return "down", None, None
        return "draining" if status.draining else status.health, status.mode, status.mode_reason
