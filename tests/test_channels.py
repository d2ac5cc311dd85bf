"""One contract for every channel, and what only real MPI jobs show: a peer that is killed, and what stays behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saguaro.errors import LinkError
from saguaro.orchestrator.channels import Channel, unix
from saguaro.orchestrator.channels.bell import Bell
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


# The far side of a channel over a socket, in a process that can be killed.
UNIX_PEER = PEER.replace("import mpi", "import unix as mpi")
UNIX_PEER = UNIX_PEER.replace("mpi.remove_shared_memory()", "").replace("mpi.leave(0)", "break")


@pytest.mark.parametrize("check", CHECKS)
def test_unix(check: Callable[[Channel, object], None], tmp_path: Path) -> None:
    listener = unix.Listener(tmp_path)
    assert listener.poll() is None
    with subprocess.Popen([sys.executable, "-c", UNIX_PEER, str(tmp_path)]) as peer:
        deadline = time.monotonic() + 60
        while (channel := listener.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        listener._socket.close()
        assert channel is not None
        check(channel, None)
        channel.close()
        peer.kill()


def test_a_unix_peer_that_takes_nothing_is_gone_and_one_that_announces_too_much_refused(tmp_path: Path) -> None:
    near, far = (unix.UnixChannel(end) for end in socket.socketpair())
    with pytest.raises(LinkError, match="has not taken the last 64 messages"):
        [near.send(bytes(2**18)) for _ in range(100)]  # type: ignore[func-returns-value]
    with pytest.raises(LinkError, match="the channel is closed"):
        near.receive(1)
    far.close()
    one, other = socket.socketpair()
    channel = unix.UnixChannel(one)
    other.sendall((2**40).to_bytes(8, "little"))
    with pytest.raises(LinkError, match=f"announces a message of {2**40} bytes"):
        channel.receive(5)
    other.close()
    with pytest.raises(LinkError, match="no target group opened a socket"):
        unix.connect(tmp_path, 0.05)


def test_a_message_larger_than_the_kernel_takes_reaches_a_peer_while_the_sender_does_something_else() -> None:
    near, far = (unix.UnixChannel(end) for end in socket.socketpair())
    message = os.urandom(5 * 2**20)
    near.send(message)
    assert far.receive(20) == message  # nobody calls anything on the near end meanwhile
    near.send(b"last words")
    near.close()
    assert far.receive(20) == b"last words"  # what was sent before the end is not lost
    with pytest.raises(LinkError):
        far.receive(20)


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


def test_a_bell_rings_at_whoever_is_there(tmp_path: Path) -> None:
    near = Bell(tmp_path / "near", tmp_path / "far")
    near.ring()  # at nobody yet
    bells = [near]
    for _ in range(2):  # the second one takes the place of the first
        far = Bell(tmp_path / "far", tmp_path / "near")
        bells.append(far)
        assert not far.wait(0)
        near.ring()
        assert far.wait(5)
        far.ring()
        assert near.wait(5)
    for _ in range(1000):  # nobody listens, and no ring waits for room
        near.ring()
    assert far.wait(5)
    assert not far.wait(0)
    near.ring()
    assert far.wait(5)
    for bell in bells:
        bell._socket.close()


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
