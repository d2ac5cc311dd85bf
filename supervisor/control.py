"""What `saguaro status` and `stop` do: from outside, with nothing but the state a supervisor keeps."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from saguaro.errors import ConfigError, LaunchError
from saguaro.supervisor import janitor
from saguaro.supervisor.state import RunState, StateFolder, known_deployments

_STOP_PARTS = 60.0  # seconds that stopping the processes may take after the grace period


def _choose(name: str | None) -> StateFolder:
    """The deployment that is meant. Raises ConfigError when none is known by that name, or several are without one."""
    known = known_deployments()
    if name is None:
        if len(known) != 1:
            raise ConfigError(
                f"{len(known)} deployments are served here ({', '.join(known)}): name one"
                if known
                else "no deployment is served here: start one with `saguaro serve DEPLOYMENT`"
            )
        name = known[0]
    if name not in known:
        raise ConfigError(
            f"no deployment named {name!r} is served here; served: {', '.join(known) or 'none'}. "
            f"Start one with `saguaro serve DEPLOYMENT`"
        )
    return StateFolder(name)


def status(name: str | None) -> RunState:
    """What is known of a deployment now. Its status is `dead` when its supervisor was killed."""
    state = _choose(name).read()
    if state is None:
        raise ConfigError("the deployment has just been stopped")
    if not state.alive:
        return replace(state, status="dead")
    return state


def describe(state: RunState) -> str:
    """A few lines for people."""
    mode = f"{state.mode} ({state.mode_reason})" if state.mode_reason else state.mode or "-"
    lines = [
        f"{state.name}: {state.status}, mode {mode}, process {state.pid}, up {_duration(time.time() - state.since)}",
        *(
            f"  {name:10} {part.state:10} {f'pid {part.pid}' if part.pid else '':12} restarts {part.restarts}"
            f"{'  ' + part.detail if part.detail else ''}"
            for name, part in state.parts.items()
        ),
        *(f"  {what:14} {address}" for what, address in state.addresses.items()),
    ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 24 * 3600), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def stop(name: str | None, *, now: bool) -> str:
    """Tell a deployment to stop and wait until it is gone; its name. Raises LaunchError when it does not go in time."""
    folder = _choose(name)
    state = folder.read()
    if state is None:
        return folder.name
    if not state.alive:
        with folder.locked():
            janitor.clean(state)
            folder.clear()
        return folder.name
    os.kill(state.pid, signal.SIGTERM)
    if now:
        time.sleep(0.2)  # two signals of a kind at once would be one
        os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + (0 if now else state.grace_s) + _STOP_PARTS
    while state.alive:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{state.name} (process {state.pid}) did not stop in time: `saguaro stop --now {state.name}` hurries "
                "it; after `kill -9` its remains are taken away by themselves"
            )
        time.sleep(0.1)
    return folder.name
