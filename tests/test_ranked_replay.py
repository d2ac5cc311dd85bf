"""What a replay says of the policy `ranked` is what the running roles do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness import Pair
from saguaro.bench.ranked_replay import RankedReplay, roll_out
from saguaro.bench.replay import Ranked, Rollouts, Scored, Text, answer_logits, score
from saguaro.engines.base import Engine, ForwardBatch, ForwardOutput
from saguaro.engines.pytorch import PytorchEngine
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import Lists, uniform
from saguaro.orchestrator.types import RequestSampling, SamplingParams
from test_round import DRAFT, TARGET, scripted
from tiny_models import tiny_model

WIDTH = 24
PROMPTS = ([1, 3, 2], [4, 4, 0, 1, 2, 2, 3, 0, 1, 4], [2])


class Counted:
    """A draft that keeps how many branches each round prepares, step by step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rows: list[list[int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.fan_out is None:
            self.rows.append([])  # a trunk: what follows prepares for its outcomes, or is the next round's backup
        else:
            self.rows[-1].append(len(batch.token_ids))
        return self._engine.forward(batch)


@pytest.fixture(scope="module")
def models() -> tuple[Engine, Engine]:
    """In float64, so that a forward of another shape does not decide otherwise."""
    target, draft = (tiny_model("qwen2", torch.float64, num_hidden_layers=2) for _ in range(2))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = 0.05 * parameter.std() if parameter.dim() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    options = {"vocab_size": 512, "max_model_len": 128, "block_size": 8, "num_blocks": 200}
    return PytorchEngine(target, **options), PytorchEngine(draft, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("pair", "lookahead", "budget", "least"),
    [
        ("tiny", 4, 8, 0.01),
        ("tiny", 2, 3, 0.1),
        ("scripted", 4, 8, 0.01),
        ("scripted", 6, 12, 0.0),
        ("scripted", 1, 4, 0.02),
    ],
)
def test_ranked_rounds_are_those_of_the_running_roles(
    models: tuple[Engine, Engine], pair: str, lookahead: int, budget: int, least: float, temperature: float
) -> None:
    """Hit, accepted and drafted (how long the needed branch or the backup's grew) of every round, and its guesses."""
    target, draft = models if pair == "tiny" else [scripted(rows, blocks=400) for rows in (TARGET, DRAFT)]
    counted = Counted(draft)
    fan_out = FanOutConfig(budget=budget, policy="ranked", least_probability=least)
    speculation = SpeculationConfig(lookahead=lookahead, fan_out=fan_out)
    setting = {"policy": speculation.policy(Estimators()), "lookahead": lookahead, "budget": budget}
    both = Pair(target, counted, width=WIDTH, least_probability=least, **setting)
    replay = RankedReplay(**setting, least_probability=least)
    hits, lengths = set(), set()
    for number, prompt in enumerate(PROMPTS):
        sequence = both.sequence(prompt, SamplingParams(temperature=temperature, seed=number, max_tokens=40))
        counted.rows.clear()
        both.finish([sequence])
        text = Text(tuple(prompt), tuple(sequence.tokens[len(prompt) :]), sequence.request)
        said = answer_logits(draft, text)
        # Drafted further than is played, as for several lookaheads at once.
        rollouts = roll_out(draft, text, said, lookahead + 1, WIDTH)
        found = replay.play(replace(score(said, None, text, "coupled", WIDTH), rollouts=rollouts))
        expected = [(r.hit, r.drafted, r.accepted) for r in sequence.rounds[1:]]
        assert [(r.hit, r.drafted, r.accepted) for r in found] == expected[: len(found)]
        assert sum(r.accepted + 1 for r in found) >= 40 - 2 * lookahead - 2  # but what the end of the text cuts short
        for played, rows in zip(found, counted.rows[1:], strict=False):
            assert not played.rows[0] or played.rows[0] == rows[0]
        hits |= {r.hit for r in found}
        lengths |= {r.drafted for r in found}
    assert temperature == 0 or hits == {True, False}
    assert pair == "scripted" or len(lengths) > 1


def test_rows_are_those_of_branches_that_are_likely_enough() -> None:
    """Of a draft that is as sure of its token everywhere, so that nothing of them is unknown."""
    length, lookahead, least, sure = 12, 3, 0.05, 0.6
    weights = np.tile([sure, 0.3, 0.1], (length, lookahead + 1, 1))
    ids = np.tile(np.arange(3), (length, lookahead + 1, 1))
    request = RequestSampling(SamplingParams(temperature=0), 0, 1)
    text = Text((9,), (0,) * length, request)
    scored = Scored(text, Ranked(ids[:, 0], np.zeros(length, np.int64)), None, Rollouts(ids, weights))
    policy = Lists(uniform)
    found = RankedReplay(policy, lookahead=lookahead, budget=9, least_probability=least).play(scored)
    # All is accepted, so a round prepares for 0 to 3 tokens of it and another, and for 3 and any.
    reach = [sure**k * other for k in range(lookahead) for other in (0.3, 0.1)]
    reach += [sure**lookahead * each for each in (sure, 0.3, 0.1)]
    guessed = [each for each in reach if each >= least]
    rows = tuple(sum(each * sure**depth >= least for each in guessed) for depth in range(lookahead))
    assert rows[0] > rows[1] > rows[2] > 0
    # Needed with 0.6^4 (0.6^3 behind a short one), a branch is left at the token after which that is below 0.05.
    assert [(r.hit, r.drafted, r.accepted) for r in found] == [(True, 3, 3), (True, 2, 2), (True, 3, 3)]
    assert found[0].rows == found[2].rows == rows


def test_contexts_end_where_the_draft_model_does() -> None:
    draft = scripted(DRAFT, max_model_len=30)
    text = Text((1, 2), (4,) * 25, RequestSampling(SamplingParams(temperature=0), 0, 2))
    assert len(roll_out(draft, text, answer_logits(draft, text), 5, WIDTH).ids) == 30 - 2 - 5 + 1
