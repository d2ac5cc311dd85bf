"""`saguaro simulate`: what other settings would bring, by the analytic model; nothing is run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from saguaro.commands.options import Subparsers, command


def add(commands: Subparsers) -> None:
    planning = command(
        commands,
        "simulate",
        run,
        "what lookahead, fan-out, batch size and more draft devices would bring, by the analytic model; nothing is run",
        "saguaro simulate --acceptance 0.8 --draft-step 0.1 --lookahead 4 --budget 8 --batch 1 --plot plan.png",
    )
    for name, kind, default, text in (
        ("acceptance", float, 0.8, "probability that a draft token is accepted"),
        ("draft-step", float, 0.1, "one forward of the draft over one row, in verifications of the target"),
        ("row-cost", float, 0.03, "what a further row of that forward costs, as a share of it"),
        ("miss-scale", float, 0.4, "c: share of bonus tokens that the best guess misses; F guesses miss c F^-r"),
        ("miss-exponent", float, 0.6, "r"),
        ("fast-acceptance", float, 0.0, "acceptance of the tokens of a backup that costs nothing"),
        ("lookahead", int, 4, "draft tokens per speculation"),
        ("budget", int, 8, "branches that one draft device prepares for a sequence"),
        ("batch", int, 1, "sequences decoded together"),
        ("devices", int, 1, "draft devices, each with outcomes of its own"),
    ):
        planning.add_argument(f"--{name}", type=kind, default=default, metavar="X", help=f"{text} (default {default})")
    planning.add_argument("--json", action="store_true", help="print one JSON object")
    planning.add_argument("--plot", metavar="FILE", help="draw the four sweeps into a .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from saguaro import simulate

    pair = simulate.Pair(
        arguments.acceptance,
        arguments.draft_step,
        arguments.row_cost,
        arguments.miss_scale,
        arguments.miss_exponent,
        arguments.fast_acceptance,
    )
    setting = simulate.Setting(arguments.lookahead, arguments.budget, arguments.batch, arguments.devices)
    found = simulate.sweeps(pair, setting)
    if arguments.plot is not None:
        simulate.plot(found, setting, Path(arguments.plot))
    if arguments.json:
        print(json.dumps(simulate.as_json(pair, setting, found)))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(simulate.table(found, setting))
