"""One contract for every channel, and what only real MPI jobs show: a peer that is killed, and what stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saguaro.errors import LinkError
from saguaro.orchestrator.channels import Channel
from saguaro.orchestrator.channels.inproc import inproc_pair

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))

# The far side of an MPI channel: obeys one-word messages.
PEER = """
import sys, time
from pathlib import Path
from saguaro.orchestrator.channels import mpi
mpi.remove_shared_memory()
channel = mpi.connect(Path(sys.argv[1]), 30)
while True:
    data = channel.receive(0.5)
    if data == b"die":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    elif data == b"close":
        channel.close()
        mpi.leave(0)
    elif data is not None:
        channel.send(data)
"""

# The near side runs the contract, since a rank has to be started by mpiexec to be one.
HOST = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_channels
from saguaro.orchestrator.channels import mpi
mpi.remove_shared_memory()
listener = mpi.Listener(Path(sys.argv[1]))
channel = None
while channel is None:
    channel = listener.poll()
try:
    getattr(test_channels, sys.argv[3])(channel, channel.close if sys.argv[3] == "check_close" else None)
except BaseException:
    import traceback
    traceback.print_exc()
    mpi.leave(1)
channel.close()
mpi.leave(0)
"""


def check_echo(channel: Channel, _: object) -> None:
    """Order, sizes from nothing to megabytes, and many messages under way at once."""
    messages = [b"", b"x", bytes(range(256)) * 40, os.urandom(3 * 2**20), *(str(i).encode() for i in range(40))]
    for message in messages:
        channel.send(message)
    assert [channel.receive(20) for _ in messages] == messages
    assert channel.receive(0) is None


def check_deadline(channel: Channel, _: object) -> None:
    begin = time.monotonic()
    assert channel.receive(0.2) is None
    assert time.monotonic() - begin >= 0.2
    channel.send(b"still usable")
    assert channel.receive(20) == b"still usable"


def check_peer_gone(channel: Channel, _: object) -> None:
    """Killed or closed: a receive with a long deadline ends soon, with the reason."""
    channel.send(b"die")
    begin = time.monotonic()
    with pytest.raises(LinkError):
        channel.receive(60)
    assert time.monotonic() - begin < 30
    with pytest.raises(LinkError):
        channel.send(b"anyone?")
    channel.close()
    channel.close()


def _echo(channel: Channel) -> None:
    while True:
        try:
            data = channel.receive(0.5)
        except LinkError:
            return
        if data == b"die":
            channel.close()
            return
        if data is not None:
            channel.send(data)


CHECKS: list[Callable[[Channel, object], None]] = [check_echo, check_deadline, check_peer_gone]


@pytest.mark.parametrize("check", CHECKS)
def test_inproc(check: Callable[[Channel, object], None]) -> None:
    near, far = inproc_pair()
    thread = threading.Thread(target=_echo, args=(far,))
    thread.start()
    check(near, None)
    near.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for job in started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize("check", CHECKS)
def test_mpi(check: Callable[[Channel, object], None], tmp_path: Path, jobs: list[subprocess.Popen[bytes]]) -> None:
    before = set(os.listdir("/dev/shm"))
    log = (tmp_path / "log").open("wb")
    for code, *arguments in ((HOST, str(Path(__file__).parent), check.__name__), (PEER,)):
        jobs.append(
            subprocess.Popen(
                [MPIEXEC, "-n", "1", sys.executable, "-c", code, str(tmp_path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
    assert jobs[0].wait(60) == 0, (tmp_path / "log").read_text()
    log.close()
    os.killpg(jobs[1].pid, signal.SIGTERM)
    jobs[1].wait(10)
    # MPI's shared-memory files are gone even though no rank called MPI_Finalize and one may have been killed.
    assert {name for name in os.listdir("/dev/shm") if name.startswith("mpich")} <= before


def test_a_speculator_without_a_verifier_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from saguaro.orchestrator.channels import mpi\n"
        "mpi.remove_shared_memory()\n"
        "try: mpi.connect(Path(sys.argv[1]), 0.2)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "mpi.leave(0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("LinkError no target group opened a port")
