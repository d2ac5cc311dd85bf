"""A child process whose output goes to the log, line by line, with its part's name before it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from saguaro.errors import LaunchError

_log = logging.getLogger(__name__)
_TAIL = 30  # lines kept, to explain its end
_SHOWN = 6  # of those, in an error
_LONGEST_LINE = 2**16  # bytes
_LAST_WORDS = 1.0  # seconds to wait for what a dead process had written
_KILL_TIMEOUT = 5.0
_LOOK = 0.02  # seconds between two looks at whether it has ended


class Child:
    """To be started, watched and stopped within one event loop. It leads a session of its own: Ctrl-C is not for it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL)

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def last_lines(self) -> str:
        return " | ".join([line for line in self._tail if line][-_SHOWN:]) or "none"

    async def start(self) -> None:
        """Raises LaunchError when the command cannot be run."""
        self._tail.clear()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        except OSError as error:
            raise LaunchError(f"{self.name} cannot be started: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process))

    async def end(self) -> str | None:
        """How it ended, with its last lines; None while it runs."""
        if self._process is None:
            return f"{self.name} is not started"
        if self._process.returncode is None:
            return None
        if self._reader:
            await asyncio.wait([self._reader], timeout=_LAST_WORDS)
        status = self._process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}; its last lines: {self.last_lines}"

    async def stop(self, grace: float) -> None:
        """Ask it to end, wait `grace` seconds, then kill it and all it has started. Harmless when done twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if grace > 0:
            with suppress(ProcessLookupError):
                process.terminate()
            deadline = time.monotonic() + grace
            # Not `process.wait`: that waits for its children too, which may outlive it and hold its output open.
            while process.returncode is None and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the whole session: also what the process has left behind
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _KILL_TIMEOUT)
        if self._reader:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            return
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:  # a line longer than the limit: the reader has dropped what it had of it
                raw = b"(a line too long to show)\n"
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            _log.info("[%s] %s", self.name, line)
