"""Log probabilities: real values for every emitted token, however it was speculated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Pair
from saguaro.engines.pytorch import PytorchEngine
from saguaro.errors import ConfigError
from saguaro.orchestrator.logprobs import token_logprobs
from saguaro.orchestrator.types import Mode, SamplingParams, TokenLogprobs
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def engines() -> tuple[PytorchEngine, PytorchEngine]:
    """A float64 pair that agrees often, but not always."""
    target, draft = (tiny_model("qwen2", dtype=torch.float64) for _ in range(2))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    options = {"vocab_size": target.config.vocab_size, "max_model_len": 128, "block_size": 8}
    return PytorchEngine(target, num_blocks=64, **options), PytorchEngine(draft, num_blocks=256, **options)


def decode(
    engines: tuple[PytorchEngine, PytorchEngine], params: SamplingParams, mode: Mode
) -> tuple[list[int], list[TokenLogprobs]]:
    pair = Pair(*engines)
    sequence = pair.sequence([5, 6, 7], params, mode)
    return pair.finish([sequence])[0], sequence.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [0, 2])
def test_i17_speculated_tokens_have_the_values_of_plain_decoding(
    engines: tuple[PytorchEngine, PytorchEngine], temperature: float, count: int
) -> None:
    """I-17: an engine gave 0.0 for every speculated token. Also: after penalties they are still the model's own."""
    params = SamplingParams(
        temperature=temperature, top_k=9, presence_penalty=0.5, seed=4, max_tokens=24, logprobs=count
    )
    tokens, plain = decode(engines, params, "ar")
    assert [entry.token for entry in plain] == tokens
    assert all(entry.logprob < 0 for entry in plain)
    assert {len(entry.top) for entry in plain} == {count}
    for mode in ("sd", "ssd"):
        others = decode(engines, params, mode)  # type: ignore[arg-type]
        assert others[0] == tokens
        for one, other in zip(plain, others[1], strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-9)
            assert [token for token, _ in other.top] == [token for token, _ in one.top]
            assert [value for _, value in other.top] == pytest.approx([value for _, value in one.top], abs=1e-9)


def test_they_are_the_models_own_whatever_the_parameters(engines: tuple[PytorchEngine, PytorchEngine]) -> None:
    """The log softmax of raw logits: an oracle forward over the whole text."""
    params = SamplingParams(temperature=0.5, logit_bias={3: 5.0}, top_p=0.8, seed=1, max_tokens=12, logprobs=3)
    tokens, found = decode(engines, params, "ssd")
    oracle = tiny_model("qwen2", dtype=torch.float64)
    with torch.no_grad():
        logits = oracle(torch.tensor([[5, 6, 7, *tokens]])).logits[0, 2:-1]
    rows = logits.double().log_softmax(-1)
    for entry, row in zip(found, rows, strict=True):
        best = row.topk(3)
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-6)
        assert [token for token, _ in entry.top] == best.indices.tolist()


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_nothing_is_kept_of_tokens_after_the_end(engines: tuple[PytorchEngine, PytorchEngine], mode: Mode) -> None:
    tokens, _ = decode(engines, SamplingParams(temperature=0, max_tokens=24, logprobs=0), "ar")
    end = next(index for index, token in enumerate(tokens) if index > 3 and token not in tokens[:index])
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, stop_token_ids=(tokens[end],))
    shorter, found = decode(engines, params, mode)
    assert shorter == tokens[: end + 1]
    assert [entry.token for entry in found] == shorter


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.data())
def test_each_is_below_zero_unless_certain_and_the_best_are_the_best(row: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    count = data.draw(st.integers(0, 20))
    (entry,) = token_logprobs(torch.tensor([row], dtype=torch.float64), [token], count)
    top = max(row)
    total = math.log(sum(math.exp(value - top) for value in row))
    assert entry.logprob == pytest.approx(row[token] - top - total, abs=1e-9)
    values = [value for _, value in entry.top]
    assert values == sorted(values, reverse=True)
    assert len(values) == min(count, len(row))


def test_impossible_tokens_are_not_listed() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, -math.inf, -math.inf]]), [0], 3)
    assert entry == TokenLogprobs(0, 0.0, ((0, 0.0),))  # certain: the one case of an exact 0


@pytest.mark.parametrize("count", [-1, 21])
def test_how_many_is_limited(count: int) -> None:
    with pytest.raises(ConfigError, match=f"logprobs must be between 0 and 20, got {count}"):
        SamplingParams(logprobs=count)
