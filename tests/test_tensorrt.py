"""The TensorRT plugins and the draft's network, against TensorRT's real Python bindings.

What is checked by what: the bindings by `tensorrt_stub.py`, calls and layers by `tensorrt_network.py`. That TensorRT's
native library takes network and kernels, and that they are fast, needs a GPU.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saguaro.engines.base import ForwardBatch, causal_batch, fan_out_batch
from saguaro.engines.pytorch import PytorchEngine
from saguaro.errors import EngineError
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.rows import RowTensors
from tensorrt_stub import load_tensorrt
from tiny_models import FAMILIES, VOCAB_ROWS, tiny_model

triton = pytest.importorskip(
    "triton", reason="the kernel language comes with torch's CUDA builds and the extra `kernels`"
)
trt = load_tensorrt()

from saguaro.engines.inputs import parts  # noqa: E402
from saguaro.engines.tensorrt import network as engine  # noqa: E402
from saguaro.plugins import tensorrt as plugin  # noqa: E402
from tensorrt_network import Builder, Expressions, Network, Recorder, describe, descriptions  # noqa: E402
from tensorrt_runtime import compiled  # noqa: E402

# The bindings read a plugin's attributes back as arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

BLOCK, BLOCKS, VOCAB, MAX_LEN = 4, 64, 500, 128
FLOAT, BF16, INT32 = trt.DataType.FLOAT, trt.DataType.BF16, trt.DataType.INT32
SIZES = {"vocab_size": VOCAB, "max_model_len": MAX_LEN, "block_size": BLOCK}
OPTIONS = SIZES | {"capability": 90}


# The network ----------------------------------------------------------------------------------------------------------


class Draft:
    """The recorded network and its pools, run like an engine."""

    def __init__(self, model: Any, splits: int = 1, **options: Any) -> None:
        self.network = Network(0)
        # Kept, for the network's constants are memory of it.
        self.written = engine.DraftNetwork(self.network, model, **OPTIONS, usual_rows=16, splits=splits, **options)
        self.pools = {
            name: torch.full((BLOCKS, *shape[1:]), torch.nan)
            for name, (_, shape) in self.network.inputs.items()
            if "_pool." in name
        }

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        mask = batch.positions if batch.fan_out is None else batch.fan_out
        rows = RowTensors.of(batch.rows, batch.block_tables, mask)
        (part,) = parts(batch, rows, {"N": len(batch.token_ids), "S": len(batch.rows), "W": BLOCKS})
        inputs = {name: tensor.to(torch.int32) for name, tensor in part.inputs.items()}
        outputs = self.network.run(inputs | self.pools)
        assert all(outputs.pop(f"{name}.updated") is pool for name, pool in self.pools.items())
        (logits,) = outputs.values()
        return logits


def batches(seed: int) -> list[ForwardBatch]:
    """Two sequences: prefill, trunk and two branch steps of unequal fan-outs, one with a length nothing forks at."""
    rng = random.Random(seed)
    blocks = rng.sample(range(BLOCKS), 24)
    tables, lengths, lookahead = [blocks[:12], blocks[12:]], [13, 6], 3
    fan_outs = [FanOut((2, 0, 1, 3)), FanOut((1, 4, 1, 1))]

    def tokens(count: int) -> list[int]:
        return rng.choices(range(VOCAB), k=count)

    steps = [
        causal_batch([tokens(n) for n in lengths], [0, 0], tables, [2, 1], BLOCK),
        causal_batch([tokens(lookahead + 1) for _ in lengths], lengths, tables, [4, 4], BLOCK),
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


ALL_BIASES = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "splits", "options"),
    [
        *((family, 1, {}) for family in FAMILIES),
        ("llama", 1, ALL_BIASES),
        ("qwen2", 1, {"rope_parameters": YARN}),
        ("qwen3", 4, {}),
    ],
)
def test_the_network_computes_what_the_pytorch_engine_does(family: str, splits: int, options: dict[str, Any]) -> None:
    draft, reference = Draft(tiny_model(family, **options), splits), pytorch(tiny_model(family, **options))
    for step, batch in enumerate(batches(seed=0)):
        logits = draft.forward(batch)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(
            logits, reference.forward(batch).logits, rtol=0, atol=1e-4, msg=lambda m, step=step: f"step {step}: {m}"
        )


def test_with_the_real_kernels() -> None:
    """Plugins run from Python, by the bindings' own code, on kernels in Triton's interpreter."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            Path(__file__).parent / "tensorrt_kernels.py",
        ],
        # Plugins of pytest's are not needed, and slow to import.
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout


