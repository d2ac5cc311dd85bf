"""Service, client, verifier and speculator together, on a tiny float64 pair and pools that are too small."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Pair
from saguaro.engines.pytorch import PytorchEngine
from saguaro.orchestrator.channels.inproc import inproc_pair
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig, DraftConfig, ModelConfig, ServingConfig, SpeculationConfig
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.fan_out_policy import Lists, uniform
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.protocol import Hello
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.target import EngineTarget
from saguaro.orchestrator.types import Mode, SamplingParams
from tiny_models import tiny_model

OPTIONS = {"vocab_size": 512, "max_model_len": 96, "block_size": 4}


@cache
def engines() -> tuple[PytorchEngine, PytorchEngine]:
    """A target, and a draft that is the target with some noise. Pools of 30 and 120 blocks."""
    draft = tiny_model("llama", dtype=torch.float64)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = 0.1 * parameter.std() if parameter.dim() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    target = PytorchEngine(tiny_model("llama", dtype=torch.float64), num_blocks=30, **OPTIONS)
    return target, PytorchEngine(draft, num_blocks=120, **OPTIONS)


@cache
def alone(prompt: tuple[int, ...], params: tuple[float, int, int]) -> list[int]:
    temperature, seed, length = params
    target = PytorchEngine(tiny_model("llama", dtype=torch.float64), num_blocks=30, **OPTIONS)
    return Pair(target, target).run(prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=length), "ar")


@contextmanager
def serving(socket: Path) -> Iterator[None]:
    target, draft = engines()
    near, far = inproc_pair()
    hello = Hello("", draft.vocab_size, draft.max_model_len, draft.num_blocks, draft.block_size)
    speculator = Speculator(ModelDrafter(draft, "coupled", Lists(uniform)), far, Lists(uniform), hello)
    links = iter([(0, DraftLink(near, deployment=1, timeout=20))])
    service = Service(
        DeploymentConfig(
            "test",
            ModelConfig("none"),
            DraftConfig("none"),
            SpeculationConfig(lookahead=3),
            ServingConfig(max_sequences=4, max_batch_tokens=12),
        ),
        EngineTarget(target, "coupled"),
        BlockPool(draft.num_blocks, draft.block_size),
        (),
        socket,
        lambda: next(links, None),
    )
    threads = [threading.Thread(target=work) for work in (service.run, speculator.run)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 511), min_size=1, max_size=30).map(tuple),
        st.tuples(st.sampled_from([0.0, 0.7, 1.2]), st.integers(0, 3), st.integers(1, 40)),
        st.sampled_from(["ar", "sd", "ssd"]),
        st.integers(1, 3),  # lookahead
        st.integers(-1, 1),  # priority
        st.floats(0, 0.4),  # seconds before it arrives
        st.none() | st.integers(0, 25),  # tokens after which it is abandoned
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=12, deadline=None)
@given(requests)
def test_every_request_gets_the_tokens_of_its_solo_run(plan: list[tuple]) -> None:
    """Staggered arrivals, joins, leaves, cancels, chunks, shared prefixes and preemptions: batch = alone."""

    async def one(client: Client, request: tuple) -> tuple[list[int], bool]:
        prompt, (temperature, seed, length), mode, lookahead, priority, delay, leave_after = request
        await asyncio.sleep(delay)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=length)
        chosen: Mode = mode
        stream = client.stream(list(prompt), params, mode=chosen, lookahead=lookahead, priority=priority)
        tokens: list[int] = []
        async with aclosing(stream) as events:
            async for event in events:
                tokens.extend(event.tokens)
                if leave_after is not None and len(tokens) > leave_after:
                    return tokens, False
        return tokens, True

    async def everything(socket: Path) -> list[tuple[list[int], bool]]:
        client = Client(socket, patience=60)
        answers = await asyncio.gather(*(one(client, request) for request in plan))
        status = await client.status()
        while status.running + status.waiting:
            await asyncio.sleep(0.01)
            status = await client.status()
        assert (status.free_target_blocks, status.free_draft_blocks) == (status.target_blocks, status.draft_blocks)
        await client.shutdown()
        await client.close()
        return list(answers)

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "socket"):
        answers = asyncio.run(everything(Path(folder) / "socket"))
    for (prompt, params, *_), (tokens, finished) in zip(plan, answers, strict=True):
        expected = alone(prompt, params)
        assert tokens == (expected if finished else expected[: len(tokens)])
