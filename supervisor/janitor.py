"""Takes away what a killed supervisor leaves behind: `python -m saguaro.supervisor.janitor NAME`.

It runs beside the supervisor and sleeps on a pipe that only the supervisor holds open. A supervisor that leaves in good
order has removed its state by then. If the janitor is killed too, the next start of the deployment does its work.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from saguaro.errors import LaunchError
from saguaro.orchestrator import remains
from saguaro.supervisor.state import RunState, StateFolder

MARK = "SAGUARO_RUN"  # environment variable of all processes of a run
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PATIENCE = 3.0  # seconds the ranks get to leave by themselves
_KILL_TIMEOUT = 10.0
_SHARED_MEMORY = Path("/dev/shm")


def start(name: str) -> subprocess.Popen[bytes]:
    """A janitor for the supervisor that this process is. It goes when its standard input is closed."""
    command = [sys.executable, "-m", "saguaro.supervisor.janitor", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def clean(state: RunState) -> list[int]:
    """End every process of a run whose supervisor is dead and remove its files. Returns what had to be killed."""
    deadline = time.monotonic() + _PATIENCE
    while _ranks(state.run) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed = []
    deadline = time.monotonic() + _KILL_TIMEOUT
    while (processes := _processes(state.run)) and time.monotonic() < deadline:
        for process in processes:
            with suppress(*_GONE):
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(int(process.name))
        time.sleep(0.05)
    for region in _SHARED_MEMORY.glob(f"{Path(state.folder).name}-*"):  # Triton's
        region.unlink(missing_ok=True)
    remains.remove_shared_memory(state.since)
    shutil.rmtree(state.folder, ignore_errors=True)
    return killed


def _ranks(run: str) -> list[Path]:
    return [process for process in _processes(run) if b"saguaro.orchestrator.rank" in _read(process / "cmdline")]


def _processes(run: str) -> list[Path]:
    """Those that carry the mark of a run, this one apart."""
    mark = f"{MARK}={run}".encode()
    return [
        process
        for process in Path("/proc").glob("[0-9]*")
        if int(process.name) != os.getpid() and mark in _read(process / "environ").split(b"\0")
    ]


def _read(path: Path) -> bytes:
    with suppress(*_GONE):
        return path.read_bytes()
    return b""


def main() -> None:
    folder = StateFolder(sys.argv[1])
    sys.stdin.buffer.read()
    # A process that dies closes its files first.
    deadline = time.monotonic() + 2
    while (state := folder.read()) and state.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    if state is None or state.alive:
        return
    with suppress(LaunchError), folder.locked():  # else a new supervisor has it, and cleans before it starts
        state = folder.read()
        if state and state.run == os.environ.get(MARK):
            clean(state)
            folder.clear()


if __name__ == "__main__":
    main()
