"""Mistakes that other engines shipped, by the id of our list; other ids are in the files of their subjects."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from fractions import Fraction
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from scipy.stats import chisquare

from conftest import in_loop
from harness import Pair
from saguaro.engines.pytorch import PytorchEngine
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import LinkError
from saguaro.orchestrator.channels.inproc import InprocChannel, inproc_pair
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig, DraftConfig, ModelConfig, ServingConfig, SpeculationConfig
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.fan_out_policy import Lists
from saguaro.orchestrator.fan_out_policy import uniform as evenly
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.protocol import Hello, Round
from saguaro.orchestrator.randomness import Purpose, uniform
from saguaro.orchestrator.sampling import Candidates, Query, Trial, draw_draft, propose, verify
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.target import EngineTarget
from saguaro.orchestrator.types import Mode, Outcome, RequestSampling, Rule, SamplingParams, Speculation
from tiny_models import tiny_model


def scripted(row: list[int]) -> ScriptedEngine:
    """The same distribution everywhere, in percent."""
    table = markov_table([[Fraction(weight, 100) for weight in row]] * len(row))
    return ScriptedEngine(table, len(row), 200, 4, 2000)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("draft", [[50, 30, 15, 5], [5, 5, 10, 80]])
def test_i01_the_targets_top_p_binds_in_whole_rounds(rule: Rule, mode: Mode, draft: list[int]) -> None:
    """I-01: verification ignored temperature and top-p. Only tokens 0 and 1 ever, as .625 to .375."""
    pair = Pair(scripted([50, 30, 15, 5]), scripted(draft), rule=rule, lookahead=2, budget=3, width=4)
    batch = [pair.sequence([0], SamplingParams(top_p=0.75, seed=seed, max_tokens=60), mode) for seed in range(6)]
    counts = Counter(token for tokens in pair.finish(batch) for token in tokens)
    assert set(counts) == {0, 1}
    assert chisquare([counts[0], counts[1]], [0.625 * 360, 0.375 * 360]).pvalue > 1e-3


def test_i03_a_filtered_draft_records_what_it_was_drawn_from() -> None:
    """I-03: the recorded q lacked the draft's own processors. T = .7 and top-k 2: two entries, and the histogram."""
    request = RequestSampling(SamplingParams(temperature=0.7, top_k=2), 9, 1)
    candidates = propose(torch.tensor([[2.0, 1.5, 1.0, 0.0]]), [Query(request, [0], [()], 4)], "ratio")[0]
    draws = [draw_draft(candidates, 0, uniform(9, position, Purpose.DRAFT)) for position in range(2000)]
    (q,) = {probs for _, probs in draws}
    counts = Counter(token for token, _ in draws)
    assert set(q.ids) == set(counts) == {0, 1}
    assert chisquare([counts[i] for i in q.ids], [2000 * p for p in q.probs]).pvalue > 1e-3


def test_i04_q_comes_from_the_rounded_logits_that_were_drawn_from() -> None:
    """I-04: drafted from bfloat16 logits, tested with another softmax. A tie by rounding is a tie in q too."""
    exact = torch.tensor([[1.0, 1.001, 0.0]])
    rounded = exact.bfloat16()
    assert rounded[0, 0] == rounded[0, 1]
    target = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log().expand(2, 3)
    request = RequestSampling(SamplingParams(), 11, 1)
    candidates: Candidates = propose(rounded, [Query(request, [0], [()], 3)], "ratio")[0]
    first: Counter[int] = Counter()
    for position in range(1, 3001):
        token, q = draw_draft(candidates, 0, uniform(11, position, Purpose.DRAFT))
        probs = dict(zip(q.ids, q.probs))
        assert probs[0] == probs[1]
        (outcome,) = verify(target, [Trial(request, range(position), Speculation((token,), (q,)))], "ratio")
        assert isinstance(outcome, Outcome)
        first[token if outcome.accepted else outcome.bonus] += 1
    assert chisquare([first[i] for i in range(3)], [1500, 900, 600]).pvalue > 1e-3


