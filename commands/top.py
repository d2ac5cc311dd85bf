"""`saguaro top`: watch a served deployment."""

from __future__ import annotations

import argparse
import math

from saguaro.commands.options import NAME_HELP, Subparsers, command


def add(commands: Subparsers) -> None:
    top = command(commands, "top", run, "watch a served deployment", "saguaro top")
    top.add_argument("name", nargs="?", metavar="NAME", help=NAME_HELP + ", or its .yaml file")
    top.add_argument("--url", metavar="URL", help="of a deployment elsewhere: its monitor, http://HOST:8003")
    top.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks (default 2)"
    )
    top.add_argument("--once", action="store_true", help="one frame, of one interval")
    top.add_argument("--json", action="store_true", help="one frame, as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.frontend.top import top

    url = arguments.url or _monitor(arguments.name)
    top(url, interval=arguments.interval, once=arguments.once, as_json=arguments.json)


def _monitor(name: str | None) -> str:
    """Where the monitor of a deployment that is served on this machine is to be found; a file stands for its name."""
    from saguaro.orchestrator.config import find_deployment, read_deployment
    from saguaro.supervisor.control import status

    if name and name.endswith((".yaml", ".yml")):
        name = read_deployment(find_deployment(name)).name
    return status(name).addresses["health"].removesuffix("/health")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.01 and 3600 seconds, got {text!r}")
    return value
