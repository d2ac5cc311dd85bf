"""What `mode: auto` does with a good draft, a useless one, and one that becomes ten times slower and recovers.

python -m saguaro.bench.auto_mode --out FILE

Real service, client, verifier and speculator in real time, in two threads; only the models are simulated: their
forwards wait as long as stated, so what else runs on the machine hardly matters. One request after another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from saguaro.engines.base import ForwardBatch, ForwardOutput
from saguaro.engines.profile import Agreement, Profile
from saguaro.engines.simulated import SimulatedEngine
from saguaro.orchestrator.calibration import measure
from saguaro.orchestrator.channels.inproc import inproc_pair
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import (
    DeploymentConfig,
    DraftConfig,
    FanOutConfig,
    ModelConfig,
    ServingConfig,
    SpeculationConfig,
)
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.protocol import Hello
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.target import EngineTarget
from saguaro.orchestrator.types import Mode, SamplingParams

TARGET_MS = {1: 60.0, 16: 66.0}
DRAFT_MS = {1: 5.0, 16: 6.5}
_CHANGE = re.compile(r'^saguaro_mode_changes_total\{from="(\w+)",reason="(\w+)",to="(\w+)"\} (\d+)', re.MULTILINE)


class Slowed(SimulatedEngine):
    """A model whose device can be made slower while it runs."""

    factor = 1.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        time.sleep((self.factor - 1) * self._profile.seconds(len(batch.token_ids)))
        return super().forward(batch)


def model(times: dict[int, float], agreement: Agreement | None = None) -> Slowed:
    return Slowed(
        Profile(times, agreement), vocab_size=512, first=3, max_model_len=2048, block_size=16, num_blocks=4000
    )


@dataclass
class Phase:
    """So many seconds of one deployment under one condition."""

    name: str
    mode: str  # of the deployment
    seconds: float
    tokens_per_second: float  # of requests without a mode of their own, the first third left out
    plain: float  # of requests for plain decoding, between them
    ends_in: Mode
    reason: str
    lookahead: int
    budget: int
    changes: list[str] = field(default_factory=list)  # since the phase began: from -> to (reason)


@contextmanager
def deployment(folder: Path, speculation: SpeculationConfig, acceptance: float) -> Iterator[tuple[Path, Slowed]]:
    """Its socket and its draft. Everything is the real thing but the models."""
    target, draft = model(TARGET_MS), model(DRAFT_MS, Agreement(acceptance, 0.4, 0.6))
    adaptive = speculation.adaptive
    near, far = inproc_pair()
    estimators, timeline = Estimators(speculation.prior), Timeline()
    policy = speculation.policy(estimators)
    drafter = ModelDrafter(
        draft, speculation.rule, policy, least_probability=speculation.fan_out.ranked_from, timeline=timeline
    )
    hello = Hello("", draft.vocab_size, draft.max_model_len, draft.num_blocks, 16, measure(draft) if adaptive else ())
    speculator = Speculator(drafter, far, policy, hello, estimators=estimators, timeline=timeline)
    links = iter([(0, DraftLink(near, deployment=1, timeout=30))])
    service = Service(
        DeploymentConfig(
            "auto-mode",
            ModelConfig("simulated"),
            DraftConfig("simulated", kv_tokens=64_000),
            speculation,
            ServingConfig(max_sequences=1),
        ),
        EngineTarget(target, speculation.rule),
        BlockPool(draft.num_blocks, draft.block_size),
        (),
        folder / "socket",
        lambda: next(links, None),
        verify_steps=measure(target) if adaptive else (),
    )
    threads = [threading.Thread(target=work, daemon=True) for work in (service.run, speculator.run)]
    for thread in threads:
        thread.start()
    try:
        yield folder / "socket", draft
    finally:
        asyncio.run(_shut_down(folder / "socket"))
        for thread in threads:
            thread.join(60)


async def _shut_down(socket: Path) -> None:
    client = Client(socket)
    await client.shutdown()
    await client.close()


async def phase(client: Client, name: str, mode: str, seconds: float, first: int) -> Phase:
    """One request after another for so long. In the last two thirds every other one asks for plain decoding: what else
    runs on the machine changes, and meets both alike."""
    before = await _changes(client)
    start = time.monotonic()
    await request(client, first, 10_000, until=start + seconds / 3)
    free, plain = [0.0, 0.0], [0.0, 0.0]  # tokens, seconds
    while time.monotonic() - start < seconds:
        first += 1
        pairs: tuple[tuple[list[float], int, Mode | None], ...] = ((free, 200, None), (plain, 60, "ar"))
        for sums, length, asked in pairs:
            tokens, took = await request(client, first, length, mode=asked)
            sums[0] += tokens
            sums[1] += took
    status = await client.status()
    text = await client.metrics()
    after = await _changes(client)
    return Phase(
        name,
        mode,
        round(time.monotonic() - start, 1),
        round(free[0] / free[1], 2),
        round(plain[0] / plain[1], 2),
        status.mode,
        status.mode_reason,
        _gauge(text, "saguaro_lookahead"),
        _gauge(text, "saguaro_budget"),
        [f"{label} x {count - before.get(label, 0)}" for label, count in after.items() if count > before.get(label, 0)],
    )


async def request(
    client: Client, prompt: int, length: int, *, until: float = math.inf, mode: Mode | None = None
) -> tuple[int, float]:
    """Tokens after the first and the seconds they took."""
    params = SamplingParams(temperature=0, max_tokens=min(length, 1500), ignore_eos=True)
    tokens, begun, last = 0, 0.0, 0.0
    async with aclosing(client.stream([3 + prompt % 500, 5], params, mode=mode)) as events:
        async for event in events:
            last = time.monotonic()
            tokens += len(event.tokens) if begun else 0
            begun = begun or last
            if last > until:
                break
    return tokens, last - begun


async def _changes(client: Client) -> dict[str, int]:
    found = _CHANGE.findall(await client.metrics())
    return {f"{before} -> {after} ({reason})": int(count) for before, reason, after, count in found}


def _gauge(text: str, name: str) -> int:
    value = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return int(float(value.group(1))) if value else 0


def run(seconds: float) -> list[Phase]:
    found: list[Phase] = []
    auto = SpeculationConfig(mode="auto", lookahead="auto", fan_out=FanOutConfig(budget="auto"))
    fixed = SpeculationConfig(fan_out=FanOutConfig(budget=8))

    async def phases(socket: Path, draft: Slowed, plan: list[tuple[str, str, float, float]]) -> None:
        client = Client(socket)
        for number, (name, mode, length, factor) in enumerate(plan):
            draft.factor = factor
            found.append(await phase(client, name, mode, length, 50 * number))
            console.print(found[-1])
        await client.close()

    console = Console(stderr=True)
    for speculation, acceptance, plan in (
        (fixed, 0.8, [("good draft, K=4, budget 8", "ssd", seconds / 2, 1.0)]),
        (fixed, 0.0, [("useless draft, until the alarm", "ssd", seconds / 2, 1.0)]),
        (auto, 0.0, [("useless draft", "auto", seconds, 1.0)]),
        (
            auto,
            0.8,
            [
                ("good draft", "auto", seconds, 1.0),
                ("draft 10 times slower", "auto", seconds, 10.0),
                ("restored", "auto", 2 * seconds, 1.0),
            ],
        ),
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            deployment(Path(folder), speculation, acceptance) as running,
        ):
            asyncio.run(phases(*running, plan))
    return found


def table(phases: list[Phase]) -> Table:
    result = Table("condition", "mode", "tokens/s", "ar", "x ar", "ends in", "K", "budget", "changes")
    for found in phases:
        result.add_row(
            found.name,
            found.mode,
            f"{found.tokens_per_second:.1f}",
            f"{found.plain:.1f}",
            f"{found.tokens_per_second / found.plain:.2f}",
            found.ends_in,
            str(found.lookahead),
            str(found.budget),
            "\n".join(found.changes),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="of a phase (default: 90)")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    arguments = parser.parse_args()
    phases = run(arguments.seconds)
    record = {"target_ms": TARGET_MS, "draft_ms": DRAFT_MS, "phases": [asdict(each) for each in phases]}
    arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    Console(width=140).print(table(phases))


if __name__ == "__main__":
    main()
