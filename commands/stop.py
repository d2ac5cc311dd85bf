"""`saguaro stop`: stop a served deployment."""

from __future__ import annotations

import argparse

from saguaro.commands.options import NAME_HELP, Subparsers, command


def add(commands: Subparsers) -> None:
    stop = command(
        commands, "stop", run, "stop a served deployment when its requests are finished", "saguaro stop tiny"
    )
    stop.add_argument("name", nargs="?", metavar="NAME", help=NAME_HELP)
    stop.add_argument("--now", action="store_true", help="end running requests instead of waiting for them")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.supervisor.control import stop

    print(f"stopped {stop(arguments.name, now=arguments.now)}")
