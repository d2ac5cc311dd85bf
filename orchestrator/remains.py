"""What a group of ranks can leave behind when it is killed while MPI starts, and its removal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = ("mpich_shm_*", "vader_segment.*", "sm_segment.*")  # of MPICH, and of Open MPI 4 and 5
_SETTLED = 0.2  # seconds; far longer than a starting rank takes from making its segment to mapping it


def kill_ranks(ending: list[bytes]) -> None:
    """Kill the processes whose command line ends like this: their mpiexec could not pass its own end on."""
    for process in _processes():
        with suppress(*_GONE):
            if (process / "cmdline").read_bytes().split(b"\0")[-len(ending) :] == ending:
                os.kill(int(process.name), signal.SIGKILL)


def remove_shared_memory(since: float) -> None:
    """Unlink MPI's segments of this user made after `since` (seconds of the epoch) that no process has mapped.

    A rank unlinks its segment right after start-up (`channels.mpi`), unless it is killed before that. A segment that is
    found unmapped twice belongs to nobody: another job's rank maps its own as soon as it has made it.
    """
    found = _unmapped(since)
    if found:
        time.sleep(_SETTLED)
        for segment in found & _unmapped(since):
            segment.unlink(missing_ok=True)


def _unmapped(since: float) -> set[Path]:
    segments = set()
    for path in (path for pattern in _SEGMENTS for path in _SHARED_MEMORY.glob(pattern)):
        with suppress(*_GONE):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                segments.add(path)
    for process in _processes() if segments else ():
        with suppress(*_GONE):
            maps = (process / "maps").read_text()
            segments = {segment for segment in segments if str(segment) not in maps}
    return segments


def _processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")
