"""The OpenAI-compatible front end as a process: python -m saguaro.frontend.openai --triton HOST:PORT …

It is ready when it says so in its log (`ready: http://HOST:PORT`); whether the deployment is well is for /health to
say. SIGTERM and SIGINT: no new connections, answers under way are finished within the grace period, exit status 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from saguaro.errors import ConfigError, LaunchError, SaguaroError
from saguaro.frontend.openai.app import create_app
from saguaro.frontend.openai.server import Server
from saguaro.frontend.openai.settings import Settings

_log = logging.getLogger("saguaro")
_LAST_WORDS_S = 2.0  # for the errors that end what the grace period did not suffice for


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 stopped in good order, 1 an error said in one paragraph, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s saguaro: %(message)s", level=logging.WARNING)
    _log.setLevel(os.environ.get("SAGUARO_LOG_LEVEL", "INFO"))
    try:
        settings = Settings(
            triton=arguments.triton,
            socket=arguments.socket,
            engine=arguments.engine,
            model=arguments.model,
            keys=read_keys(arguments.api_key_file) if arguments.api_key_file else (),
            max_body_bytes=arguments.max_body_bytes,
            max_concurrent=arguments.max_concurrent,
            deadline_s=arguments.deadline,
        )
        _serve(settings, arguments.host, arguments.port, arguments.grace)
    except SaguaroError as error:
        _log.error("%s", error)
        return 1
    return 0


def read_keys(path: Path) -> tuple[str, ...]:
    """One key per line; empty lines and lines that begin with # are none. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the file of API keys cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path}: has no API key: write one per line, or leave the file out to ask for none")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(f"{path}: an API key must be of printable ASCII characters without spaces")
    return keys


def _serve(settings: Settings, host: str, port: int, grace_s: float) -> None:
    app = create_app(settings)  # reads the engine's manifest, and says so if it cannot
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) or 1,
        lifespan="on",
    )
    try:
        Server(config, grace_s).run()
    except SystemExit as error:  # uvicorn's way to say that it cannot listen; its log has the reason
        raise LaunchError(f"the OpenAI front end cannot listen on {host}:{port}: choose another openai_port") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m saguaro.frontend.openai", description=__doc__)
    parser.add_argument("--triton", required=True, metavar="HOST:PORT", help="Triton's gRPC")
    parser.add_argument("--socket", required=True, type=Path, metavar="PATH", help="the service's socket")
    parser.add_argument("--engine", required=True, type=Path, metavar="DIR", help="the target's engine directory")
    parser.add_argument("--model", required=True, metavar="NAME", help="what clients call the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one (default 8080)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="one key per line; without it none is asked")
    parser.add_argument("--max-body-bytes", type=int, default=4 * 2**20, metavar="N", help="default 4 MiB")
    parser.add_argument("--max-concurrent", type=int, default=256, metavar="N", help="requests at a time (default 256)")
    parser.add_argument("--deadline", type=float, default=3600.0, metavar="S", help="for an answer (default 3600)")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="to finish on SIGTERM (default 30)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
