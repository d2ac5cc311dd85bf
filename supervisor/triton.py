"""Triton as a part: tritonserver with its Python stubs, serving the ensemble. It knows nothing that it could lose."""

from __future__ import annotations

from pathlib import Path

from saguaro.errors import LinkError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.triton_repo.repository import write_repository
from saguaro.triton_repo.server import TritonServer


class Triton:
    """`socket` is the service's; model repository and backend are laid out in `folder`.

    The folder's name is also what regions of shared memory begin with, so that they can be found when all processes are
    gone.
    """

    name = "triton"

    def __init__(self, config: DeploymentConfig, engine: Path, socket: Path, folder: Path) -> None:
        self._config = config
        self._engine = engine
        self._socket = socket
        self._folder = folder
        self._server: TritonServer | None = None

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server else None

    @property
    def last_lines(self) -> str:
        return self._server.last_words() if self._server else "none"

    async def start(self) -> None:
        """Raises LaunchError when there is no server that can be started here."""
        repository = self._folder / "models"
        write_repository(repository, config=self._config, engine=self._engine, socket=self._socket)
        serving = self._config.serving
        server = TritonServer(
            repository,
            host=serving.host,
            http_port=serving.http_port,
            grpc_port=serving.grpc_port,
            metrics_port=serving.triton_metrics_port,
            folder=self._folder / "triton",
            prefix=f"{self._folder.name}-",
        )
        await server.start()
        self._server = server

    async def end(self) -> str | None:
        """The server has ended, or a model's stub has, which Triton neither says nor mends."""
        return await self._server.death() if self._server else "triton is not started"

    async def probe(self) -> bool:
        """Raises LinkError when a model does not answer."""
        trouble = await self._server.trouble() if self._server else "triton is not started"
        if trouble:
            raise LinkError(trouble)
        return True

    async def stop(self, grace: float) -> None:
        if self._server:
            server, self._server = self._server, None
            await server.stop(grace)
