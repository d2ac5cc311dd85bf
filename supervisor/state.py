"""What is known of a running deployment outside its processes: one folder per name, with a lock and `state.json`.

The folders lie in the user's state folder ($XDG_STATE_HOME, or ~/.local/state), apart for each machine, because a home
may be shared by several.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from saguaro.errors import ConfigError, LaunchError

_CLEANING = 20.0  # seconds that taking away the remains of a dead supervisor may take
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class PartState:
    """`state`: starting, ready, unready, restarting, failed, stopped; of the draft also away."""

    state: str
    pid: int | None = None
    restarts: int = 0
    detail: str = ""  # why it is not ready


@dataclass(frozen=True)
class RunState:
    """One run of a deployment. `status` is starting, ok, degraded, down or draining."""

    name: str
    deployment: str  # the YAML file
    pid: int  # of the supervisor
    pid_started: int  # in ticks since the machine started: a process id alone may be somebody else's by now
    run: str  # a mark that all its processes carry in their environment
    since: float  # seconds of the epoch
    folder: str  # of everything temporary
    grace_s: float  # how long running requests may take to finish when it is told to stop
    status: str = "starting"
    mode: str | None = None  # what new requests get: ar, sd or ssd
    mode_reason: str | None = None  # and why
    parts: dict[str, PartState] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)  # by what is served there

    @property
    def alive(self) -> bool:
        """Whether its supervisor runs."""
        return process_start(self.pid) == self.pid_started


def process_start(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def state_home() -> Path:
    """The folder of this machine's deployments."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state") / "saguaro" / socket.gethostname()


class StateFolder:
    """The folder of one deployment name. Raises ConfigError for a name that cannot be a folder's."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name is {name!r}, but a deployment that is served needs a name of at most 64 letters, digits, "
                "dots, dashes and underscores, beginning with a letter or digit: change `name:` in its file"
            )
        self.name = name
        self.path = state_home() / name
        self._file = self.path / "state.json"

    @property
    def log(self) -> Path:
        """Where a detached deployment logs to unless told otherwise."""
        return self.path / "serve.log"

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise LaunchError(
                f"the state of deployment {self.name} cannot be kept in {self.path} ({error.strerror}): set "
                "XDG_STATE_HOME to a folder that can be written"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises LaunchError while another supervisor serves this name."""
        self.make()
        with (self.path / "lock").open("w") as lock:
            deadline = time.monotonic() + _CLEANING
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                state = self.read()
                if (state and state.alive) or time.monotonic() > deadline:
                    where = f" (process {state.pid})" if state and state.alive else ""
                    raise LaunchError(
                        f"deployment {self.name} is served already{where}: stop it with `saguaro stop {self.name}`, or "
                        "give this one another `name:`"
                    )
                time.sleep(0.1)  # its supervisor is dead: what holds the lock is about to end
            yield

    def read(self) -> RunState | None:
        """None if nothing is known; also of a state that another release wrote."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=RunState)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None

    def write(self, state: RunState) -> None:
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(state))
        new.replace(self._file)  # whoever reads sees the old or the new one, never half of it

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)


def known_deployments() -> list[str]:
    """Names with a state: running, or left by a supervisor that was killed."""
    with suppress(FileNotFoundError):
        return sorted(path.parent.name for path in state_home().glob("*/state.json"))
    return []
