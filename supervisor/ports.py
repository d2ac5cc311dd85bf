"""The ports of a deployment: each is looked at before anything is started."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

from saguaro.errors import LaunchError
from saguaro.orchestrator.config import ServingConfig

PORTS = ("monitor_port", "http_port", "grpc_port", "triton_metrics_port", "openai_port")


def choose_ports(serving: ServingConfig) -> ServingConfig:
    """With a free port for each 0. Raises LaunchError for one that is in use, naming port, key and remedy.

    A part that is started again gets the port it had, so clients find it again.
    """
    chosen: dict[str, int] = {}
    with ExitStack() as held:  # all at once, so that no free port is chosen twice
        # The fixed ones first: none of them may be taken for a free one.
        for key in sorted(PORTS, key=lambda key: getattr(serving, key) == 0):
            port = getattr(serving, key)
            if port and port in chosen.values():
                other = next(name for name, used in chosen.items() if used == port)
                raise LaunchError(f"serving.{key} and serving.{other} are both {port}: give each a port of its own")
            chosen[key] = _bind(held, serving.host, port, key)
    return replace(
        serving,
        monitor_port=chosen["monitor_port"],
        http_port=chosen["http_port"],
        grpc_port=chosen["grpc_port"],
        triton_metrics_port=chosen["triton_metrics_port"],
        openai_port=chosen["openai_port"],
    )


def port_problem(serving: ServingConfig, key: str) -> str | None:
    """Why the port of that key cannot be used now; None: it can."""
    try:
        with ExitStack() as held:
            _bind(held, serving.host, getattr(serving, key), key)
    except LaunchError as error:
        return str(error)
    return None


def _bind(held: ExitStack, host: str, port: int, key: str) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(f"serving.host is {host!r}, which is not an address of this machine: {error}") from error
    server = held.enter_context(socket.socket(family, kind, protocol))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
    try:
        server.bind(address)
        server.listen(1)
    except OSError as error:
        raise LaunchError(
            f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there (see `ss -ltnp`), or "
            f"set serving.{key} in the deployment to another port, 0 for any free one"
        ) from error
    return int(server.getsockname()[1])
