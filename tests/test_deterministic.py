"""`deterministic`: a row's logits have the same bits whatever K is, and whatever else is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import replays
from conftest import require_compiler
from harness import Pair
from saguaro.engines import ENGINES, load_engine
from saguaro.engines.base import causal_batch
from saguaro.engines.fixed_rows import ROWS, fixed_rows
from saguaro.engines.linears import pack_linears
from saguaro.engines.manifest import QUANTISED, Dtype
from saguaro.engines.pytorch import PytorchEngine, compute_in_float32, convert
from saguaro.errors import EngineError
from saguaro.orchestrator.types import SamplingParams
from tiny_models import save_engine, tiny_model


def model(family: str, dtype: torch.dtype, replace_linears: Callable[[Any], None] | None = None) -> Any:
    # Wide enough for kernels to cut their sums, and to cut them by the number of rows.
    made = tiny_model(family, dtype, hidden_size=192, intermediate_size=320, num_hidden_layers=2)
    if replace_linears:
        compute_in_float32(made, replace_linears)
    return made


MODELS: dict[str, Callable[[], Any]] = {
    "float32": lambda: model("llama", torch.float32),
    "float32-packed": lambda: model("qwen2", torch.float32, pack_linears),
    "bfloat16": lambda: model("qwen2", torch.bfloat16),
    "int8": lambda: quantised("int8"),
    "int4": lambda: quantised("int4"),
}


def quantised(dtype: Dtype) -> Any:
    require_compiler()
    made = model("qwen2", torch.bfloat16)
    convert(made, dtype)
    return made


def engine(made: Any, deterministic: bool) -> PytorchEngine:
    return PytorchEngine(
        made,
        vocab_size=500,
        max_model_len=64,
        block_size=replays.BLOCK,
        num_blocks=replays.BLOCKS,
        deterministic=deterministic,
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    """Alone with K = 1..8, in batches of 2..8 with different K, prompts whole and cut, blocks scattered or not."""
    fixed = engine(MODELS[name](), True)
    expected = replays.one_by_one(fixed)
    for what, sequence, logits in replays.in_company(fixed):
        assert torch.equal(logits, expected[sequence]), what
    plain = replays.replay(engine(MODELS[name](), False), [[replays.LENGTH]], [0], range(replays.BLOCKS))[0]
    scale = float(plain.abs().max())
    torch.testing.assert_close(expected[0], plain, rtol=0, atol=scale * (1e-5 if name.startswith("float") else 0.05))


@pytest.mark.deployment
@pytest.mark.parametrize("dtype", ["float32", *QUANTISED])
def test_ranks_of_a_group_give_the_same_bits_in_any_company(dtype: Dtype, tmp_path: Path) -> None:
    """Sums over four ranks too: which rank's part comes first may depend on an element's place."""
    if dtype in QUANTISED:
        require_compiler()
    assert ranks.run(4, partial(ranks.compute_deterministic, dtype=dtype), tmp_path) == [0] * 4
    assert torch.load(tmp_path / "different.pt") == []


@pytest.mark.parametrize("name", QUANTISED)
def test_i12_a_quantised_target_verifies_what_it_would_have_decoded(name: str) -> None:
    """I-12: logits of a trunk within 1e-4 of one-by-one, near-ties reported; with `deterministic` the same bits."""
    made = MODELS[name]()
    loose = engine(made, False)
    expected = replays.one_by_one(loose)
    for _, sequence, logits in replays.in_company(loose):
        scale = float(expected[sequence].abs().max())
        assert float((logits - expected[sequence]).abs().max()) <= 1e-4 * scale
        best, second = expected[sequence].topk(2).values.unbind(-1)
        differ = logits.argmax(-1) != expected[sequence].argmax(-1)
        assert not (best - second)[differ].ge(1e-4 * scale).any()
    assert loose.logit_tolerance > 0  # closer than that, a choice is reported as a near-tie
    assert engine(made, True).logit_tolerance == 0


def test_all_modes_and_lookaheads_emit_the_same_tokens_in_low_precision() -> None:
    """Greedy, where rounding decides: of a target with near-ties everywhere."""
    made = MODELS["bfloat16"]()
    with torch.no_grad():  # logits within a few roundings of each other
        made.get_input_embeddings().weight.mul_(0.01)
    target, draft = engine(made, True), engine(MODELS["bfloat16"](), False)
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [[1, 2, 3], [7, 8, 9, 10, 11]]
    plain = [Pair(target, draft).run(prompt, params, "ar") for prompt in prompts]
    for lookahead in (2, 8):
        pair = Pair(target, draft, lookahead=lookahead, budget=2)
        batch = [pair.sequence(prompt, params, mode) for prompt in prompts for mode in ("sd", "ssd")]
        assert pair.finish(batch) == [tokens for tokens in plain for _ in range(2)]


def test_rows_come_in_their_places_and_after_what_they_see() -> None:
    tokens = [[5] * 20, [6], [7] * 9]
    tables = [list(range(6)), [6, 7], [8, 9, 10, 11]]
    batch = causal_batch(tokens, [3, 4, 0], tables, [2, 1, 0], 4)
    parts = fixed_rows(batch)
    seen: set[int] = set()
    for part in parts:
        assert len(set(part.places.tolist())) == len(part.places) <= ROWS
        assert torch.equal(part.places, part.batch.positions % ROWS)
        seen |= set(part.batch.slots.tolist())
        first = 0
        for count, start, table in zip(part.batch.rows, (3, 4, 0), tables, strict=True):
            for position in part.batch.positions[first : first + count].tolist():
                assert {table[p // 4] * 4 + p % 4 for p in range(start, position + 1)} <= seen
            first += count
    assert seen == set(batch.slots.tolist())
    assert len(parts) == 5  # 30 rows; four would do if every place were taken
    assert sorted(index for part in parts for index in part.logits) == [0, 1, 2]


def test_an_engine_that_cannot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_engine(tiny_model("llama"), tmp_path)
    options = {"block_size": replays.BLOCK, "num_blocks": 4}
    assert load_engine(tmp_path, deterministic=True, **options).logit_tolerance == 0
    monkeypatch.setattr("saguaro.engines.ENGINES", {**ENGINES, "pytorch": "test_deterministic:Incapable"})
    with pytest.raises(EngineError, match="speculation.deterministic is set, but the logits of the engine 'pytorch'"):
        load_engine(tmp_path, deterministic=True, **options)


class Incapable:
    @classmethod
    def load(cls, directory: Path, *, block_size: int, num_blocks: int) -> PytorchEngine:
        raise AssertionError("it is loaded")
