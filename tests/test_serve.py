"""`saguaro serve` with the real Triton: what clients see when its processes die one after the other."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from conftest import in_loop, leftovers, on_two_ranks, rank_pid
from saguaro.orchestrator.config import find_deployment
from saguaro.supervisor.state import process_start
from soak import at_rest, processes, soak

STREAMS = 16
TOKENS = 60
FREE = dict.fromkeys([f"{name}_port" for name in ("http", "grpc", "triton_metrics", "monitor", "openai")], "0")
PORTS = "".join(f"  {key}: {port}\n" for key, port in FREE.items())
FAULTS = (aiohttp.ClientError, ConnectionError)  # what a client calls a broken connection


def saguaro(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "saguaro.cli", *arguments], capture_output=True, text=True, timeout=240
    )


@dataclass
class Served:
    """A running deployment, seen from outside."""

    process: subprocess.Popen[bytes]
    log: Path
    answers: list[list[int]]  # of the streams when nothing happens

    def state(self) -> dict[str, Any]:
        done = saguaro("status", "served", "--json")
        assert done.returncode == 0, done.stderr
        state: dict[str, Any] = json.loads(done.stdout)
        return state

    def victim(self, *words: bytes) -> int:
        """The process of this deployment that has these words in its command line; of several the youngest."""
        words = (self.state()["folder"].encode(), *words)
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            line = b" ".join(command)
            if (
                b"mpiexec" not in command[0]
                and command[0][-4:] not in (b"bash", b"/sh")
                and all(w in line for w in words)
            ):
                found.append(int(process.name))
        assert found, words
        return max(found)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("served")
        patch.setenv("XDG_STATE_HOME", str(path))
        yield path


def deployment(home: Path, name: str, ports: str = PORTS) -> str:
    file = home / f"{name}.yaml"
    text = find_deployment("tiny").read_text().replace("name: tiny", f"name: {name}")
    file.write_text(text + ports + "  max_restarts: 5\n")
    return str(file)


def simulation(simulated: Path, name: str, more: str = PORTS) -> str:
    """Another name for the deployment of simulated models, with `more` in its `serving:`."""
    file = simulated.with_name(f"{name}.yaml")
    file.write_text(simulated.read_text().replace("name: simulated", f"name: {name}") + more)
    return str(file)


@contextmanager
def serving(file: str, log: Path, store: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `saguaro serve FILE`, which is ready; at the end it is told to stop."""
    command = [sys.executable, "-m", "saguaro.cli", "serve", file, "--store", str(store)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 200
        while b"serving: openai" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        print(log.read_text())  # noqa: T201 - shown when a test fails
        if process.poll() is None:
            process.terminate()
            process.wait(120)


@pytest.fixture(scope="module")
def served(home: Path, store: Path) -> Iterator[Served]:
    before = leftovers()
    log = home / "serve.log"
    file = on_two_ranks(home, "served", max_restarts="5", **FREE)
    with serving(str(file), log, store) as process:
        served = Served(process, log, [])
        served.answers.extend(tokens for tokens, _ in asyncio.run(all_streams(served.state()["addresses"]["http"])))
        yield served
    assert leftovers() - before == set(), log.read_text()


async def stream(
    session: aiohttp.ClientSession, http: str, seed: int, progress: list[int], tokens: int = TOKENS
) -> tuple[list[int], str | None]:
    """Tokens of a stream, and the error it ended with."""
    body = {"text_input": f"stream {seed}", "max_tokens": tokens, "stream": True, "temperature": 1.0, "seed": seed}
    got: list[int] = []
    try:
        async with session.post(f"{http}_stream", json=body | {"ignore_eos": True}) as answer:
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return got, event["error"]
                ids = event["output_ids"]
                got.extend(ids if isinstance(ids, list) else [ids])
                progress[seed] = len(got)
                if event["finish_reason"]:
                    return got, None
    except FAULTS as error:
        return got, f"{type(error).__name__}: {error}"
    return got, "it ended without a reason"


async def all_streams(http: str, act: Callable[[], object] | None = None) -> list[tuple[list[int], str | None]]:
    """What each of the streams got, when `act` is done in the middle of them. None of them may hang."""
    progress = [0] * STREAMS
    async with asyncio.timeout(120), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=STREAMS)) as session:
        streams = [asyncio.create_task(stream(session, http, seed, progress)) for seed in range(STREAMS)]
        if act:
            while max(progress) < 10:
                await asyncio.sleep(0.005)
            assert sum(task.done() for task in streams) < STREAMS
            act()
        return await asyncio.gather(*streams)


