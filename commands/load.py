"""`saguaro load`: load a served deployment with perf_analyzer."""

from __future__ import annotations

import argparse
from pathlib import Path

from saguaro.commands.options import NAME_HELP, Subparsers, command, store


def add(commands: Subparsers) -> None:
    load = command(
        commands, "load", run, "load a served deployment with perf_analyzer", "saguaro load tiny --concurrency 1 2 4 8"
    )
    load.add_argument("name", nargs="?", metavar="NAME", help=NAME_HELP)
    load.add_argument("--modes", nargs="+", default=[], choices=("ar", "sd", "ssd"), help="default: all it can do")
    load.add_argument(
        "--routes",
        nargs="+",
        default=["ensemble-grpc"],
        choices=("ensemble-grpc", "ensemble-http", "ssd-grpc"),
        help="past which parts (default ensemble-grpc)",
    )
    load.add_argument("--concurrency", nargs="*", type=int, default=[1, 2, 4], metavar="N", help="requests in flight")
    load.add_argument("--rate", nargs="*", type=float, default=[], metavar="R", help="Poisson arrivals per second")
    load.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    load.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    load.add_argument(
        "--window", type=int, default=10, metavar="N", help="requests in each of a level's 3 windows (10)"
    )
    load.add_argument(
        "--out", default="load-results", metavar="DIR", help="for load.json, .csv and .png (default %(default)s)"
    )
    load.add_argument("--json", action="store_true", help="print one JSON array instead of a table")


def run(arguments: argparse.Namespace) -> None:
    from saguaro.bench.load_command import load

    load(
        arguments.name,
        store(arguments),
        out=Path(arguments.out),
        prompts=Path(arguments.prompts) if arguments.prompts else None,
        as_json=arguments.json,
        modes=arguments.modes,
        routes=arguments.routes,
        concurrencies=arguments.concurrency,
        rates=arguments.rate,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        window=arguments.window,
    )