def test_a_plan_is_built_with_shapes_for_every_input() -> None:
    model = tiny_model("llama", torch.bfloat16, tie_word_embeddings=True)
    limits = engine.Limits(max_sequences=8, max_rows=512, usual_rows=16, max_blocks=1000, table_width=48)
    plan = compiled(model, limits, **SIZES)
    network, config = plan.network, plan.config
    assert network.flags == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert ("set_preview_feature", {"feature": trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, "enable": True}) in (
        config.calls
    )
    ((_, added),) = [call for call in config.calls if call[0] == "add_optimization_profile"]
    shapes = {call["input"]: (call["min"], call["opt"], call["max"]) for _, call in added["profile"].calls}
    assert shapes.keys() == network.inputs.keys()
    for name, (_, declared) in network.inputs.items():
        for size, least, usual, most in zip(declared, *shapes[name], strict=True):
            assert (least, usual, most) == (size,) * 3 if size != -1 else 1 <= least <= usual <= most
    assert shapes["block_table"][2] == (8, 48)
    assert shapes["key_pool.2"][2] == (1000, BLOCK, 2, 16)
    # bfloat16 throughout, and the head's constant is the embedding's.
    types = {tensor.name: tensor.dtype for tensor in network.outputs}
    assert types.pop("logits") == FLOAT
    assert set(types.values()) == {BF16}
    constants = [layer for layer in network.layers if layer.kind == "add_constant"]
    assert sum(tuple(layer.arguments["shape"]) == (VOCAB, 96) for layer in constants) == 1


def test_a_refused_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "result", lambda self, name, values, returns: made.get(name))
    made = {
        "create_network": Network(0),
        "create_builder_config": Recorder(trt.IBuilderConfig),
        "create_optimization_profile": Recorder(trt.IOptimizationProfile),
    }
    with pytest.raises(EngineError, match="could not build"):
        compiled(tiny_model("llama"), engine.Limits(1, 8, 4, 10, 8), **SIZES)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"hidden_act": "gelu"}, {}, "activation is 'gelu'"),
        ({"dtype": torch.float64}, {}, "not torch.float64"),
        ({}, {"vocab_size": VOCAB_ROWS + 1}, "mixes two models"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "rope_type 'dynamic'"),
    ],
)
def test_models_that_would_not_be_exact_are_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        engine.DraftNetwork(Network(0), tiny_model("llama", **options), **OPTIONS | changes, usual_rows=16)


def test_a_parameter_that_the_network_ignores_is_refused() -> None:
    model = tiny_model("llama")
    model.base_model.layers[1].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(EngineError, match="layers.1.mlp.extra.weight"):
        engine.DraftNetwork(Network(0), model, **OPTIONS, usual_rows=16)


def test_limits_must_make_sense() -> None:
    with pytest.raises(EngineError, match="usual_rows is 9"):
        engine.Limits(max_sequences=1, max_rows=8, usual_rows=9, max_blocks=1, table_width=1)
    with pytest.raises(EngineError, match="max_blocks must be"):
        engine.Limits(max_sequences=1, max_rows=8, usual_rows=8, max_blocks=0, table_width=1)


# The plugins ----------------------------------------------------------------------------------------------------------

H, KV, D = 8, 2, 64
UPDATE = {
    "key": (BF16, (-1, KV, D)),
    "value": (BF16, (-1, KV, D)),
    "slots": (INT32, (-1,)),
    "key_pool": (BF16, (-1, BLOCK, KV, D)),
    "value_pool": (BF16, (-1, BLOCK, KV, D)),
}
ATTEND = {
    "query": (BF16, (-1, H, D)),
    "key_pool": (BF16, (-1, BLOCK, KV, D)),
    "value_pool": (BF16, (-1, BLOCK, KV, D)),
    "block_table": (INT32, (-1, -1)),
    "sequences": (INT32, (-1, 6)),
    "fork": (INT32, (-1,)),
    "branch": (INT32, (-1,)),
}
ATTRIBUTES = {"scale": 0.125, "window": 0, "soft_cap": 0.0, "splits": 1, "usual_rows": 16, "capability": 90}


def inputs(network: Network, described: dict[str, Any]) -> list[Any]:
    return [network.add_input(name, dtype, shape) for name, (dtype, shape) in described.items()]


def add(described: dict[str, Any], **attributes: Any) -> Network:
    network = Network(0)
    if "key" in described:
        plugin.update_kv(network, *inputs(network, described), **{"capability": 90} | attributes)
    else:
        plugin.fan_out_attention(network, *inputs(network, described), **ATTRIBUTES | attributes)
    return network