@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 1.5), ("ratio", 1.5), ("coupled", 0.0)])
def test_i13_models_padded_to_different_sizes_work_together(rule: Rule, temperature: float) -> None:
    """I-13: 151,936 rows beside 152,064 were refused. 1000 and 1024 rows of 990 ids: padding is never emitted."""
    target_model, draft_model = (
        tiny_model("qwen2", dtype=torch.float64, seed=seed, vocab_size=rows) for seed, rows in ((0, 1024), (1, 1000))
    )
    with torch.no_grad():  # padding rows that would win every time
        for model in (target_model, draft_model):
            model.lm_head.weight[990:] = 9 * model.lm_head.weight[:10].repeat(4, 1)[: len(model.lm_head.weight) - 990]
    options = {"vocab_size": 990, "max_model_len": 128, "block_size": 8}
    engines = [PytorchEngine(model, num_blocks=256, **options) for model in (target_model, draft_model)]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24)
    tokens = Pair(*engines, rule=rule).run([1, 2, 3], params)
    assert max(tokens) < 990
    if rule == "coupled":
        assert tokens == Pair(*engines, rule=rule).run([1, 2, 3], params, "ar")


class Failing(Speculator):
    """Raises in its seventh round, sometimes before and sometimes after it has answered."""

    rounds = 0

    def round(self, number: int, deployment: int, body: Round) -> None:
        self.rounds += 1
        if self.rounds == 7:
            if number % 2:
                super().round(number, deployment, body)
            raise RuntimeError("the seventh round")
        super().round(number, deployment, body)


@in_loop
async def test_i21_requests_end_whatever_the_speculator_does(tmp_path: Path) -> None:
    """I-21: requests ran for ever after failures under load. 64 at once, and every 7th round the speculator fails."""
    target, draft = scripted([50, 30, 15, 5]), scripted([40, 40, 15, 5])
    joining: SimpleQueue[InprocChannel] = SimpleQueue()
    failures: list[RuntimeError] = []
    stopped = threading.Event()

    def speculate() -> None:
        """A speculator, and another one in its place whenever it has failed, until the service takes leave."""
        while not stopped.is_set():
            near, far = inproc_pair()
            hello = Hello("", draft.vocab_size, draft.max_model_len, draft.num_blocks, draft.block_size)
            speculator = Failing(ModelDrafter(draft, "coupled", Lists(evenly)), far, Lists(evenly), hello)
            joining.put(near)
            try:
                speculator.run()
                return
            except LinkError:
                return
            except RuntimeError as error:
                failures.append(error)
            far.close()

    def links() -> tuple[int, DraftLink] | None:
        return None if joining.empty() else (0, DraftLink(joining.get(), deployment=1, timeout=20))

    config = DeploymentConfig(
        "test",
        ModelConfig("none"),
        DraftConfig("none"),
        SpeculationConfig(lookahead=3),
        ServingConfig(max_sequences=8),
    )
    pool = BlockPool(draft.num_blocks, draft.block_size)
    service = Service(config, EngineTarget(target, "coupled"), pool, (), tmp_path / "socket", links)
    threads = [threading.Thread(target=work) for work in (service.run, speculate)]
    for thread in threads:
        thread.start()
    client = Client(tmp_path / "socket", patience=60)
    params = [SamplingParams(seed=seed, max_tokens=5 + seed % 20) for seed in range(64)]

    async def answer(p: SamplingParams) -> list[int]:
        return [token async for event in client.stream([0, 1], p) for token in event.tokens]

    answers = await asyncio.gather(*map(answer, params))
    status = await client.status()
    stopped.set()
    await client.shutdown()
    await client.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()
        while not joining.empty():  # one that came after the service had gone
            joining.get().close()
    assert len(failures) >= 3
    assert (status.running, status.waiting) == (0, 0)
    assert (status.free_target_blocks, status.free_draft_blocks) == (status.target_blocks, status.draft_blocks)
    alone = Pair(target, draft)
    assert answers == [alone.run([0, 1], p, "ar") for p in params]
