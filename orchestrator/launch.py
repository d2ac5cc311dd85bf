"""Starts the MPI jobs of a deployment, watches them, and leaves nothing behind.

The target and each replica of the draft are an `mpiexec` of their own, so that a dead draft takes nobody along. Ranks
notice through their standard input when this process is gone. In a group of several ranks, the one that goes first
takes the others along; each holds a pipe open as long as it lives, so that the first can be named.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
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
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from saguaro.engines.manifest import Manifest, check_target, compare_token_maps
from saguaro.errors import LaunchError, LinkError, SaguaroError
from saguaro.orchestrator import remains
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig, ModelConfig
from saguaro.orchestrator.mpi_command import Mpi, find_mpi
from saguaro.orchestrator.nvml import read_node
from saguaro.orchestrator.placement import Demand, place, replica_of
from saguaro.orchestrator.plan import (
    GroupPlan,
    LaunchPlan,
    draft_roles,
    rendezvous,
    service_socket,
    sign_of_life,
)
from saguaro.orchestrator.restarts import Restarts

_log = logging.getLogger(__name__)
_TAIL = 60  # lines kept of a group's output, to explain its death
_WATCH_MS = 1000  # milliseconds between two looks at whether a group that never came to life has ended
_STOP_TIMEOUT = 15.0  # seconds a group gets to leave in good order
# What MPICH's mpiexec says of every death: true, and no help. Open MPI's puts it between two lines of dashes.
_MPIEXEC_PHRASES = ("=", "YOUR APPLICATION TERMINATED", "This typically refers", "Please see the FAQ")
_MPIEXEC_PAGE = re.compile(r"^-{40,}$.*?^-{40,}$", re.DOTALL | re.MULTILINE)
_LONGEST_SOCKET = 107  # bytes of a UNIX socket's path


class _Group:
    """One MPI job."""

    def __init__(self, role: str, runtime: Path, plan: GroupPlan, mpi: Mpi) -> None:
        self.role = role
        self._ranks = plan.ranks
        self.tail: deque[str] = deque(maxlen=_TAIL)
        environment = mpi.environment(os.environ) | plan.environment | {"PYTHONUNBUFFERED": "1"}
        # The ranks of a group share this machine: what they say to each other stays on it.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, "lo")
        rank = ["-m", "saguaro.orchestrator.rank", role, str(runtime)]
        self._ending = [*(word.encode() for word in rank), b""]  # of the command lines of its processes
        self._started = time.time() - 1.0  # what is older is not of this group; clocks of file systems are coarse
        command = mpi.command(plan.ranks, [sys.executable, *rank], root=os.geteuid() == 0)
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

    def kill(self) -> None:
        """End it at once; `stop` then has nothing to wait for."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """Wait until `deadline`, then end it: first its mpiexec, which ends the ranks, then whatever is left."""
        for timeout, number in ((deadline - time.monotonic(), signal.SIGTERM), (3.0, signal.SIGKILL), (3.0, None)):
            try:
                self.process.wait(max(0.0, timeout))
                break
            except subprocess.TimeoutExpired:
                if number is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(self.process.pid, number)
        remains.kill_ranks(self._ending)
        remains.remove_shared_memory(self._started)
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
        rendezvous(runtime, self.role).unlink(missing_ok=True)  # of the group in whose place this one is started
        for rank in range(self._ranks):
            path = sign_of_life(runtime, self.role, rank)
            path.unlink(missing_ok=True)
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
        self.reader.join(1.0)  # its last words may still be under way
        self._watcher.join(1.0)
        errors = [line.partition(" saguaro: ")[2] for line in self.tail if line.startswith("ERROR saguaro: ")]
        what = f"the {self.role} group ended with status {self.process.returncode}"
        if self._ranks > 1 and self._first_gone:
            what += f" after its rank {' or '.join(map(str, self._first_gone))} died"
            # The others' errors are that they lost it.
            errors = [error for error in errors if error.startswith(tuple(f"rank {n}: " for n in self._first_gone))]
        lines = _MPIEXEC_PAGE.sub("", "\n".join(self.tail)).splitlines()
        said = [line for line in lines if line and not line.startswith(("ERROR saguaro: ", *_MPIEXEC_PHRASES))]
        if not said:  # then mpiexec itself may have said why
            said = [line for line in self.tail if line.strip("-=")]
        return f"{what}: {errors[-1] if errors else ' | '.join(said[-6:]) or 'it said nothing'}"


class Launcher:
    """A running deployment, as an asynchronous context manager. `client` speaks to its service.

    A group that dies is started again, a few times and with growing pauses: the draft on its own, a target rank with
    the whole deployment. Raises LaunchError naming the group that does not start; `check` raises it when the target
    group is gone for good. `on_ready` is told the role of each group as soon as it can work. The runtime directory is a
    new one in `folder`, else in the folder for temporary files.
    """

    client: Client

    def __init__(
        self,
        config: DeploymentConfig,
        target_engine: Path,
        draft_engine: Path | None,
        *,
        on_ready: Callable[[str], None] = lambda role: None,
        folder: Path | None = None,
    ) -> None:
        check_target(target_engine)
        if draft_engine is not None:
            compare_token_maps(target_engine, draft_engine)
        else:
            config = replace(config, draft=None)
        self._config = config
        self._plans = plan_groups(config, target_engine, draft_engine)
        self._on_ready = on_ready
        self._folder = folder
        self._groups: dict[str, _Group] = {}
        self._restarts = {role: Restarts(config.serving.max_restarts) for role in self._plans}
        self._failure: LaunchError | None = None

    async def __aenter__(self) -> Launcher:
        self._mpi = find_mpi()
        self.runtime = Path(tempfile.mkdtemp(prefix="saguaro-", dir=self._folder))
        self._stack = AsyncExitStack()
        self._stack.callback(shutil.rmtree, self.runtime, ignore_errors=True)
        self._stack.push_async_callback(self._stop_groups, _STOP_TIMEOUT)
        try:
            self._start_groups()
            await self._until_ready()
            self.client = Client(service_socket(self.runtime), self.check)
            self._stack.push_async_callback(self.client.close)
            self._stack.push_async_callback(self._shutdown)
            watch = asyncio.create_task(self._watch())
            self._stack.callback(watch.cancel)
        except BaseException:
            for group in self._groups.values():
                group.kill()  # it never got to serve: there is nothing to finish
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def drafts(self) -> list[str]:
        """The roles of the draft's replicas, in order."""
        return [role for role in self._plans if role != "target"]

    @property
    def restarts(self) -> dict[str, int]:
        """How often each group was started again, by role."""
        return {role: restarts.total for role, restarts in self._restarts.items()}

    def pid(self, role: str) -> int | None:
        """The process id of a group's mpiexec; None while the group is away."""
        group = self._groups.get(role)
        return group.process.pid if group and group.alive else None

    def check(self) -> None:
        """Raises LaunchError when the target group is gone for good."""
        if self._failure:
            raise self._failure

    async def _shutdown(self) -> None:
        with suppress(SaguaroError):  # it is gone already
            await self.client.shutdown()

    async def _stop_groups(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for group in self._groups.values():
            await asyncio.to_thread(group.stop, deadline)

    def _start_groups(self) -> None:
        """Both groups, with a runtime directory that holds nothing of earlier ones."""
        socket = service_socket(self.runtime)
        if len(os.fsencode(socket)) > _LONGEST_SOCKET:
            raise LaunchError(
                f"the path of the service's socket, {socket}, is longer than the {_LONGEST_SOCKET} bytes a socket may "
                "have: set TMPDIR to a shorter folder"
            )
        for leftover in self.runtime.iterdir():
            leftover.unlink()
        plan = LaunchPlan(
            self._config, self._plans, self._mpi.join, deployment=secrets.randbits(64), launcher=os.getpid()
        )
        plan.write(self.runtime)
        for role, group in self._plans.items():
            self._groups[role] = _Group(role, self.runtime, group, self._mpi)
            self._restarts[role].started()

    async def _watch(self) -> None:
        """Start again what has died."""
        while self._failure is None:
            await asyncio.sleep(0.1)
            role = next((role for role, group in self._groups.items() if not group.alive), None)
            if role is None:
                continue
            death = self._groups[role].describe_death()
            pause = self._restarts[role].take()
            if pause is None:
                if role == "target":
                    self._failure = LaunchError(death)
                else:
                    _log.warning("%s; decoding goes on without speculation for good", death)
                    await asyncio.to_thread(self._groups.pop(role).stop, 0.0)
                continue
            _log.warning("%s; it is started again in %.0f s", death, pause)
            await asyncio.sleep(pause)
            try:
                if role == "target":
                    await self._stop_groups(0)
                    self._start_groups()
                else:
                    await asyncio.to_thread(self._groups[role].stop, 0.0)
                    self._groups[role] = _Group(role, self.runtime, self._plans[role], self._mpi)
                    self._restarts[role].started()
            except (LaunchError, OSError) as error:
                self._failure = LaunchError(f"the {role} group cannot be started again: {error}")

    async def _until_ready(self) -> None:
        """Raises LaunchError when a group ends, or is not ready in time: while starting, each of them is needed."""

        def check() -> None:
            for group in self._groups.values():
                if not group.alive:
                    raise LaunchError(group.describe_death())

        timeout = self._config.serving.start_timeout_s
        deadline = time.monotonic() + timeout
        waiting_for = "target"
        client = Client(service_socket(self.runtime), check)
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(LinkError):
                    health = (await client.status(left)).health
                    if waiting_for == "target":
                        self._on_ready("target")
                        waiting_for = next(iter(self.drafts), "target")
                    if health == "ok":
                        for role in self.drafts:
                            self._on_ready(role)
                        return
                    check()
                    await asyncio.sleep(0.05)
        finally:
            await client.close()
        said = [line for line in self._groups[waiting_for].tail if line]
        raise LaunchError(
            f"the {waiting_for} group was not ready within {timeout} s: raise serving.start_timeout_s in the "
            f"deployment, or look at its log with --verbose. Its last lines: {' | '.join(said[-6:]) or 'none'}"
        )


def plan_groups(config: DeploymentConfig, target: Path, draft: Path | None) -> dict[str, GroupPlan]:
    """Ranks, GPUs and cores of each group on this machine. Raises LaunchError."""
    demands = {"target": _demand(config.target, target)}
    if config.draft and draft:
        whole = _demand(config.draft, draft)
        if config.speculation.from_text_alone:
            whole = replace(whole, tp=1)  # its model is not loaded
        for replica, role in enumerate(draft_roles(config.draft.replicas)):
            demands[role] = replace(whole, model=replica_of(config.draft, replica))
    node = read_node() if any(demand.on_gpus for demand in demands.values()) else None
    return place(demands, sorted(os.sched_getaffinity(0)), node, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _demand(model: ModelConfig, engine: Path) -> Demand:
    manifest = Manifest.load(engine)
    return Demand(model, manifest.engine, manifest.tp, str(engine.resolve()))
