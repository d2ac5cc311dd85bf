"""The TensorRT plugins and the draft's network, against TensorRT's real Python bindings (see `tensorrt_stub.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensorrt_network import Builder, Network, Recorder
from tensorrt_stub import load_tensorrt
from tiny_models import FAMILIES, tiny_model

from saguaro.engines.base import ForwardBatch, causal_batch, fan_out_batch
from saguaro.engines.pytorch import PytorchEngine
from saguaro.errors import EngineError
from saguaro.plugins.fan_out import FanOut

trt = load_tensorrt()

from saguaro.engines import tensorrt as engine  # noqa: E402
from saguaro.plugins import tensorrt as plugin  # noqa: E402

# The bindings read a plugin's attributes back as arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

BLOCK, BLOCKS, VOCAB, MAX_LEN = 4, 64, 500, 128


class Draft:
    """The recorded network and its pools, run like an engine."""

    def __init__(self, model: Any, splits: int = 1) -> None:
        self.network = Network(0)
        self.written = engine.DraftNetwork(
            self.network,
            model,
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            capability=90,
            usual_rows=16,
            splits=splits,
        )
        pools = [name for name in self.network.inputs if "_pool." in name]
        self.pools = {
            name: torch.full((BLOCKS, *self.network.inputs[name][1][1:]), torch.nan, dtype=torch.float32)
            for name in pools
        }

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        outputs = self.network.run(engine.feeds(batch) | self.pools)
        for name, pool in self.pools.items():
            assert outputs[f"{name}.updated"] is pool
        return outputs["logits"]


def batches(seed: int) -> list[ForwardBatch]:
    """Two sequences: prefill, trunk and two branch steps of unequal fan-outs, one with a length nothing forks at."""
    rng = random.Random(seed)
    tables = [rng.sample(range(BLOCKS), 24)[i::2] for i in range(2)]

    def tokens(count: int) -> list[int]:
        return rng.choices(range(VOCAB), k=count)

    lengths, lookahead = [13, 6], 3
    fan_outs = [FanOut((2, 0, 1, 3)), FanOut((1, 4, 1, 1))]
    steps = [
        causal_batch([tokens(n) for n in lengths], [0, 0], tables, [2, 1], BLOCK),
        causal_batch([tokens(lookahead + 1)] * 2, lengths, tables, [4, 4], BLOCK),
    ]
    for depth in range(2):
        ids = torch.tensor(tokens(sum(f.branches for f in fan_outs)))
        steps.append(fan_out_batch(ids, fan_outs, lengths, tables, depth, BLOCK))
    return steps


def pytorch(model: Any) -> PytorchEngine:
    made = PytorchEngine(model, vocab_size=VOCAB, max_model_len=MAX_LEN, block_size=BLOCK, num_blocks=BLOCKS)
    for pool in (*made._pool.keys, *made._pool.values):
        pool.fill_(torch.nan)
    return made


@pytest.mark.parametrize(
    ("family", "options", "splits"),
    [(family, {}, 1) for family in FAMILIES]
    + [("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 1), ("qwen3", {}, 4)],
)
def test_the_network_computes_what_the_pytorch_engine_does(family: str, options: dict[str, Any], splits: int) -> None:
    draft = Draft(tiny_model(family, **options), splits)
    reference = pytorch(tiny_model(family, **options))
    for step, batch in enumerate(batches(seed=0)):
        logits = draft.forward(batch)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(
            logits, reference.forward(batch).logits, rtol=0, atol=1e-4, msg=lambda m, step=step: f"step {step}: {m}"
        )