@pytest.mark.parametrize(
    ("described", "name", "change", "message"),
    [
        (UPDATE, "key", (INT32, (-1, KV, D)), "key is INT32"),
        (UPDATE, "value", (FLOAT, (-1, KV, D)), "value is FLOAT, but must be BF16 like key"),
        (UPDATE, "value", (BF16, (-1, KV, 32)), "value has the shape .* with D = 64 as in key"),
        (UPDATE, "slots", (trt.DataType.INT64, (-1,)), "slots is INT64, but must be INT32"),
        (UPDATE, "slots", (INT32, (-1, 1)), "slots has the shape"),
        (UPDATE, "key_pool", (BF16, (-1, BLOCK, KV)), r"key_pool has the shape .* must be \[B, BLOCK_SIZE, KV_HEADS"),
        (UPDATE, "value_pool", (BF16, (-1, 8, KV, D)), "value_pool has .* BLOCK_SIZE = 4 as in key_pool"),
        (ATTEND, "query", (trt.DataType.INT8, (-1, H, D)), "query is INT8, but must be FLOAT or HALF or BF16"),
        (ATTEND, "query", (BF16, (-1, 7, D)), "heads: needs a multiple of the 2"),
        (ATTEND, "query", (BF16, (-1, -1, D)), "query has .* H must not be open"),
        (ATTEND, "key_pool", (BF16, (-1, -1, KV, D)), "key_pool has .* BLOCK_SIZE must not be open"),
        (ATTEND, "key_pool", (FLOAT, (-1, BLOCK, KV, D)), "key_pool is FLOAT, but must be BF16 like query"),
        (ATTEND, "value_pool", (BF16, (-1, BLOCK, 4, D)), "value_pool has .* KV_HEADS = 2 as in key_pool"),
        (ATTEND, "block_table", (INT32, (-1,)), "block_table has the shape"),
        (ATTEND, "sequences", (INT32, (-1, 5)), r"sequences has .* must be \[S, 6\]"),
        (ATTEND, "fork", (BF16, (-1,)), "fork is BF16, but must be INT32"),
        (ATTEND, "branch", (INT32, (3,)), None),  # as far as can be known
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(described: Any, name: str, change: Any, message: str) -> None:
    if message is None:
        add(described | {name: change})
        return
    with pytest.raises(EngineError, match=message):
        add(described | {name: change})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"scale": 1}, "scale must be of type float"),
        ({"scale": float("nan")}, "scale: needs a positive"),
        ({"window": -1}, "window"),
        ({"soft_cap": None}, "soft_cap must be of type float"),
        ({"splits": 3}, "splits: needs a power of two"),
        ({"usual_rows": 0}, "most_rows"),
        ({"capability": 75}, "capability must be 80"),
        ({"capability": "90"}, "capability must be of type int"),
    ],
)
def test_attributes_that_do_not_fit_are_refused_by_name(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        add(ATTEND, **attributes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (ATTRIBUTES | {"scale": 1}, "Unexpected type .* for attribute 'scale'"),
        (ATTRIBUTES | {"speed": 1}, "Unexpected attribute speed"),
        ({k: v for k, v in ATTRIBUTES.items() if k != "window"}, "Unexpected schema"),
    ],
)
def test_tensorrt_itself_refuses_other_attributes(attributes: dict[str, Any], message: str) -> None:
    network = Network(0)
    with pytest.raises(ValueError, match=message):
        trt.plugin.op.saguaro.FanOutAttention(*inputs(network, ATTEND), **attributes)


def test_tensorrt_itself_refuses_other_inputs() -> None:
    network = Network(0)
    with pytest.raises(ValueError, match="Unexpected schema"):
        trt.plugin.op.saguaro.FanOutAttention(*inputs(network, ATTEND)[1:], **ATTRIBUTES)
    with pytest.raises(ValueError, match="Expected trt.ITensor"):
        trt.plugin.op.saguaro.UpdateKv(1, 2, 3, 4, 5, capability=90)


def test_outputs_are_described_and_aliased() -> None:
    (update,) = [layer.arguments["plugin"] for layer in add(UPDATE).layers if layer.kind == "add_plugin"]
    pool = UPDATE["key_pool"]
    assert describe(update, list(UPDATE.values())) == [pool, pool]
    assert [update.get_aliased_input(i) for i in range(2)] == [3, 4]
    one, parts, merge = (
        layer.arguments["plugin"]
        for splits in (1, 8)
        for layer in add(ATTEND, splits=splits).layers
        if layer.kind == "add_plugin"
    )
    query = ATTEND["query"]
    assert describe(one, list(ATTEND.values()))[0] == query
    split = [(FLOAT, (8, -1, H, D)), (FLOAT, (8, -1, H))]
    assert describe(parts, list(ATTEND.values())) == split
    assert describe(merge, split) == [query]
    assert {p.get_aliased_input(i) for p in (one, parts) for i in range(2)} == {-1}


