"""One model on several ranks: the same logits, the same tokens, and one end for all of them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ranks
from conftest import check_nothing_left, leftovers, on_two_ranks, rank_pid, require_compiler
from saguaro.build.driver import build
from saguaro.build.recipe import Recipe, Tiny
from saguaro.engines.base import FanOutSteps, ForwardBatch, causal_batch
from saguaro.engines.manifest import QUANTISED, Dtype
from saguaro.engines.tensor_parallel import pack_batch, unpack_batch
from saguaro.errors import LaunchError
from saguaro.llm import LLM, build_engines
from saguaro.orchestrator.config import read_deployment
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.types import SamplingParams
from saguaro.plugins.fan_out import FanOut

# Engines --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 4])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A group of that many ranks has computed every case; what it left."""
    folder = tmp_path_factory.mktemp(f"tp{request.param}")
    assert ranks.run(request.param, ranks.compute, folder) == [0] * request.param
    return request.param, folder


@pytest.mark.parametrize("case", ranks.CASES, ids=lambda case: case.name)
def test_a_group_s_logits_are_those_of_one_process(group: tuple[int, Path], case: ranks.Case) -> None:
    size, folder = group
    actual = torch.load(folder / "logits.pt")[case.name]
    expected = ranks.alone(case)
    assert [a.shape for a in actual] == [e.shape for e in expected]
    assert len(actual) == 6  # the batch that cannot be run was refused, and did no harm
    tolerance = 1e-5 if case.dtype == torch.float32 else 1e-12
    for a, e in zip(actual, expected):
        scale = float(e.abs().max().clamp(min=1)) if e.numel() else 1
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * scale)


def test_a_rank_s_kv_pool_holds_its_own_heads_alone(group: tuple[int, Path]) -> None:
    size, folder = group
    for rank in range(size):
        heads = torch.load(folder / f"heads-{rank}.pt")
        for case in ranks.CASES:
            assert heads[case.name] == max(1, case.model().config.num_key_value_heads // size)


def test_ranks_share_what_a_reduced_head_keeps(tmp_path: Path) -> None:
    tiny = Tiny("qwen2", 2, hidden_size=64, heads=4, kv_heads=2, vocab_size=ranks.VOCAB, max_model_len=ranks.MAX_LEN)
    recipe = Recipe("reduced", "pytorch", tiny=tiny, dtype="float32", tp=2, draft_vocab=101)
    build(recipe, tmp_path).rename(tmp_path / "engine")
    assert ranks.run(2, ranks.compute_engine, tmp_path) == [0, 0]
    actual, expected = torch.load(tmp_path / "logits.pt"), ranks.of_directory(build(replace(recipe, tp=1), tmp_path))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5)
        assert set(a.isfinite().sum(-1).tolist()) <= {101}


@pytest.mark.parametrize("dtype", QUANTISED)
def test_ranks_share_a_quantised_model(dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 32 weights fit a rank's share of these layers: they are rounded as in the whole model."""
    require_compiler()
    tiny = Tiny("qwen2", 2, hidden_size=128, heads=8, kv_heads=2, vocab_size=ranks.VOCAB, max_model_len=ranks.MAX_LEN)
    recipe = Recipe("quantised", "pytorch", tiny=tiny, dtype=dtype, tp=2)
    build(recipe, tmp_path).rename(tmp_path / "engine")
    assert ranks.run(2, ranks.compute_engine, tmp_path) == [0, 0]
    actual, whole = torch.load(tmp_path / "logits.pt"), build(replace(recipe, tp=1), tmp_path)
    for a, e in zip(actual, ranks.of_directory(whole), strict=True):
        assert (a - e).norm() <= 0.02 * e.norm()  # an activation that is rounded the other way is seen in all after it
    monkeypatch.setattr(
        "saguaro.engines.decoder._is_quantised", lambda layer: False
    )  # norms and gates as the ranks do them
    for a, e in zip(actual, ranks.of_directory(whole), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-4)


def test_an_idle_follower_sleeps_and_ends_with_its_leader(tmp_path: Path) -> None:
    assert ranks.run(3, ranks.lose_the_leader, tmp_path) == [1, ranks.LOST, ranks.LOST]


def test_i20_one_rank_decides_a_tie_and_the_others_commit_the_same(tmp_path: Path) -> None:
    """I-20: every rank took its own argmax at a near-tie; they parted and waited for each other for ever."""
    assert ranks.run(2, ranks.tie_with_noise, tmp_path) == [0, 0]
    (ran, chosen, tokens), (ran_too, own_choices, _) = (torch.load(tmp_path / f"ran-{rank}.pt") for rank in range(2))
    assert ran == ran_too  # the same tokens at the same positions in every round: the same counts were committed
    assert min(tokens) < 255 <= max(tokens)  # the noise decided, now this way and now that
    assert own_choices != chosen  # a rank that decided for itself would have gone another way
    assert len(tokens) == 30


# Batches --------------------------------------------------------------------------------------------------------------

ids = st.integers(0, 2**40)


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif hasattr(expected, "__dataclass_fields__"):
        for f in fields(expected):
            assert_equal(getattr(actual, f.name), getattr(expected, f.name))
    else:
        assert actual == expected


def assert_survives(batch: ForwardBatch) -> None:
    assert_equal(unpack_batch(*pack_batch(batch)), batch)


@settings(deadline=None)
@given(st.data())
def test_a_causal_batch_arrives_as_it_was_sent(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, 20)) for _ in tokens]
    wanted = [data.draw(st.integers(0, len(row))) for row in tokens]
    blocks = [data.draw(st.lists(st.integers(0, 999), min_size=25, max_size=30)) for _ in tokens]
    assert_survives(causal_batch(tokens, starts, blocks, wanted, 1))


