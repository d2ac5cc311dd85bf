"""How a command is added to the parser, and the options that all of them share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

NAME_HELP = "the deployment's `name:`; may be left out when only one is served"


def command(
    commands: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
    example: str,
    *parents: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """Add a command that does `run`, which returns the exit status; None is 0."""
    sub = commands.add_parser(
        name, help=text, description=text, epilog=f"example: {example}", parents=[common(), *parents]
    )
    sub.set_defaults(run=run)
    return sub


@cache
def common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--store", metavar="DIR", help="where models and engines are kept (default: the user's cache)")
    parser.add_argument("--verbose", action="store_true", help="log everything, the ranks' own output included")
    return parser


def store(arguments: argparse.Namespace) -> Path:
    from saguaro.cache import cache_folder

    return Path(arguments.store) if arguments.store else cache_folder()
