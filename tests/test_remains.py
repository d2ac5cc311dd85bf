"""What is removed after a killed group, and what must not be."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saguaro.orchestrator.remains import kill_ranks, remove_shared_memory


@pytest.fixture(params=["mpich_shm_{}_0", "sm_segment.host.0.{}.0", "vader_segment.host.0.{}.0"])
def segment(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path("/dev/shm") / request.param.format(f"test{os.getpid()}")
    path.write_bytes(b"\0" * 4096)
    yield path
    path.unlink(missing_ok=True)


def test_a_segment_that_nobody_has_mapped_is_removed(segment: Path) -> None:
    remove_shared_memory(time.time() - 5)
    assert not segment.exists()


def test_a_segment_that_is_in_use_or_older_is_left_alone(segment: Path) -> None:
    remove_shared_memory(time.time() + 5)  # older than the group
    assert segment.exists()
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        remove_shared_memory(time.time() - 5)
    assert segment.exists()


def test_ranks_are_found_by_the_end_of_their_command_line() -> None:
    code = "import time; time.sleep(60)"
    with (
        subprocess.Popen([sys.executable, "-c", code, "rank", "a"]) as ours,
        subprocess.Popen([sys.executable, "-c", code, "rank", "b"]) as theirs,
    ):
        time.sleep(0.2)  # until both have become what they are
        kill_ranks([b"rank", b"a", b""])
        assert ours.wait(10) == -9
        assert theirs.poll() is None
        theirs.kill()
