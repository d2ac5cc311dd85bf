"""Many clients at once on the tiny pair: everything ends, nothing leaks. `make test-soak`."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import in_loop
from saguaro.llm import build_engines
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import find_deployment, read_deployment
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.plan import service_socket
from saguaro.orchestrator.types import SamplingParams
from test_launch import rank_pid

pytestmark = pytest.mark.soak

CLIENTS, REQUESTS = 64, 500


def resident(pid: int) -> int:
    """Memory of a process in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


async def work(client: Client, draw: random.Random, count: int) -> list[str]:
    """Requests one after the other, every fifth of them abandoned in the middle."""
    ends = []
    for _ in range(count):
        params = SamplingParams(
            temperature=draw.choice([0, 1]), seed=draw.getrandbits(64), max_tokens=draw.randint(1, 60)
        )
        prompt = [draw.randrange(400) for _ in range(draw.randint(1, 120))]
        stop_after = draw.randint(0, 20) if draw.random() < 0.2 else None
        seen = 0
        end = "abandoned"
        async with aclosing(client.stream(prompt, params, mode=draw.choice(["ar", "sd", "ssd"]))) as events:
            async for event in events:
                seen += len(event.tokens)
                if event.finish_reason:
                    end = event.finish_reason
                elif stop_after is not None and seen >= stop_after:
                    break
        ends.append(end)
    return ends


@in_loop
async def test_500_requests_of_64_clients_with_random_cancels(store: Path, nothing_left: None) -> None:
    path = find_deployment("tiny")
    config = read_deployment(path)
    config = replace(config, serving=replace(config.serving, max_sequences=16))
    async with Launcher(config, *build_engines(config, path, store)) as launcher:
        pids = [rank_pid(role, launcher.runtime) for role in ("target", "draft")]
        memory = []
        for half in range(2):
            clients = [Client(service_socket(launcher.runtime)) for _ in range(CLIENTS)]
            counts = [REQUESTS // 2 // CLIENTS + (i < REQUESTS // 2 % CLIENTS) for i in range(CLIENTS)]
            ends = await asyncio.gather(
                *(work(client, random.Random(f"{half} {i}"), counts[i]) for i, client in enumerate(clients))
            )
            for client in clients:
                await client.close()
            flat = [end for one in ends for end in one]
            assert len(flat) == REQUESTS // 2
            assert set(flat) == {"length", "stop", "abandoned"} or set(flat) == {"length", "abandoned"}
            status = await launcher.client.status()
            while status.running + status.waiting:
                await asyncio.sleep(0.05)
                status = await launcher.client.status()
            assert status.free_target_blocks == status.target_blocks
            assert status.free_draft_blocks == status.draft_blocks
            memory.append([resident(pid) for pid in pids])
        growth = [after / before for before, after in zip(*memory, strict=True)]
        assert max(growth) < 1.1, f"memory grew by {growth} from the first half to the second"
