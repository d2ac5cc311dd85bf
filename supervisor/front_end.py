"""The OpenAI-compatible front end as a part: a process of its own, a client of Triton."""

from __future__ import annotations

import sys

import aiohttp

from saguaro.errors import LinkError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.supervisor.child import Child


class FrontEnd(Child):
    """`python -m saguaro.frontend.openai`. It answers its health question itself, whether Triton is there or not."""

    def __init__(self, config: DeploymentConfig) -> None:
        serving = config.serving
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        self._health = f"http://{host}:{serving.openai_port}/health"
        super().__init__("openai", [sys.executable, "-m", "saguaro.frontend.openai"])

    async def probe(self) -> bool:
        """False while it is in order but Triton is away. Raises LinkError when it does not answer."""
        try:
            async with aiohttp.ClientSession() as session, session.get(self._health) as answer:
                return answer.status == 200
        except aiohttp.ClientError as error:
            raise LinkError(f"the front end does not answer: {error}") from error