def test_kernels_are_compiled_for_the_way_tensorrt_starts_them(tmp_path: Path) -> None:
    """Inputs, numbers and outputs are all the parameters there are, and the grid follows from the shapes."""
    rows, sequences, splits, head_dim = 33, 3, 2, 128  # the largest head, which takes most shared memory

    def sized(described: dict[str, Any]) -> dict[str, Any]:
        return {
            name: (dtype, tuple(head_dim if n == D else n for n in shape)) for name, (dtype, shape) in described.items()
        }

    networks = [add(sized(UPDATE)), add(sized(ATTEND), splits=splits)]
    update, attention, merge = (
        layer.arguments["plugin"] for network in networks for layer in network.layers if layer.kind == "add_plugin"
    )
    pool = (BF16, (100, BLOCK, KV, head_dim))
    new, numbers = (BF16, (rows, KV, head_dim)), (INT32, (rows,))
    mask = [(INT32, (sequences, 7)), (INT32, (sequences, 6)), numbers, numbers]
    parts = [(FLOAT, (splits, rows, H, head_dim)), (FLOAT, (splits, rows, H))]
    for made, given, grid, arguments in [
        (update, [new, new, numbers, pool, pool], (rows, 1, 1), [400]),
        (attention, [(BF16, (rows, H, head_dim)), pool, pool, *mask], (3, sequences * KV, splits), [rows, 7, 100]),
        (merge, parts, (rows, H, 1), [rows]),
    ]:
        outputs = describe(made, given)
        every = descriptions([*given, *outputs])
        made.set_tactic(0)
        setter = Arguments()
        made.get_launch_params([], every, len(given), SimpleNamespace(), setter, Expressions())
        name, ptx = made.get_kernel([e.desc for e in every[: len(given)]], [e.desc for e in every[len(given) :]])
        _, _, launch, numbers_given = made.aot_impl_function(
            *made.input_descs, *made.attrs.values(), made.output_descs, 0
        )
        assert tuple(getattr(launch, f"grid_{axis}")._expr.value for axis in "xyz") == grid
        assert [number._expr.value for number in numbers_given] == arguments
        assert setter.nbSymExprs == len(arguments)
        text = ptx.decode()
        header = text[text.index(".entry") : text.index("{", text.index(".entry"))]
        assert len(re.findall(r"\.param", header)) == len(given) + len(arguments) + len(outputs)
        assert f".reqntid {launch.block_x._expr.value}" in header
        assert launch.shared_mem._expr.value <= 48 * 1024
        (tmp_path / "kernel.ptx").write_bytes(ptx)
        subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"],
            cwd=tmp_path,
            check=True,
            timeout=60,
        )
        assert name.encode() in (tmp_path / "kernel.cubin").read_bytes()


class Arguments(dict[int, Any]):
    """Takes what `get_launch_params` sets."""

    nbSymExprs = 0


def test_scratch_memory_that_a_kernel_uses_is_not_taken_away() -> None:
    ptx = ".entry k(\n .param .u64 k_param_0,\n .param .u64 k_param_1\n)\n{ ld.param.u64 %rd1, [k_param_1]; }"
    assert plugin.without_scratch(ptx.replace("[k_param_1]", "[k_param_0]"), "k", 1).count(".param .u64") == 1
    with pytest.raises(EngineError, match="scratch memory"):
        plugin.without_scratch(ptx, "k", 1)
    with pytest.raises(EngineError, match="has 2 parameters, but TensorRT passes 3"):
        plugin.without_scratch(ptx, "k", 3)


# The recorder can fail ------------------------------------------------------------------------------------------------


def test_the_recorder_takes_only_what_the_bindings_take() -> None:
    network = Network(0)
    data = network.add_input("data", FLOAT, (-1, 4))
    with pytest.raises(AttributeError):
        network.add_gathr(data, data, 0)
    with pytest.raises(TypeError, match="incompatible"):
        network.add_gather(data, data)
    with pytest.raises(TypeError, match="incompatible"):
        network.add_gather(data, data, 0.0)
    with pytest.raises(TypeError, match="incompatible"):
        network.add_elementwise(data, data, trt.UnaryOperation.SQRT)
    with pytest.raises(TypeError, match="incompatible"):
        network.add_input("more", FLOAT, ("N",))
    layer = network.add_shuffle(data)
    with pytest.raises(AttributeError):
        layer.reshape = (4, -1)
    with pytest.raises(TypeError, match="must be"):
        layer.reshape_dims = "4"
    with pytest.raises(AttributeError):
        data.set_dynamic_range(0, 1)
    with pytest.raises(AssertionError, match="broadcasts"):
        _ = (
            network.add_elementwise(data, network.add_input("one", FLOAT, (4,)), trt.ElementWiseOperation.SUM)
            .get_output(0)
            .shape
        )
