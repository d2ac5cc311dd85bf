"""Runs tritonserver over a model repository, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from saguaro.errors import LaunchError

_log = logging.getLogger(__name__)
_TAIL, _TOLD = 40, 4  # lines kept of the server's output, and those told of to explain its death
_EXIT_TIMEOUT = 10  # seconds the server gives its requests when it is told to stop
_LOOK = 0.05  # seconds between two looks at whether it is ready
_ANSWER_TIMEOUT = 10.0  # seconds for the answer to a health check
_STUB = "triton_python_backend_stub"
_LONGEST_NAME = 15  # characters of a process's name that Linux keeps
# Errors that a machine without a GPU always gets, and that mean nothing.
_HARMLESS = ("CudaDriverHelper has not been initialized", "unable to create stream for ensemble")
_PR_SET_PDEATHSIG = 1
_STACK = 2**28  # bytes of address space for each thread's stack
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class TritonServer:
    """One tritonserver process and its stubs. `folder` is for its own files, and is made if missing.

    The executable is the one on PATH (a container's), else that of the installed nvidia-pytriton. A port of 0 takes a
    free one; `http_port`, `grpc_port` and `metrics_port` are the real ones. Names of its shared memory begin with
    `prefix`, which no other server may have. Models see this interpreter's packages.
    Raises LaunchError when the server cannot be started here.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str,
        http_port: int,
        grpc_port: int,
        metrics_port: int,
        folder: Path,
        prefix: str | None = None,
    ) -> None:
        self.host = host
        self._host = "127.0.0.1" if host in ("0.0.0.0", "") else host  # where this machine reaches it
        self.http_port, self.grpc_port, self.metrics_port = (
            port or _free_port(host) for port in (http_port, grpc_port, metrics_port)
        )
        self._repository = repository
        self._folder = folder
        # Of its shared memory, and on its stubs' command lines.
        self._prefix = prefix or f"saguaro-triton-{secrets.token_hex(4)}-"
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._errors: deque[str] = deque(maxlen=_TAIL)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the running server. Raises LaunchError before `start`."""
        return self._started().pid

    async def start(self) -> None:
        """Start the process; `until_ready` waits for its models."""
        self._folder.mkdir(parents=True, exist_ok=True)
        executable, options, environment = _installation(self._folder)
        self._process = await asyncio.create_subprocess_exec(
            executable,
            f"--model-repository={self._repository}",
            *options,
            *(f"--{part}-address={self.host}" for part in ("http", "grpc", "metrics")),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            f"--exit-timeout-secs={_EXIT_TIMEOUT}",
            "--disable-auto-complete-config",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            "--log-format=ISO8601",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process; it stops the server in order
            preexec_fn=_prepare_process,
            limit=2**20,  # bytes of a line
        )
        self._reader = asyncio.create_task(self._read())

    async def until_ready(self, timeout: float) -> None:
        """Wait until every model can answer. Raises LaunchError when the server ends before, or the time has passed."""
        deadline = time.monotonic() + timeout
        while (trouble := await self.trouble()) is not None:
            if self._started().returncode is not None:
                raise LaunchError(trouble)
            if time.monotonic() > deadline:
                raise LaunchError(f"tritonserver was not ready within {timeout:g} s ({trouble}): {self.last_words()}")
            await asyncio.sleep(_LOOK)

    async def healthy(self) -> bool:
        """Whether requests can be answered: see `trouble`."""
        return await self.trouble() is None

    async def trouble(self) -> str | None:
        """What keeps the server from answering, in a sentence; None when it is well.

        Triton itself goes on reporting ready when a model's stub has died, and never starts it again. So its children
        are looked at, and the two models that can be asked something harmless are asked.
        """
        if death := await self.death():
            return death
        try:
            await asyncio.to_thread(self._ask)
        except (OSError, ValueError) as error:
            return f"tritonserver does not answer on port {self.http_port}: {error}"
        return None

    async def death(self) -> str | None:
        """How the server or one of its stubs has ended, in a sentence; None while all are there. Asks nobody."""
        process = self._started()
        if process.returncode is not None:
            if self._reader:
                await asyncio.wait([self._reader], timeout=1.0)  # its last words may still be under way
            return f"tritonserver ended with status {process.returncode}: {self.last_words()}"
        # Not any child: while models load, Triton runs shells that have ended before it takes note of it.
        if (_STUB[:_LONGEST_NAME], "Z") in _children(process.pid):
            return "a model's process of tritonserver has died"
        return None

    async def stop(self, grace: float = _EXIT_TIMEOUT + 5.0) -> None:
        """End the server, in order if it can within `grace` seconds, and whatever it leaves behind.

        Harmless when done twice. With a dead stub it never can.
        """
        process = self._process
        if process is None:
            return
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            if process.returncode is None and patience > 0:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
                deadline = time.monotonic() + patience
                # Not `process.wait`: that waits for stubs too, which may outlive the server and hold its output open.
                while process.returncode is None and time.monotonic() < deadline:
                    await asyncio.sleep(_LOOK)
        self._clear()
        if self._reader:
            await asyncio.wait([self._reader], timeout=3.0)
            self._reader.cancel()

    def _ask(self) -> None:
        """The server's own word, then an answer of preprocessing and of ssd. Raises OSError or ValueError."""
        base = f"http://{self._host}:{self.http_port}/v2"
        stop = json.dumps({"id": self._prefix, "stop": True}).encode()
        for path, body in (
            ("health/ready", None),
            ("models/preprocessing/generate", b'{"text_input": "a"}'),
            ("models/ssd/generate_stream", stop),
        ):
            with urllib.request.urlopen(f"{base}/{path}", body, timeout=_ANSWER_TIMEOUT) as answer:
                answer.read()

    async def _read(self) -> None:
        """Pass warnings and errors on; keep the rest in case the server dies."""
        output = self._started().stdout
        if output is None:
            return
        while raw := await output.readline():
            line = raw.decode(errors="replace").rstrip()
            if not line or any(phrase in line for phrase in _HARMLESS):
                continue
            level = _level(line)
            (self._errors if level >= logging.ERROR else self._tail).append(line)
            _log.log(level, "[triton] %s", line)

    def _clear(self) -> None:
        """Kill stubs that outlived the server, and unlink shared memory that it has not."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(*_GONE):
                if self._prefix.encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
        for region in Path("/dev/shm").glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise LaunchError("tritonserver has not been started")
        return self._process

    def last_words(self) -> str:
        """What it said last, errors rather than anything else."""
        return " | ".join(list(self._errors or self._tail)[-_TOLD:]) or "it said nothing"


def _installation(folder: Path) -> tuple[str, list[str], dict[str, str]]:
    """The executable, options and environment of the tritonserver to be used. Raises LaunchError without one."""
    environment = dict(os.environ)
    # A model's process finds its packages through the first python3 on PATH: this interpreter's.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["OMP_NUM_THREADS"] = "1"  # a process per model, and the cores are for the engines
    if found := shutil.which("tritonserver"):
        return found, [], environment
    spec = find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise LaunchError(
            "no Triton server was found (no `tritonserver` on PATH, no nvidia-pytriton installed): install it with "
            "`pip install 'saguaro-serving[serve]'` (x86-64 Linux), or run in a Triton container"
        )
    package = Path(spec.submodule_search_locations[0])
    home = package / "tritonserver"
    libraries = [sysconfig.get_config_var("LIBDIR"), str(package.parent / "nvidia_pytriton.libs")]
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [*libraries, environment.get("LD_LIBRARY_PATH")]))
    backends = _lay_out_backend(home, folder / "backends")
    _check_stub(backends / "python" / _STUB, environment)
    options = [f"--backend-directory={backends}", f"--cache-directory={home / 'caches'}"]
    return str(home / "bin" / "tritonserver"), options, environment


def _lay_out_backend(home: Path, backends: Path) -> Path:
    """The Python backend with the stub for this Python, which has to lie beside it."""
    python = backends / "python"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        raise LaunchError(f"nvidia-pytriton has no stub for Python {version}: use Python 3.11 or 3.12")
    python.mkdir(parents=True, exist_ok=True)
    for file in (stub, *(home / "backends" / "python").glob("*.*")):
        shutil.copy(file, python)
    (python / _STUB).chmod(0o755)
    return backends


def _check_stub(stub: Path, environment: dict[str, str]) -> None:
    """A stub that misses a library would make the server wait for it for ever; started without arguments it says so."""
    done = subprocess.run([stub], env=environment, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 1:
        raise LaunchError(f"Triton's Python stub does not start here (status {done.returncode}): {done.stderr.strip()}")


def _children(pid: int) -> Iterator[tuple[str, str]]:
    """Name and state of each child of a process."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(*_GONE):
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if int(parent) == pid:
                yield name, state


def _level(line: str) -> int:
    """Of a line of the server's log (after the time stamp a letter), or of one of ours in a model's process."""
    level = {"W": logging.WARNING, "E": logging.ERROR}.get("".join(line.split(" ", 2)[1:2]))
    known = logging.getLevelNamesMapping().get(line.partition(" saguaro: ")[0])
    return level or known or logging.DEBUG


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _prepare_process() -> None:
    """In the child, before it becomes the server: be told to end when the thread that started it is gone.

    And have threads with large stacks: with the usual 8 MiB, an HTTP body of 6 MB overflows one in Triton 24.10, which
    then crashes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _, limit = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK if limit == resource.RLIM_INFINITY else min(_STACK, limit)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, limit))
