"""The one command, `saguaro`: its parser, its exit status and its signals. What each sub-command does: commands/."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from saguaro import __version__
from saguaro.commands import (
    bench,
    build,
    chat,
    doctor,
    generate,
    load,
    models,
    serve,
    simulate,
    status,
    stop,
    top,
    tune,
)
from saguaro.errors import SaguaroError

_log = logging.getLogger("saguaro")
# As `saguaro --help` lists them.
_COMMANDS = (models, build, generate, chat, serve, status, load, stop, top, bench, doctor, tune, simulate)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error said in one paragraph, 2 wrong usage, 130 Ctrl-C."""
    arguments = _parser().parse_args(argv)
    level = logging.DEBUG if arguments.verbose else os.environ.get("SAGUARO_LOG_LEVEL", "WARNING")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    _log.setLevel(level)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code: int | None = arguments.run(arguments)
    except SaguaroError as error:
        print(f"saguaro: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away; say nothing more
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return code or 0


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saguaro", description="Speculative speculative decoding: faster, with the target's exact output."
    )
    parser.add_argument("--version", action="version", version=f"saguaro {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
