from __future__ import annotations

import asyncio
import functools
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving import Served

RANK = b"saguaro.orchestrator.rank"
# On the command lines of whatever a deployment consists of; Triton's processes carry paths or names of ours.
PROCESSES = (RANK, b"saguaro.supervisor", b"saguaro.frontend.openai", b"tritonserver", b"triton_python_backend_stub")
# Tests that start deployments, by file or fixture. `make test` runs them one after the other: they look at the
# processes of the whole machine, and several ranks need its cores.
FILES = {"test_channels", "test_cli", "test_launch", "test_remains", "test_serve", "test_supervisor"}
FILES |= {"test_tensor_parallel", "test_deterministic", "test_serve_soak"}
FIXTURES = {"nothing_left", "served"}


@pytest.hookimpl(tryfirst=True)  # before markers select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in FILES or FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("deployment")


def in_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(*arguments: object, **options: object) -> None:
        asyncio.run(test(*arguments, **options))

    return run


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and engines of this test run; the user's own cache is left alone."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[Served]:
    """A tiny deployment behind the real tritonserver, for all tests of the run."""
    from serving import serve_tiny

    if shutil.which("tritonserver") is None and find_spec("pytriton") is None:
        pytest.skip("NOT TESTED: this machine has no tritonserver (pip install 'saguaro-serving[serve]', x86-64 Linux)")
    with serve_tiny(tmp_path_factory.mktemp("served"), store) as running:
        yield running


def leftovers() -> set[str]:
    """Whatever a deployment could leave behind: processes, shared memory, runtime directories with their sockets."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(word in command for word in PROCESSES):
                found.add(f"process {process.name}: {command.decode().split(chr(0))[:8]}")
    found |= {
        name for name in os.listdir("/dev/shm") if name.startswith(("mpich", "sm_segment", "vader_segment", "saguaro-"))
    }
    return found | {str(path) for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("saguaro-*")}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test the machine is as it was, at the latest a few seconds later."""
    before = leftovers()
    yield
    deadline = time.monotonic() + 20
    while leftovers() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers() - before == set()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures of the real pair, beside each other."""
    for report in terminalreporter.getreports("passed"):
        for mode, stats in report.user_properties:
            figures = {
                name: round(value, 2) if isinstance(value, float) else value
                for name, value in vars(stats).items()
                if name not in ("mode", "rounds") and value is not None
            }
            terminalreporter.write_line(f"{report.nodeid.partition('[')[2][:24]:24} {mode:4} {figures}")
