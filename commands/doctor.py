"""`saguaro doctor`: look at this machine, and at whether a deployment can run on it."""

from __future__ import annotations

import argparse
import json

from saguaro.commands.options import Subparsers, command, store


def add(commands: Subparsers) -> None:
    doctor = command(
        commands,
        "doctor",
        run,
        "look at this machine, and at whether a deployment can run on it",
        "saguaro doctor tiny",
    )
    doctor.add_argument("deployment", nargs="?", metavar="DEPLOYMENT", help="a .yaml file or a shipped name")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from saguaro.doctor.diagnosis import diagnose

    report = diagnose(arguments.deployment, store(arguments))
    print(json.dumps(report.as_json()) if arguments.json else report.as_text())
    return 0 if report.can_run else 1
