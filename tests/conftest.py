from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# A suite that was started in the background ignores Ctrl-C, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from saguaro.llm import LLM
    from serving import Served

RANK = b"saguaro.orchestrator.rank"
# On the command lines of whatever a deployment consists of; Triton's processes carry paths or names of ours.
PROCESSES = (RANK, b"saguaro.supervisor", b"saguaro.frontend.openai", b"tritonserver", b"triton_python_backend_stub")
# Tests that start deployments, by file or fixture; a few others are marked one by one. `make test` runs them one after
# the other: they look at the processes of the whole machine, and several ranks need its cores.
FILES = {"test_channels", "test_cli", "test_launch", "test_remains", "test_serve", "test_supervisor"}
FILES |= {"test_tensor_parallel", "test_serve_soak"}
FIXTURES = {"llm", "nothing_left", "served"}


@pytest.hookimpl(tryfirst=True)  # before markers select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in FILES or FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("deployment")


def require_compiler() -> None:
    """Skip a test, or a whole file, where kernels in C++ cannot be compiled."""
    from saguaro.plugins.cpp import find_compiler

    if find_compiler() is None:
        pytest.skip("NOT TESTED: this machine has no C++ compiler (apt-get install g++)", allow_module_level=True)


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
def llm(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[LLM]:
    """A tiny deployment for all tests of the run: to start one takes ten seconds of a core. It leaves nothing."""
    from saguaro.llm import LLM
    from serving import DEPLOYMENT

    path = tmp_path_factory.mktemp("deployment") / "served.yaml"
    path.write_text(DEPLOYMENT)
    before = leftovers()
    with LLM(str(path), store=store) as llm:
        yield llm
    check_nothing_left(before)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, llm: LLM) -> Iterator[Served]:
    """The same deployment behind the real tritonserver."""
    from serving import serve_tiny

    if shutil.which("tritonserver") is None and find_spec("pytriton") is None:
        pytest.skip("NOT TESTED: this machine has no tritonserver (pip install 'saguaro-serving[serve]', x86-64 Linux)")
    with serve_tiny(tmp_path_factory.mktemp("served"), llm) as running:
        yield running


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment for tests of processes: simulated models, whose ranks start in half the time of real ones."""
    folder = tmp_path_factory.mktemp("simulated")
    for role, agreement in (
        ("target", ""),
        ("draft", "agreement: {acceptance: 0.8, miss_scale: 0.4, miss_exponent: 0.6}"),
    ):
        profile = f"profile: {{forward_ms: {{1: 10.0}}, {agreement}}}"
        (folder / f"{role}.yaml").write_text(
            f"name: simulated-{role}\nengine: simulated\nsimulated: {{max_model_len: 512, {profile}}}\n"
        )
    path = folder / "deployment.yaml"
    path.write_text(
        "name: simulated\n"
        "target: {recipe: target.yaml, kv_tokens: 4096}\ndraft: {recipe: draft.yaml, kv_tokens: 16384}\n"
        "speculation: {mode: ssd, lookahead: 3, fan_out: {budget: 8}}\nserving:\n  max_sequences: 4\n"
    )
    return path


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
    check_nothing_left(before)


def check_nothing_left(before: set[str]) -> None:
    """There is no more than there was before, at the latest a few seconds from now."""
    deadline = time.monotonic() + 20
    while leftovers() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers() - before == set()


def on_two_ranks(folder: Path, name: str = "two", **keys: str) -> Path:
    """A deployment file in `folder`: `tiny` with its target on two ranks, and `keys` added to its `serving:`."""
    root = Path(__file__).parents[1]
    recipe = (root / "build" / "recipes" / "tiny-target.yaml").read_text()
    recipe = recipe.replace("name: tiny-target", "name: tiny-target-tp2").replace("dtype:", "tp: 2\ndtype:")
    (folder / "tiny-target-tp2.yaml").write_text(recipe)
    text = (root / "deployments" / "tiny.yaml").read_text()
    text = text.replace("name: tiny", f"name: {name}").replace("recipe: tiny-target", "recipe: tiny-target-tp2.yaml")
    path = folder / f"{name}.yaml"
    path.write_text(text + "".join(f"  {key}: {value}\n" for key, value in keys.items()))
    return path


def rank_pid(runtime: Path, role: str, rank: int) -> int:
    """The process that holds a rank's sign of life; not its launcher, which has it open as well."""
    from saguaro.orchestrator.plan import sign_of_life

    sign = str(sign_of_life(runtime, role, rank))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = RANK in (process / "cmdline").read_bytes()
            if ours and any(os.readlink(file) == sign for file in (process / "fd").iterdir()):
                return int(process.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    raise AssertionError(f"no rank {rank} of {role} lives in {runtime}")


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
