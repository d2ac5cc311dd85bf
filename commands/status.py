"""`saguaro status`: parts, health and addresses of a served deployment."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from saguaro.commands.options import NAME_HELP, Subparsers, command


def add(commands: Subparsers) -> None:
    status = command(
        commands, "status", run, "parts, health and addresses of a served deployment", "saguaro status --json"
    )
    status.add_argument("name", nargs="?", metavar="NAME", help=NAME_HELP)
    status.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.supervisor.control import describe, status

    state = status(arguments.name)
    print(json.dumps(asdict(state)) if arguments.json else describe(state))
