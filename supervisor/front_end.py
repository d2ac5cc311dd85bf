"""The OpenAI-compatible front end as a part: a process of its own, a client of Triton."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp

from saguaro.errors import LinkError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.supervisor.child import Child

_GRACE = 5  # seconds


class FrontEnd(Child):
    """`python -m saguaro.frontend.openai`. It answers its health question itself, whether Triton is there or not."""

    def __init__(self, config: DeploymentConfig, engine: Path, socket: Path) -> None:
        serving = config.serving
        local = "127.0.0.1" if serving.host == "0.0.0.0" else "::1" if serving.host == "::" else serving.host
        host = f"[{local}]" if ":" in local else local
        self._health = f"http://{host}:{serving.openai_port}/health"
        options = {
            "--triton": f"{host}:{serving.grpc_port}",
            "--socket": str(socket),
            "--engine": str(engine),
            "--model": config.name,
            "--host": serving.host,
            "--port": str(serving.openai_port),
            "--grace": str(_GRACE),  # its requests have had theirs when it is told to stop
        }
        command = [sys.executable, "-m", "saguaro.frontend.openai"]
        super().__init__("openai", command + [word for option in options.items() for word in option])

    async def probe(self) -> bool:
        """False while it is in order but what it needs is away. Raises LinkError when it does not answer."""
        try:
            async with aiohttp.ClientSession() as session, session.get(self._health) as answer:
                # While it drains it says 503, so that nobody sends it new requests, and is in order.
                return answer.status == 200 or (await answer.json()).get("status") == "draining"
        except (aiohttp.ClientError, ValueError) as error:
            raise LinkError(f"the front end does not answer: {error}") from error
