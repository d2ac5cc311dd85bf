"""Supervision of parts that are small scripts: what is noticed, started again, said and taken away."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import in_loop
from saguaro import cli
from saguaro.errors import ConfigError, LaunchError, LinkError
from saguaro.orchestrator.config import ServingConfig
from saguaro.orchestrator.restarts import Restarts
from saguaro.supervisor import control, janitor
from saguaro.supervisor.child import Child
from saguaro.supervisor.keeper import Keeper
from saguaro.supervisor.monitor import part_metrics
from saguaro.supervisor.ports import choose_ports
from saguaro.supervisor.serve import serve
from saguaro.supervisor.state import PartState, RunState, StateFolder, known_deployments, process_start

WORKS = "echo hello from the part; touch ready; exec sleep 60"


class Script(Child):
    """A shell script in `folder`: it can answer once there is a file `ready`, hangs while there is one named `hang`."""

    def __init__(self, script: str, folder: Path) -> None:
        super().__init__("part", ["sh", "-c", f"cd {folder}; {script}"])
        self.folder = folder

    async def start(self) -> None:
        (self.folder / "ready").unlink(missing_ok=True)
        await super().start()

    async def probe(self) -> bool:
        while (self.folder / "hang").exists():
            await asyncio.sleep(0.01)
        if not (self.folder / "ready").exists():
            raise LinkError("not yet")
        return not (self.folder / "needs-others").exists()


def keeper_of(script: str, folder: Path, *, limit: int = 3, timeout: float = 20) -> tuple[Keeper, list[str]]:
    states: list[str] = []
    keeper = Keeper(
        Script(script, folder),
        restarts=Restarts(limit),
        start_timeout=timeout,
        on_change=lambda: states.append(keeper.state),
        probe_every=0.05,
        probe_timeout=0.3,
    )
    return keeper, states


async def until(keeper: Keeper, state: str, restarts: int = 0) -> None:
    async with asyncio.timeout(20):
        while keeper.state != state or keeper.restarts.total < restarts:
            await asyncio.sleep(0.01)


@in_loop
async def test_a_part_is_started_and_its_output_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "saguaro")
    keeper, states = keeper_of(WORKS, tmp_path)
    await keeper.start()
    assert keeper.part.pid is not None
    await keeper.stop(5)
    assert keeper.part.pid is None
    assert states == ["starting", "ready", "stopped"]
    assert "[part] hello from the part" in caplog.text


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no such model; exit 3", "part ended with status 3; its last lines: no such model"),
        ("echo still loading; exec sleep 60", r"part was not ready within 0.5 s: .*its last lines: still loading"),
    ],
)
@in_loop
async def test_a_part_that_does_not_start_is_named_with_its_last_lines(
    script: str, message: str, tmp_path: Path
) -> None:
    keeper, states = keeper_of(script, tmp_path, timeout=0.5 if "sleep" in script else 20)
    with pytest.raises(LaunchError, match=message):
        await keeper.start()
    assert states == ["starting", "failed"]
    await keeper.stop(0)


@in_loop
async def test_a_command_that_is_not_there_is_said() -> None:
    with pytest.raises(LaunchError, match="part cannot be started: .*no-such-program"):
        await Child("part", ["/no-such-program"]).start()


@in_loop
async def test_a_killed_part_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper, states = keeper_of(WORKS, tmp_path)
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    first = keeper.part.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(keeper, "ready", restarts=1)
    assert keeper.part.pid not in (None, first)
    keeping.cancel()
    await keeper.stop(0)
    assert states == ["starting", "ready", "restarting", "ready", "stopped"]
    assert "part was killed by SIGKILL; its last lines: hello from the part; it is started again in 0 s" in caplog.text


@in_loop
async def test_a_part_that_keeps_dying_is_given_up_with_the_reason(tmp_path: Path) -> None:
    keeper, _ = keeper_of(WORKS.replace("exec sleep 60", "sleep 0.3; exit 9"), tmp_path, limit=1)
    await keeper.start()
    with pytest.raises(LaunchError, match=r"part ended with status 9.*serving.max_restarts is used up"):
        await keeper.keep()
    assert (keeper.state, keeper.restarts.total) == ("failed", 1)
    await keeper.stop(0)


@in_loop
async def test_a_part_that_hangs_is_started_again(tmp_path: Path) -> None:
    keeper, states = keeper_of(WORKS, tmp_path)
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    (tmp_path / "hang").touch()
    await until(keeper, "restarting")
    (tmp_path / "hang").unlink()
    await until(keeper, "ready", restarts=1)
    keeping.cancel()
    await keeper.stop(0)
    assert states[:4] == ["starting", "ready", "unready", "restarting"]


@in_loop
async def test_a_part_that_waits_for_another_is_left_alone(tmp_path: Path) -> None:
    keeper, states = keeper_of(WORKS, tmp_path)
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    (tmp_path / "needs-others").touch()
    await until(keeper, "unready")
    await asyncio.sleep(0.5)
    (tmp_path / "needs-others").unlink()
    await until(keeper, "ready")
    keeping.cancel()
    await keeper.stop(0)
    assert (keeper.restarts.total, states) == (0, ["starting", "ready", "unready", "ready", "stopped"])


@in_loop
async def test_what_a_part_started_goes_with_it(tmp_path: Path) -> None:
    keeper, _ = keeper_of("sleep 60 & echo $! > child; " + WORKS, tmp_path)
    await keeper.start()
    child = int((tmp_path / "child").read_text())
    assert process_start(child) is not None
    await keeper.stop(5)
    async with asyncio.timeout(10):
        while process_start(child) is not None:
            await asyncio.sleep(0.01)


def test_restarts_are_limited_in_a_row_and_forgiven_with_time() -> None:
    now = [0.0]
    restarts = Restarts(3, settled=300, clock=lambda: now[0])
    pauses = []
    for _ in range(4):
        restarts.started()
        now[0] += 10
        pauses.append(restarts.take())
    assert pauses == [0, 1, 3, None]
    restarts.started()
    now[0] += 300
    assert restarts.take() == 0
    assert restarts.total == 4
    assert Restarts(0).take() is None


def test_free_ports_are_chosen_once_and_used_ones_named() -> None:
    free = ServingConfig(http_port=0, grpc_port=0, triton_metrics_port=0, monitor_port=0, openai_port=0)
    chosen = choose_ports(free)
    ports = [chosen.http_port, chosen.grpc_port, chosen.triton_metrics_port, chosen.monitor_port, chosen.openai_port]
    assert len(set(ports)) == 5
    assert 0 not in ports
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} on 127.0.0.1 .*set serving.grpc_port .*0 for any free"):
            choose_ports(replace(free, grpc_port=port))
    with pytest.raises(LaunchError, match=f"serving.grpc_port and serving.http_port are both {ports[0]}"):
        choose_ports(replace(free, grpc_port=ports[0], http_port=ports[0]))
    with pytest.raises(LaunchError, match="serving.host is 'no.such.host'"):
        choose_ports(replace(free, host="no.such.host"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def run_of(pid: int, folder: Path) -> RunState:
    folder.mkdir()
    return RunState(
        "demo", "demo.yaml", pid, process_start(pid) or 0, f"test{os.getpid()}", time.time(), str(folder), 1.0
    )


@pytest.fixture
def dead(home: Path, tmp_path: Path) -> Iterator[tuple[RunState, subprocess.Popen[bytes]]]:
    """A deployment whose supervisor has died and left a process, a folder and a region of shared memory."""
    with subprocess.Popen(["sleep", "60"]) as supervisor:
        state = run_of(supervisor.pid, tmp_path / f"saguaro-test{os.getpid()}")
        supervisor.kill()
    folder = StateFolder("demo")
    folder.make()
    folder.write(state)
    region = Path(f"/dev/shm/{Path(state.folder).name}-region")
    region.write_bytes(b"x")
    left = subprocess.Popen(
        ["sh", "-c", "sleep 60; :"],
        env={**os.environ, janitor.MARK: state.run},
        start_new_session=True,
    )
    time.sleep(0.1)  # until it has become what it is
    yield state, left
    with suppress(ProcessLookupError):
        os.killpg(left.pid, signal.SIGKILL)
    left.wait()
    region.unlink(missing_ok=True)


def gone(state: RunState, left: subprocess.Popen[bytes]) -> bool:
    regions = list(Path("/dev/shm").glob(f"{Path(state.folder).name}-*"))
    return left.wait(10) == -9 and not Path(state.folder).exists() and not regions


def test_stop_takes_away_what_a_dead_supervisor_left(dead: tuple[RunState, subprocess.Popen[bytes]]) -> None:
    assert control.status(None).status == "dead"
    assert control.stop("demo", now=False) == "demo"
    assert gone(*dead)
    assert known_deployments() == []


def test_the_next_start_takes_away_what_a_dead_supervisor_left(
    dead: tuple[RunState, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    file = tmp_path / "demo.yaml"
    file.write_text("name: demo\ntarget:\n  recipe: no-such-recipe\nspeculation:\n  mode: ar\n")
    with pytest.raises(ConfigError, match="no-such-recipe"):
        serve(str(file), None, openai=False)
    assert gone(*dead)


def test_the_janitor_waits_for_its_supervisor_and_does_the_same(
    home: Path, dead: tuple[RunState, subprocess.Popen[bytes]]
) -> None:
    state, left = dead
    command = [sys.executable, "-m", "saguaro.supervisor.janitor", "demo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, janitor.MARK: state.run}) as cleaner:
        assert left.poll() is None
        cleaner.communicate(timeout=30)
    assert cleaner.returncode == 0
    assert gone(state, left)
    assert known_deployments() == []


def test_one_supervisor_for_a_name(home: Path, tmp_path: Path) -> None:
    folder = StateFolder("demo")
    with folder.locked():
        folder.write(run_of(os.getpid(), tmp_path / "temporary"))
        with (
            pytest.raises(LaunchError, match=rf"demo is served already \(process {os.getpid()}\): .*saguaro stop demo"),
            StateFolder("demo").locked(),
        ):
            pass
    with StateFolder("demo").locked():
        pass


def test_which_deployment_is_meant(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no deployment is served here: start one with"):
        control.status(None)
    for name in ("one", "two"):
        StateFolder(name).make()
        StateFolder(name).write(run_of(os.getpid(), tmp_path / name))
    with pytest.raises(ConfigError, match=r"2 deployments are served here \(one, two\): name one"):
        control.stop(None, now=False)
    with pytest.raises(ConfigError, match="no deployment named 'three' is served here; served: one, two"):
        control.status("three")
    assert control.status("two").status == "starting"
    with pytest.raises(ConfigError, match="name is '../up'"):
        StateFolder("../up")
    assert "target     ready      pid 7" in control.describe(
        replace(run_of(os.getpid(), tmp_path / "three"), parts={"target": PartState("ready", 7)})
    )


@pytest.mark.parametrize(
    ("seconds", "said"), [(-1, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (3 * 24 * 3600, "3 days")]
)
def test_how_long_a_deployment_is_up(
    seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = run_of(os.getpid(), tmp_path / "one")
    monkeypatch.setattr("time.time", lambda: state.since + seconds)
    assert f"up {said}\n" in control.describe(state) + "\n"


def test_the_unit_of_the_documentation_is_one(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: this machine has no systemd-analyze")
    text = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    unit = text.partition("```ini\n")[2].partition("```")[0]
    command = re.search("^ExecStart=(.*)$", unit, re.MULTILINE)
    assert command is not None
    program, *words = command[1].split()
    assert cli._parser().parse_args(words).deployment == "/etc/saguaro/deployment.yaml"
    (tmp_path / "saguaro.service").write_text(unit.replace(program, shutil.which("true") or ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "saguaro.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # It prints warnings about units of this machine too, and exits with 0 after those of this one.
    assert [line for line in done.stderr.splitlines() if "saguaro.service" in line] == []
    assert done.returncode == 0


def test_part_metrics(tmp_path: Path) -> None:
    parts = {"target": PartState("ready", 7, 2), "draft": PartState("away", None, 1)}
    text = part_metrics(replace(run_of(os.getpid(), tmp_path / "folder"), parts=parts))
    assert 'saguaro_part_up{part="draft"} 0' in text
    assert 'saguaro_restarts_total{part="target"} 2' in text