@settings(deadline=None)
@given(st.data())
def test_a_fan_out_batch_arrives_as_it_was_sent(data: st.DataObject) -> None:
    counts = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda c: FanOut((*c, 1)))
    fan_outs = data.draw(st.lists(counts, min_size=1, max_size=3))
    depth = data.draw(st.integers(0, 2))
    rows = sum(fan_out.branches for fan_out in fan_outs)
    tokens = torch.tensor(data.draw(st.lists(ids, min_size=rows, max_size=rows)))
    prefixes = [data.draw(st.integers(0, 9)) for _ in fan_outs]
    tables = [list(range(60))] * len(fan_outs)
    steps = FanOutSteps(fan_outs, prefixes, tables, 1, range(depth, depth + 1))
    assert_survives(steps.batch(tokens, depth))
    kept = [row for row in range(rows) if data.draw(st.booleans())]
    batch = steps.keep(kept).batch(tokens[kept], depth)
    assert_survives(batch)
    assert batch.fan_out is not None
    assert torch.equal(unpack_batch(*pack_batch(batch)).fan_out.sequence, batch.fan_out.sequence)  # type: ignore[union-attr]


# Deployments ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(llm: LLM) -> set[str]:
    """What is there before the deployment on four ranks is."""
    return leftovers()


@pytest.fixture(scope="module")
def four(before: set[str], store: Path) -> Iterator[LLM]:
    """One deployment for all tests here. To start its five processes takes 25 seconds of a core."""
    with LLM("tiny-tp4", store=store) as llm:
        yield llm


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_four_ranks_give_the_tokens_of_one(llm: LLM, four: LLM, mode: Any, temperature: float) -> None:
    prompts = ["def fib(n):", "Once upon a time", [1, 2, 3]]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    one, several = (deployment.generate(prompts, params, mode=mode) for deployment in (llm, four))
    assert [r.token_ids for r in several] == [r.token_ids for r in one]
    assert {r.stats.mode for r in several} == {mode}


PROMPTS = [[number] for number in range(16)]
STREAM = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed(four: LLM) -> list[list[int]]:
    return [result.token_ids for result in four.generate(PROMPTS, STREAM)]


@pytest.mark.parametrize(
    ("rank", "tokens"),
    [(2, 10), (3, None)],
    ids=["a follower, busy", "a follower, idle"],
)
def test_a_killed_rank_is_named_and_every_stream_goes_on_in_a_new_group(
    four: LLM, undisturbed: list[list[int]], rank: int, tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """16 streams at once; all of them end with the text of an undisturbed run. Of a leader: see test_serve."""
    victim = rank_pid(four._launcher.runtime, "target", rank)
    if tokens is None:
        os.kill(victim, signal.SIGKILL)
    with ThreadPoolExecutor() as pool:
        others = pool.submit(four.generate, PROMPTS[1:], STREAM)
        seen: list[int] = []
        for chunk in four.stream(PROMPTS[0], STREAM):
            if tokens is not None and len(seen) <= tokens < len(seen) + len(chunk.token_ids):
                os.kill(victim, signal.SIGKILL)
            seen.extend(chunk.token_ids)
        assert [seen, *(result.token_ids for result in others.result())] == undisturbed
    died = rf"after its rank (\d or )*{rank}( or \d)* died"  # the others follow it within a moment
    assert re.search(f"the target group ended with status .* {died}.* started again", caplog.text)


async def enter(launcher: Launcher) -> None:
    async with launcher:
        raise AssertionError("it started")


def test_a_rank_that_cannot_load_its_share_says_why(store: Path, nothing_left: None, tmp_path: Path) -> None:
    path = on_two_ranks(tmp_path)
    config = read_deployment(path)
    config = replace(config, draft=None, speculation=replace(config.speculation, mode="ar"))
    directory = shutil.copytree(build_engines(config, path, store)[0], tmp_path / "engine")
    weights = directory / "model-1-of-2.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    message = (
        r"the target group ended with status .* after its rank 1 died: rank 1: .*1-of-2.safetensors: cannot be read"
    )
    with pytest.raises(LaunchError, match=message):
        asyncio.run(enter(Launcher(config, directory, None)))


def test_a_group_that_is_told_to_ends_and_leaves_nothing(four: LLM, before: set[str]) -> None:
    """The last one here: it ends what the others share."""
    assert len(four.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    processes = [group.process for group in four._launcher._groups.values()]
    four.close()
    assert [process.returncode for process in processes] == [0, 0]
    check_nothing_left(before)