async def until_health(url: str, *wanted: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            async with session.get(url) as answer:
                health: dict[str, Any] = await answer.json()
            if health["status"] in wanted:
                assert answer.status == (200 if health["status"] in ("ok", "degraded") else 503)
                return health
            await asyncio.sleep(0.05)


async def complete(openai: str) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    """Status, headers and JSON of a completion of four tokens."""
    body = {"model": "served", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        asyncio.timeout(60),
        session.post(f"{openai}/completions", json=body) as answer,
    ):
        return answer.status, answer.headers, await answer.json()


def test_status_health_and_metrics_of_what_runs(served: Served) -> None:
    state = served.state()
    assert state["status"] == "ok"
    assert {name: part["state"] for name, part in state["parts"].items()} == dict.fromkeys(
        ("target", "draft", "triton", "openai"), "ready"
    )
    assert state["pid"] == served.process.pid
    assert [len(tokens) for tokens in served.answers] == [TOKENS] * STREAMS
    lines = served.log.read_text()
    order = [lines.index(f"ready: {part} (") for part in ("target", "draft", "triton", "openai")]
    assert order == sorted(order)

    async def ask() -> str:
        assert (await until_health(state["addresses"]["health"], "ok"))["mode"] == "ssd"
        async with aiohttp.ClientSession() as session, session.get(state["addresses"]["metrics"]) as answer:
            return await answer.text()

    text = asyncio.run(ask())
    assert 'saguaro_part_up{part="triton"} 1' in text
    assert "saguaro_rounds_total" in text  # the service's own
    again = saguaro("serve", str(served.log.parent / "served.yaml"))
    assert again.returncode == 1
    assert "deployment served is served already" in again.stderr


SHORT = 18.0  # seconds of load here; `make test-soak` has two minutes, `make soak` half an hour


@in_loop
async def test_under_mixed_load_everything_ends_and_nothing_stays(served: Served) -> None:
    assert len(processes(served.process.pid)) == 10
    await soak(served.process.pid, served.state()["addresses"], "served", SHORT)
    assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize(
    ("role", "rank"), [("draft", 0), ("target", 1), ("target", 0)], ids=["speculator", "follower", "leader"]
)
@in_loop
async def test_a_dead_rank_costs_no_token(role: str, rank: int, served: Served) -> None:
    before = served.state()
    addresses = before["addresses"]
    (runtime,) = Path(before["folder"]).glob("saguaro-*")
    victim = rank_pid(runtime, role, rank)
    streams = asyncio.create_task(all_streams(addresses["http"], lambda: os.kill(victim, signal.SIGKILL)))
    if role == "draft":
        health = await until_health(addresses["health"], "degraded")
        assert {name: part["state"] for name, part in health["parts"].items()} == {
            "target": "ready", "draft": "away", "triton": "ready", "openai": "ready",
        }  # fmt: skip
        front_end = addresses["openai"].removesuffix("/v1")
        assert (await until_health(f"{front_end}/health", "degraded"))["mode"] == "ar"
        status, _, answer = await complete(addresses["openai"])
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert await streams == [(tokens, None) for tokens in served.answers]
    health = await until_health(addresses["health"], "ok")
    assert health["parts"][role]["restarts"] == before["parts"][role]["restarts"] + 1
    assert health["parts"]["triton"]["restarts"] == 0
    if role == "draft":
        said = re.findall(r"(\w+ health: .*)", served.log.read_text())
        assert said[-3:] == ["INFO health: ok", "WARNING health: degraded (draft away)", "INFO health: ok"]
    else:
        died = rf"after its rank (\d or )?{rank}( or \d)? died"
        assert re.search(f"the target group ended with status .* {died}.* started again", served.log.read_text())
    await at_rest(addresses, {}, {})  # every block is free


@pytest.mark.parametrize("name", [b"triton_python_backend_stub", b"tritonserver --"])
@in_loop
async def test_a_dead_triton_breaks_its_connections_alone_and_is_back(name: bytes, served: Served) -> None:
    before = served.state()
    http, health = before["addresses"]["http"], before["addresses"]["health"]
    words = (b"/ssd/",) if b"stub" in name else ()
    pid = served.victim(name, *words) if words else before["parts"]["triton"]["pid"]
    broken = 0
    for tokens, (got, error) in zip(served.answers, await all_streams(http, lambda: os.kill(pid, signal.SIGKILL))):
        assert got == tokens[: len(got)]  # nothing wrong, whatever became of the rest
        assert error is not None or got == tokens
        broken += error is not None
    assert broken > 0
    async with asyncio.timeout(120):
        while (after := await until_health(health, "ok"))["parts"]["triton"]["restarts"] == before["parts"]["triton"][
            "restarts"
        ]:
            await asyncio.sleep(0.05)
    assert after["parts"]["target"]["pid"] == before["parts"]["target"]["pid"]  # the engines stayed loaded
    assert await all_streams(http) == [(tokens, None) for tokens in served.answers]


@in_loop
async def test_a_dead_front_end_leaves_triton_alone(served: Served) -> None:
    state = served.state()
    addresses = state["addresses"]
    assert await all_streams(addresses["http"], lambda: os.kill(state["parts"]["openai"]["pid"], signal.SIGKILL)) == [
        (tokens, None) for tokens in served.answers
    ]
    async with asyncio.timeout(60):
        while (await until_health(addresses["health"], "ok"))["parts"]["openai"]["restarts"] == 0:
            await asyncio.sleep(0.05)
    status, _, answer = await complete(addresses["openai"])
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


@in_loop
async def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new(served: Served) -> None:
    addresses = served.state()["addresses"]
    streams = asyncio.create_task(all_streams(addresses["http"], served.process.terminate))
    await until_health(addresses["health"], "draining")
    front_end = addresses["openai"].removesuffix("/v1")
    await until_health(f"{front_end}/health", "draining")
    async with aiohttp.ClientSession() as session:
        refused, error = await stream(session, addresses["http"], 0, [0])
    assert not refused
    assert error is not None
    assert "shutting down" in error
    status, headers, answer = await complete(addresses["openai"])
    assert (status, headers["retry-after"], answer["error"]["code"]) == (503, "5", "service_unavailable")
    assert "shutting down" in answer["error"]["message"]
    assert await streams == [(tokens, None) for tokens in served.answers]
    assert await asyncio.to_thread(served.process.wait, 120) == 0
    assert "stopped" in served.log.read_text().splitlines()[-1]


def test_told_twice_it_ends_what_runs_at_once(home: Path, store: Path, simulated: Path, nothing_left: None) -> None:
    file = simulation(simulated, "hurried", PORTS + "  grace_s: 600\n")
    assert saguaro("serve", file, "--store", str(store), "--no-openai", "--detach").returncode == 0
    state = json.loads(saguaro("status", "hurried", "--json").stdout)

    async def ask() -> list[tuple[list[int], str | None]]:
        """12 long answers, of which 4 are generated at a time."""
        progress, http = [0] * 12, state["addresses"]["http"]
        async with asyncio.timeout(120), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=12)) as session:
            asked = [asyncio.create_task(stream(session, http, seed, progress, tokens=480)) for seed in range(12)]
            while not any(progress):
                await asyncio.sleep(0.005)
            stopped = await asyncio.to_thread(saguaro, "stop", "--now", "hurried")
            assert stopped.returncode == 0, stopped.stderr
            return await asyncio.gather(*asked)

    ended = [(tokens, error) for tokens, error in asyncio.run(ask()) if error is not None]
    assert len(ended) >= 4
    assert all("shutting down" in error and len(tokens) < 480 for tokens, error in ended)
    assert process_start(state["pid"]) is None


def test_detached_it_is_ready_and_a_killed_supervisor_leaves_nothing(
    home: Path, store: Path, simulated: Path, nothing_left: None
) -> None:
    done = saguaro("serve", simulation(simulated, "alone"), "--store", str(store), "--no-openai", "--detach")
    assert done.returncode == 0, done.stderr
    state = json.loads(saguaro("status", "--json").stdout)
    assert (state["name"], state["status"], "openai" in state["parts"]) == ("alone", "ok", False)
    there = " ".join(leftovers())
    assert all(word in there for word in ("tritonserver", "stub", "saguaro.supervisor", "/tmp/saguaro-"))
    os.kill(state["pid"], signal.SIGKILL)


def test_detached_it_says_why_it_does_not_start(home: Path, store: Path, nothing_left: None) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:  # only there
        port = taken.getsockname()[1]
        file = deployment(home, "blocked", PORTS.replace("grpc_port: 0", f"grpc_port: {port}"))
        done = saguaro("serve", file, "--store", str(store), "--detach", "--host", "127.0.0.2")
    assert done.returncode == 1
    assert f"saguaro: port {port} on 127.0.0.2 cannot be used" in done.stderr
    assert "serving.grpc_port" in done.stderr
