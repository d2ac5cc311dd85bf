"""`saguaro serve` with everything in it under mixed load: all that is asked ends, and nothing grows. `make soak`.

`SAGUARO_SOAK_S` has the seconds of load. They come in three parts with a rest after each, in which everything has to
be back to where it was: the first part is the warm-up that the last one is compared with.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import PROCESSES, in_loop
from soak_load import Load
from test_serve import deployment, home, saguaro, serving, until_health

__all__ = ["home"]  # a fixture
pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("SAGUARO_SOAK_S", "120"))
CLIENTS = 12
GROWTH, SLACK_KIB = 1.1, 8 * 1024  # of a process's memory from the first part to the last: what allocators keep
SLOWER = 4.0  # times the first part's p99 latency, which the last one's must not exceed


@dataclass
class Process:
    """One process of the deployment."""

    pid: int
    command: str

    @property
    def memory(self) -> int:
        """Resident, KiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def processes(supervisor: int) -> dict[str, Process]:
    """The supervisor, and everything it has started that belongs to a deployment; by what it is."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {"supervisor": Process(supervisor, "supervisor")}
    for pid in sorted(commands):
        ancestor, command = pid, commands[pid]
        while ancestor > 1 and ancestor != supervisor:
            ancestor = parents.get(ancestor, 0)
        first = command.split(b"\0")[0]
        wanted = any(word in command for word in PROCESSES) and b"mpiexec" not in first and first[-2:] != b"sh"
        if pid != supervisor and ancestor == supervisor and wanted:
            text = command.replace(b"\0", b" ").decode()
            found[_name(text)] = Process(pid, text)
    return found


def _name(command: str) -> str:
    for word, name in (
        (" target ", "target"),
        (" draft ", "draft"),
        ("/preprocessing/", "preprocessing"),
        ("/ssd/", "ssd"),
        ("/postprocessing/", "postprocessing"),
        ("tritonserver", "tritonserver"),
        ("frontend.openai", "openai"),
        ("supervisor.janitor", "janitor"),
    ):
        if word in command:
            return name
    return command


async def figures(url: str) -> dict[str, float]:
    """Of all that is served at an address, by name and labels."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        families = text_string_to_metric_families(await answer.text())
    return {
        sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def at_rest(addresses: dict[str, str], descriptors: dict[str, int], there: dict[str, Process]) -> None:
    """Until nothing runs, no block is held, no request is left in Triton, and no more is open than allowed."""
    deadline = time.monotonic() + 30
    while True:
        service, triton = await figures(addresses["metrics"]), await figures(addresses["triton metrics"])
        busy = {
            name: value
            for name, value in {**service, **triton}.items()
            if value
            and name.startswith(("saguaro_requests_running", "saguaro_requests_waiting", "nv_inference_pending"))
        }
        held = {
            pool: service[f"saguaro_kv_blocks {pool}"] - service[f"saguaro_kv_free_blocks {pool}"]
            for pool in ("target", "draft")
        }
        opened = {name: there[name].descriptors - most for name, most in descriptors.items()}
        opened = {name: more for name, more in opened.items() if more > 0}
        if not busy and not any(held.values()) and not opened:
            return
        assert time.monotonic() < deadline, (busy, held, opened)
        await asyncio.sleep(0.2)


@in_loop
async def test_everything_ends_and_nothing_grows(home: Path, store: Path, nothing_left: None) -> None:
    with serving(deployment(home, "soak"), home / "soak.log", store) as process:
        addresses = json.loads(saguaro("status", "soak", "--json").stdout)["addresses"]
        health = await until_health(addresses["health"], "ok")
        there = processes(process.pid)
        assert len(there) == 9, there
        load = Load(addresses, "soak")
        memory: list[dict[str, int]] = []
        p99: list[float] = []
        descriptors: dict[str, int] = {}
        for part in range(3):
            load.latencies.clear()
            await load.run(CLIENTS, SECONDS / 3, part)
            await at_rest(addresses, descriptors, there)
            p99.append(float(np.percentile(load.latencies, 99)))
            memory.append({name: one.memory for name, one in there.items()})
            descriptors = descriptors or {name: one.descriptors for name, one in there.items()}
        after = await until_health(addresses["health"], "ok")
        process.terminate()
        assert await asyncio.to_thread(process.wait, 120) == 0
    print(f"\n{load.ended.total()} requests: {dict(load.ended)}\np99 (s): {p99}")  # noqa: T201 - the figures
    for name in there:
        print(f"{name:15} KiB {[m[name] for m in memory]}, descriptors {descriptors[name]}")  # noqa: T201
    assert len(load.ended) == 12, "every kind of request has been made"
    assert p99[2] < SLOWER * p99[0]
    grown = {name: (first, memory[2][name]) for name, first in memory[0].items()}
    assert {n: g for n, g in grown.items() if g[1] > max(GROWTH * g[0], g[0] + SLACK_KIB)} == {}
    assert {name: part["pid"] for name, part in after["parts"].items()} == {
        name: part["pid"] for name, part in health["parts"].items()
    }, "nothing had to be started again"
    log = (home / "soak.log").read_text()
    assert "Traceback" not in log
    assert "failed to stop server" not in log
