"""`saguaro tune`: measure a pair on this machine and these prompts, and recommend a speculation section."""

from __future__ import annotations

import argparse
from pathlib import Path

from saguaro.commands.options import Subparsers, command, store


def add(commands: Subparsers) -> None:
    tuning = command(
        commands,
        "tune",
        run,
        "measure a pair on this machine and these prompts, and recommend a speculation section",
        "saguaro tune qwen-coder-int4-cpu --prompts mine.txt --plot tune.png --write speculation.yaml",
    )
    tuning.add_argument("deployment", help="a .yaml file or a shipped name")
    tuning.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    tuning.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="of the requests (default 0 1)"
    )
    tuning.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default 96)")
    tuning.add_argument("--seconds", type=float, metavar="S", help="about how long to measure (default 600)")
    tuning.add_argument("--quick", action="store_true", help="about a minute: fewer prompts, tokens and settings")
    tuning.add_argument("--write", metavar="FILE", help="put the recommended section there, too")
    tuning.add_argument("--plot", metavar="FILE", help="draw what was found into a .png, .svg or .pdf")
    tuning.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.bench.tune_command import plan_of, run

    run(
        arguments.deployment,
        store(arguments),
        plan_of(
            Path(arguments.prompts) if arguments.prompts else None,
            arguments.temperature,
            arguments.max_tokens,
            arguments.seconds,
            arguments.quick,
        ),
        plot_file=Path(arguments.plot) if arguments.plot else None,
        write=Path(arguments.write) if arguments.write else None,
        as_json=arguments.json,
    )
