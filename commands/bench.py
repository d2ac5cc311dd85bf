"""`saguaro bench`: measure ar, sd and ssd of a deployment side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from saguaro.commands.options import Subparsers, command, store


def add(commands: Subparsers) -> None:
    bench = command(
        commands,
        "bench",
        run,
        "measure ar, sd and ssd of a deployment side by side",
        "saguaro bench qwen-coder-int4-cpu --sd-lookahead 2 4 6 8 --temperature 0 1",
    )
    bench.add_argument(
        "deployment", nargs="?", default="qwen-coder-int4-cpu", metavar="DEPLOYMENT", help="name or .yaml file"
    )
    bench.add_argument("--modes", nargs="+", default=["ar", "sd", "ssd"], choices=("ar", "sd", "ssd"))
    bench.add_argument(
        "--sd-lookahead",
        nargs="*",
        type=int,
        default=[],
        metavar="K",
        help="sd takes the fastest (default: that of ssd)",
    )
    bench.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="prompts at once (default 1)")
    bench.add_argument("--temperature", nargs="+", type=float, default=[0.0], metavar="T", help="0 is greedy (default)")
    bench.add_argument(
        "--placement",
        nargs="+",
        default=["own"],
        choices=("own", "all", "both"),
        help="own: each model on cores of its own (default); all: both on all cores; both: either",
    )
    bench.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    bench.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of each answer (default 96)")
    bench.add_argument("--repeats", type=int, default=3, metavar="N", help="batches of each kind of prompt (default 3)")
    bench.add_argument("--quick", action="store_true", help="one short answer of each kind: is everything in order?")
    bench.add_argument(
        "--out", default="bench-results", metavar="DIR", help="for bench.json and plots (default %(default)s)"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.bench.speed_command import bench

    bench(
        arguments.deployment,
        store(arguments),
        out=Path(arguments.out),
        prompts=Path(arguments.prompts) if arguments.prompts else None,
        as_json=arguments.json,
        quick=arguments.quick,
        modes=arguments.modes,
        sd_lookaheads=arguments.sd_lookahead,
        batches=arguments.batch,
        temperatures=arguments.temperature,
        placements=["own", "all"] if "both" in arguments.placement else arguments.placement,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
    )
