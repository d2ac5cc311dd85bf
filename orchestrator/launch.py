"""Starts the two MPI jobs of a deployment, watches them, and leaves nothing behind.

Each group is an `mpiexec` of its own, so that a dead draft never takes the target down. Ranks notice through their
standard input when this process is gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from saguaro.engines.manifest import compare_token_maps
from saguaro.errors import LaunchError, LinkError
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.plan import LaunchPlan, service_socket

_log = logging.getLogger(__name__)
_TAIL = 30  # lines kept of a group's output, to explain its death
_STOP_TIMEOUT = 15.0  # seconds a group gets to leave in good order
_LONGEST_SOCKET = 107  # bytes of a UNIX socket's path
_MPI_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "HYDRA_", "MPI_LOCAL")


def _mpiexec() -> str:
    """Beside the interpreter first: the MPI that came with this environment is the one mpi4py loads."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError(
            "no MPI was found (no `mpiexec` beside the interpreter or on PATH): install one with "
            "`pip install 'saguaro-serving[mpi]'`, or load your cluster's MPI module"
        )
    return found


class _Group:
    """One MPI job."""

    def __init__(self, role: str, runtime: Path, threads: int) -> None:
        self.role = role
        self.tail: deque[str] = deque(maxlen=_TAIL)
        # A rank must not mistake itself for part of an MPI job that this process may belong to.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)}
        environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [_mpiexec(), "-n", "1", sys.executable, "-m", "saguaro.orchestrator.rank", role, str(runtime)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process; it stops the groups in order
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, deadline: float) -> None:
        """Wait until `deadline`, then end it: first its mpiexec, which ends the ranks, then whatever is left."""
        for timeout, number in ((deadline - time.monotonic(), signal.SIGTERM), (3.0, signal.SIGKILL), (3.0, None)):
            try:
                self.process.wait(max(0.0, timeout))
                break
            except subprocess.TimeoutExpired:
                if number is not None:
                    os.killpg(self.process.pid, number)
        self.reader.join(3.0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        """Pass warnings and errors on; keep the rest in case the group dies."""
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            level, separator, text = line.partition(" saguaro: ")
            known = logging.getLevelNamesMapping().get(level) if separator else None
            _log.log(known or logging.DEBUG, "[%s] %s", self.role, text if known else line)

    def describe_death(self) -> str:
        errors = [line.partition(" saguaro: ")[2] for line in self.tail if line.startswith("ERROR saguaro: ")]
        what = errors[-1] if errors else " | ".join(line for line in list(self.tail)[-6:] if line) or "it said nothing"
        return f"the {self.role} group ended with status {self.process.returncode}: {what}"


class Launcher:
    """A running deployment, as a context manager. `client` speaks to its service.

    Raises LaunchError naming the group that does not start, LaunchError from `check` when the target group is gone.
    """

    client: Client

    def __init__(self, config: DeploymentConfig, target_engine: Path, draft_engine: Path | None) -> None:
        if draft_engine is not None:
            compare_token_maps(target_engine, draft_engine)
        else:
            config = replace(config, draft=None)
        self._config = config
        self._engines = (target_engine, draft_engine)
        self._groups: list[_Group] = []
        self._draft_gone = False

    def __enter__(self) -> Launcher:
        self.runtime = Path(tempfile.mkdtemp(prefix="saguaro-"))
        try:
            socket = service_socket(self.runtime)
            if len(os.fsencode(socket)) > _LONGEST_SOCKET:
                raise LaunchError(
                    f"the path of the service's socket, {socket}, is longer than the {_LONGEST_SOCKET} bytes a socket "
                    "may have: set TMPDIR to a shorter folder"
                )
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raises LaunchError when the target group is gone; a draft that is gone is only worth a warning."""
        for group in self._groups:
            if group.alive:
                continue
            if group.role == "target":
                raise LaunchError(group.describe_death())
            if not self._draft_gone:
                self._draft_gone = True
                _log.warning("%s; decoding goes on without speculation", group.describe_death())

    def stop(self) -> None:
        """End every process and remove the runtime directory. Calling it twice is harmless."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        if hasattr(self, "client"):
            if any(group.alive for group in self._groups):
                self.client.shutdown()
            self.client.close()
            del self.client
        else:
            deadline = time.monotonic()  # never got to serve: there is nothing to finish
        for group in self._groups:
            group.stop(deadline)
        self._groups.clear()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def _start(self) -> None:
        config, (target_engine, draft_engine) = self._config, self._engines
        cores = sorted(os.sched_getaffinity(0))
        target_cores = config.target.cores or tuple(cores[: config.target.threads])
        free = [core for core in cores if core not in target_cores] or cores
        draft_cores = (config.draft.cores or tuple(free[: config.draft.threads])) if config.draft else ()
        for name, wanted in (("target", target_cores), ("draft", draft_cores)):
            if not set(wanted) <= set(cores):
                raise LaunchError(f"{name}.cores is {list(wanted)}, but this process may only use {cores}")
        plan = LaunchPlan(
            config,
            str(target_engine.resolve()),
            str(draft_engine.resolve()) if draft_engine else None,
            target_cores,
            draft_cores,
            deployment=secrets.randbits(64),
        )
        plan.write(self.runtime)
        self._groups.append(_Group("target", self.runtime, config.target.threads))
        if config.draft:
            self._groups.append(_Group("draft", self.runtime, config.draft.threads))
        client = Client(service_socket(self.runtime), self._check_all)
        try:
            self._wait_until_ready(client)
        except BaseException:
            client.close()
            raise
        self.client = Client(service_socket(self.runtime), self.check)
        client.close()

    def _check_all(self) -> None:
        """While starting, a group that ends is an error whichever it is."""
        for group in self._groups:
            if not group.alive:
                group.reader.join(1.0)
                raise LaunchError(group.describe_death())

    def _wait_until_ready(self, client: Client) -> None:
        deadline = time.monotonic() + self._config.serving.start_timeout_s
        waiting_for = "target"
        while time.monotonic() < deadline:
            try:
                status = client.status(max(0.1, deadline - time.monotonic()))
            except LinkError:
                break
            if status.health == "ok":
                return
            waiting_for = "draft"
            self._check_all()
            time.sleep(0.05)
        raise LaunchError(
            f"the {waiting_for} group was not ready within {self._config.serving.start_timeout_s} s: raise "
            "serving.start_timeout_s in the deployment, or look at its log with --verbose"
        )
