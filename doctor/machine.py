"""Everything a deployment needs of a machine but GPUs: packages, MPI, memory, cores, limits, ports, disk."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import saguaro
from saguaro.doctor.report import Check, size
from saguaro.engines.kv_pool import available_memory
from saguaro.errors import SaguaroError
from saguaro.orchestrator.config import ServingConfig
from saguaro.orchestrator.mpi_command import Mpi, find_mpi
from saguaro.plugins.cpp import find_compiler
from saguaro.supervisor.ports import PORTS, port_problem

# Bytes of shared memory: Triton's Python backend takes 1 MB for each of three models and grows by what is in flight, a
# rank of MPICH 1 MB, one of Open MPI 16 MB. NCCL exchanges through it what cannot go from GPU to GPU.
SHARED_CPU = 64 << 20
SHARED_GPU = 1 << 30
_FILES = 4096  # descriptors: a socket per client, pipes and shared memory of the parts
_STORE = 5 << 30  # bytes: a small pair with its engines
_PAIR_TIMEOUT = 30.0  # seconds that two jobs may take to meet

# Each side of the two jobs that are tried; as in a deployment, one listens and the other connects.
_PAIR = """
import sys, time
from pathlib import Path
from saguaro.orchestrator.channels import mpi
mpi.remove_shared_memory()
folder = Path(sys.argv[2])
if sys.argv[1] == "draft":
    channel = mpi.connect(folder, 20)
    channel.send(b"hello")
    channel.receive(10)
else:
    listener, channel = mpi.Listener(folder), None
    while channel is None:
        channel = listener.poll()
        time.sleep(0.01)
    if channel.receive(20) != b"hello":
        mpi.leave(1)
    channel.send(b"bye")
