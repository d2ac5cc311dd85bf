"""Runs the steps of a plan: a process each, into a folder that appears under its own name when the step has succeeded.

So a step that was finished once is not repeated, in this build or in another one that needs the same folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Final

from rich.console import Console

from saguaro.build.plan import Step
from saguaro.errors import EngineError

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0  # between two looks at a running step
_SAY_S: Final = 60.0  # between two log lines where there is no terminal
_SHOWN: Final = 12  # last lines of a failed step's log

# What a log or exit status says to those who know it.
_HINTS: Final = (
    ("out of memory", "A GPU ran out of memory: is another process using it?"),
    ("couldn't find the dataset", "The calibration data was not found: trtllm.calibration takes a local folder too."),
    ("connectionerror", "The calibration data was not found: trtllm.calibration takes a local folder too."),
)


def run_step(step: Step, variables: Mapping[str, str], folder: Path, log_file: Path) -> None:
    """Make `folder` by running the step, unless it is there. `variables` are those of the command but $`step.makes`.

    Raises EngineError when the program is missing, fails or takes too long, with the end of its log.
    """
    if folder.exists():
        log.info("%s: %s is there already", step.name, folder)
        return
    aside = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [Template(word).substitute({**variables, step.makes: str(aside)}) for word in step.command]
    started = time.monotonic()
    log.info("%s, up to %.0f min; its output goes to %s", step.name, step.timeout_s / 60, log_file)
    try:
        status = _run(step, command, log_file)
        seconds = time.monotonic() - started
        if status is None:
            raise EngineError(
                f"the step {step.name} did not end within {step.timeout_s:.0f} s and was stopped. {_end(log_file)}"
            )
        if status != 0:
            raise EngineError(
                f"the step {step.name} failed ({_how(status)}) after {seconds:.0f} s. {_end(log_file, status)}"
            )
        aside.replace(folder)
    except BaseException:
        shutil.rmtree(aside)
        raise
    log.info("%s took %.0f s", step.name, seconds)


def _run(step: Step, command: list[str], log_file: Path) -> int | None:
    with log_file.open("w", encoding="utf-8") as output, _shown(step.name, log_file) as show:
        output.write(f"{' '.join(command)}\n")
        output.flush()
        if shutil.which(command[0]) is None:
            raise EngineError(
                f"{command[0]} is not installed here, which the step {step.name} runs. Build in NVIDIA's image."
            )
        return _wait(command, output.fileno(), step.timeout_s, show)


def _wait(command: list[str], output: int, limit: float, show: Callable[[], None]) -> int | None:
    """Exit status, or None when the limit passed. Nothing of the process is left, whatever happens."""
    # A session of its own: the programs start workers, which are to end with them. An interrupt can come before Popen
    # has told which process it started: the shell then reads an end of file and ends. It becomes the program when told.
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'read go && exec "$@" < /dev/null', "sh", *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + limit
    try:
        with process.stdin as go:  # type: ignore[union-attr]
            go.write(b"\n")
        while True:
            try:
                return process.wait(timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    return None
                show()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _shown(name: str, log_file: Path) -> Iterator[Callable[[], None]]:
    """Shows the last line of a running step on a terminal, and now and then in the log elsewhere."""
    console = Console(stderr=True)
    started = said = time.monotonic()

    def text() -> str:
        return f"{name}, {time.monotonic() - started:.0f} s: {(_tail(log_file, 1) or [''])[0][:100]}"

    if console.is_terminal:
        with console.status(name) as status:
            # The line is not ours: no markup in it.
            yield lambda: status.update(text().replace("[", r"\["))
        return

    def say() -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_S:
            said = time.monotonic()
            log.info("%s", text())

    yield say


def _tail(log_file: Path, lines: int) -> list[str]:
    with log_file.open("rb") as file:
        file.seek(max(0, os.path.getsize(log_file) - 64_000))
        text = file.read().decode(errors="replace")
    # Progress bars overwrite their line.
    written = [line.rpartition("\r")[2].strip() for line in text.replace("\r\n", "\n").splitlines()]
    return [line for line in written if line][-lines:]


def _how(status: int) -> str:
    if status > 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"


def _end(log_file: Path, status: int = 0) -> str:
    tail = _tail(log_file, _SHOWN)
    said = "\n".join(tail).lower()
    hints = list(dict.fromkeys(hint for pattern, hint in _HINTS if pattern in said))
    if status == -signal.SIGKILL:
        hints.append("The system may have run out of main memory: `saguaro build --dry-run` says what is needed.")
    ending = "".join(f"\n  {line}" for line in tail)
    return " ".join([*hints, f"The end of {log_file}:"]) + ending
