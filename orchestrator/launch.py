"""Starts the two MPI jobs of a deployment, watches them, and leaves nothing behind.

Each group is an `mpiexec` of its own, so that a dead draft never takes the target down. Ranks notice through their
standard input when this process is gone. In a group of several ranks, the one that goes first takes the others along;
each holds a pipe open as long as it lives, so that the first can be named.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
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

from saguaro.engines.manifest import Manifest, compare_token_maps
from saguaro.errors import LaunchError, LinkError
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig, ModelConfig
from saguaro.orchestrator.plan import GroupPlan, LaunchPlan, service_socket, sign_of_life

_log = logging.getLogger(__name__)
_TAIL = 30  # lines kept of a group's output, to explain its death
_WATCH_MS = 1000  # milliseconds between two looks at whether a group that never came to life has ended
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

    def __init__(self, role: str, runtime: Path, plan: GroupPlan) -> None:
        self.role = role
        self._ranks = plan.ranks
        self.tail: deque[str] = deque(maxlen=_TAIL)
        # A rank must not mistake itself for part of an MPI job that this process may belong to.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)}
        environment |= {"OMP_NUM_THREADS": str(plan.model.threads), "PYTHONUNBUFFERED": "1"}
        # The ranks of a group share this machine: what they say to each other stays on it.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ranks = ["-n", str(plan.ranks), sys.executable, "-m", "saguaro.orchestrator.rank"]
        command = [_mpiexec(), *ranks, role, str(runtime)]
        pipes = self._open_pipes(runtime)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process; it stops the groups in order
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self._first_gone: list[int] = []  # more than one only if they went at the same moment
        self._watcher = threading.Thread(target=self._watch, args=(pipes,), daemon=True)
        self._watcher.start()

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
        self._watcher.join(3.0)
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

    def _open_pipes(self, runtime: Path) -> dict[int, int]:
        """Reading ends of the ranks' signs of life, and whose each is."""
        pipes = {}
        for rank in range(self._ranks):
            path = sign_of_life(runtime, self.role, rank)
            os.mkfifo(path)
            pipes[os.open(path, os.O_RDONLY | os.O_NONBLOCK)] = rank
        return pipes

    def _watch(self, pipes: dict[int, int]) -> None:
        """Note which rank is the first to go."""
        poll = select.poll()
        for pipe in pipes:
            poll.register(pipe, 0)  # of the end of the writer, nothing else; a rank yet to come is no end
        while not self._first_gone and self.alive:
            self._first_gone = sorted(pipes[pipe] for pipe, _ in poll.poll(_WATCH_MS))
        for pipe in pipes:
            os.close(pipe)

    def describe_death(self) -> str:
        self.reader.join(1.0)
        self._watcher.join(1.0)
        errors = [line.partition(" saguaro: ")[2] for line in self.tail if line.startswith("ERROR saguaro: ")]
        what = f"the {self.role} group ended with status {self.process.returncode}"
        if self._ranks > 1 and self._first_gone:
            what += f" after its rank {' or '.join(map(str, self._first_gone))} died"
            # The others' errors are that they lost it.
            errors = [error for error in errors if error.startswith(tuple(f"rank {n}: " for n in self._first_gone))]
        said = errors[-1] if errors else " | ".join(line for line in list(self.tail)[-6:] if line) or "it said nothing"
        return f"{what}: {said}"


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
        cores = sorted(os.sched_getaffinity(0))
        target_engine, draft_engine = self._engines
        groups = {"target": _plan(self._config.target, target_engine, cores)}
        if self._config.draft and draft_engine:
            free = [core for core in cores if core not in groups["target"].cores] or cores
            groups["draft"] = _plan(self._config.draft, draft_engine, free)
        for name, group in groups.items():
            if not set(group.cores) <= set(cores):
                raise LaunchError(f"{name}.cores is {list(group.cores)}, but this process may only use {cores}")
        LaunchPlan(self._config, groups, deployment=secrets.randbits(64)).write(self.runtime)
        for name, group in groups.items():
            self._groups.append(_Group(name, self.runtime, group))
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


def _plan(model: ModelConfig, engine: Path, free: list[int]) -> GroupPlan:
    ranks = Manifest.load(engine).tp
    return GroupPlan(model, str(engine.resolve()), ranks, model.cores or tuple(free[: model.threads * ranks]))
