"""A served deployment under mixed load, watched: what is open, what is held, what grows.

The load comes in three parts with a rest after each, in which everything has to be back to where it was: the first part
is the warm-up that the last one is compared with.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from conftest import PROCESSES
from soak_load import Load

CLIENTS = 12
GROWTH, SLACK_KIB = 1.1, 8 * 1024  # of a process's memory from the first part to the last: what allocators keep


@dataclass(frozen=True)
class Soaked:
    ended: Counter[str]  # requests, by kind
    p99: list[float]  # latency of whole answers in each part, in seconds


async def soak(supervisor: int, addresses: dict[str, str], model: str, seconds: float) -> Soaked:
    """Fails when a request does not end as it should, or something is left or has grown afterwards."""
    parts = await _parts(addresses["health"])
    there = processes(supervisor)
    load = Load(addresses, model)
    memory: list[dict[str, int]] = []
    p99: list[float] = []
    descriptors: dict[str, int] = {}
    for part in range(3):
        load.latencies.clear()
        await load.run(CLIENTS, seconds / 3, part)
        await at_rest(addresses, descriptors, there)
        p99.append(float(np.percentile(load.latencies, 99)))
        memory.append({name: one.memory for name, one in there.items()})
        descriptors = descriptors or {name: one.descriptors for name, one in there.items()}
    print(f"\n{load.ended.total()} requests: {dict(load.ended)}\np99 (s): {p99}")  # noqa: T201 - the figures
    for name in there:
        print(f"{name:15} KiB {[m[name] for m in memory]}, descriptors {descriptors[name]}")  # noqa: T201
    grown = {name: (first, memory[2][name]) for name, first in memory[0].items()}
    assert {n: g for n, g in grown.items() if g[1] > max(GROWTH * g[0], g[0] + SLACK_KIB)} == {}
    assert await _parts(addresses["health"]) == parts, "nothing had to be started again"
    return Soaked(load.ended, p99)


async def _parts(health: str) -> dict[str, int]:
    """Processes of the parts, all of which can answer."""
    async with aiohttp.ClientSession() as session, session.get(health) as answer:
        state = await answer.json()
    assert state["status"] == "ok", state
    return {name: part["pid"] for name, part in state["parts"].items()}


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
            name = _name(text)
            found[name if name not in found else f"{name} {pid}"] = Process(pid, text)
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


LAZY = 2  # descriptors that Triton's thread pools open only after a short first part; a leak has more by the end


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
        opened = {name: more for name, more in opened.items() if more > LAZY}
        if not busy and not any(held.values()) and not opened:
            return
        assert time.monotonic() < deadline, (busy, held, opened)
        await asyncio.sleep(0.2)