channel.close()
mpi.leave(0)
"""
_LIBRARY = """
from saguaro.orchestrator.channels import mpi
mpi.remove_shared_memory()
print("library:", mpi.library(), flush=True)
mpi.leave(0)
"""


def packages() -> list[Check]:
    """Versions of what is installed. Whether a deployment needs what is missing is not known here."""
    checks = [Check("saguaro", "ok", f"{saguaro.__version__}, Python {platform.python_version()}")]
    for name, remedy in (
        ("torch", "install the build for your device"),
        ("mpi4py", "pip install mpi4py"),
        ("tensorrt_llm", "for TensorRT-LLM targets: use NVIDIA's Triton image (docs/deployment/containers.md)"),
        ("tensorrt", "for TensorRT drafts: use NVIDIA's Triton image (docs/deployment/containers.md)"),
    ):
        found = installed(name)
        checks.append(Check(name, "ok" if found else "warning", found or "not installed", "" if found else remedy))
    checks += [_compiler(), _triton()]
    return checks


def installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _compiler() -> Check:
    if found := find_compiler():
        return Check("C++ compiler", "ok", shlex.join(found))
    return Check(
        "C++ compiler", "warning", "not found", "for dtypes int8 and int4: apt-get install g++, or name one in $CXX"
    )


def _triton() -> Check:
    if found := shutil.which("tritonserver"):
        return Check("Triton server", "ok", found)
    if found := installed("nvidia-pytriton"):
        return Check("Triton server", "ok", f"of the wheel nvidia-pytriton {found}")
    return Check("Triton server", "warning", "not found", "to serve: pip install 'saguaro-serving[serve]'")


def mpi(find: Callable[[], Mpi] = find_mpi) -> list[Check]:
    """Which MPI starts the ranks, which one they load, and whether two jobs of it can be joined: tried, not guessed."""
    try:
        found = find()
    except SaguaroError as error:
        return [Check("mpiexec", "problem", str(error))]
    checks = [Check("mpiexec", "ok", f"{found.flavour} {found.version} ({found.mpiexec})")]
    vendor = {"mpich": "MPICH", "openmpi": "Open MPI"}[found.flavour]
    try:
        loaded = _library(found)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        if lines and lines[0].startswith(_MPIEXEC_SAYS):  # it has not come to the rank, and begins with the reason
            return [Check("mpiexec", "problem", f"{found.mpiexec} cannot start a rank: {lines[0]}")]
        return [*checks, Check("mpi4py", "problem", f"a rank cannot load it: {''.join(lines[-1:])}", _REINSTALL)]
    if not loaded.startswith(vendor):
        return [*checks, Check("mpi4py", "problem", f"loads {loaded}, which that mpiexec does not start", _REINSTALL)]
    checks.append(Check("mpi4py", "ok", f"loads {loaded}"))
    if found.join == "unix":
        return [*checks, Check("joining two jobs", "ok", "by a UNIX socket, as Open MPI needs a name server for it")]
    return [*checks, _joins(found)]


_MPIEXEC_SAYS = ("[mpiexec@", "[proxy:")  # MPICH's
_REINSTALL = (
    "install mpi4py for the MPI whose mpiexec is used (pip install --force-reinstall --no-binary mpi4py mpi4py)"
)


def _command(found: Mpi, *program: str) -> list[str]:
    return found.command(1, [sys.executable, "-c", *program], root=os.geteuid() == 0)


def _library(found: Mpi) -> str:
    done = subprocess.run(
        _command(found, _LIBRARY),
        capture_output=True,
        text=True,
        timeout=_PAIR_TIMEOUT,
        env=found.environment(os.environ),
        stdin=subprocess.DEVNULL,
    )
    # MPI's own warnings go there as well, and its status says nothing: no rank calls MPI_Finalize.
    for line in done.stdout.splitlines():
        if line.startswith("library: "):
            return line.removeprefix("library: ")
    raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)


def _joins(found: Mpi) -> Check:
    with tempfile.TemporaryDirectory(prefix="saguaro-doctor-") as folder, _jobs(found, folder) as jobs:
        try:
            statuses = [job.wait(_PAIR_TIMEOUT) for job in jobs]
        except subprocess.TimeoutExpired:
            statuses = [1]
    if any(statuses):
        return Check(
            "joining two jobs",
            "problem",
            "MPI_Comm_connect and accept between two mpiexec do not work",
            "install another MPI: pip install 'saguaro-serving[mpi]'",
        )
    return Check("joining two jobs", "ok", "MPI_Comm_connect and accept work between two mpiexec")


@contextmanager
def _jobs(found: Mpi, folder: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    jobs = [
        subprocess.Popen(
            _command(found, _PAIR, role, folder),
            env=found.environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for role in ("target", "draft")
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                job.terminate()  # mpiexec ends its rank
            job.wait()


def system(*, gpus: bool) -> list[Check]:
    """Memory, cores and limits; with `gpus`, what a deployment on GPUs needs of them."""
    memory = available_memory(torch.device("cpu"))
    return [
        Check("memory", "ok", f"{size(memory)} can be taken"),
        _cores(),
        _shared(Path("/dev/shm"), SHARED_GPU if gpus else SHARED_CPU),
        _files(),
        *([_locked()] if gpus else []),
    ]


def _cores() -> Check:
    mine = sorted(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    text = f"{len(mine)} of {os.cpu_count()} cores may be used, {nodes} NUMA node{'s' * (nodes > 1)}"
    if len(mine) < 2:
        return Check("cores", "warning", text, "target and draft take turns on one core: speculation cannot pay")
    return Check("cores", "ok", text)


def _shared(folder: Path, needed: int) -> Check:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Check("shared memory", "problem", f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}")
    text = f"{size(usage.free)} free of {size(usage.total)} in {folder}, {size(needed)} needed"
    if usage.free >= needed:
        return Check("shared memory", "ok", text)
    remedy = (
        f"start the container with --shm-size={'2g' if needed > SHARED_CPU else '256m'}, or remove what is left there"
    )
    return Check("shared memory", "problem", text, remedy)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} may be open (at most {hard} on request)"
    if soft >= _FILES:
        return Check("open files", "ok", text)
    return Check("open files", "warning", text, f"for many clients: ulimit -n {_FILES}, or LimitNOFILE= in the unit")


def _locked() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    return Check(
        "locked memory",
        "warning",
        f"{size(soft)} may be locked",
        "NCCL and UCX pin their buffers: --ulimit memlock=-1, or LimitMEMLOCK=infinity in the unit",
    )


def ports(serving: ServingConfig) -> list[Check]:
    """Whether each port of a deployment is free."""
    checks = []
    for key in PORTS:
        port = getattr(serving, key)
        problem = port_problem(serving, key)
        found = problem or (f"{port} is free" if port else "any free port")
        checks.append(Check(f"serving.{key}", "problem" if problem else "ok", found))
    used: Sequence[int] = [port for key in PORTS if (port := getattr(serving, key))]
    if len(set(used)) < len(used):
        checks.append(Check("ports", "problem", "two are the same", "give each part a port of its own"))
    return checks


def store(folder: Path) -> Check:
    """Whether models and engines can be kept there."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return Check("store", "problem", f"{folder} cannot be written", "choose another with --store")
    free = shutil.disk_usage(existing).free
    text = f"{size(free)} free under {folder}"
    if free >= _STORE:
        return Check("store", "ok", text)
    return Check("store", "warning", text, f"a pair with its engines takes {size(_STORE)} and more: free some space")
