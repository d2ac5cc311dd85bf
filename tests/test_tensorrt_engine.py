"""The TensorRT engine's own loop and its builder, on stand-ins for TensorRT's runtime and CUDA (`tensorrt_runtime.py`).

The engine's contract is in `test_engines.py`; what the network computes, in `test_tensorrt.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Pair
from saguaro.engines import load_engine
from saguaro.engines.base import ForwardBatch, causal_batch, fan_out_batch
from saguaro.engines.manifest import DRAFT_VOCAB, Manifest
from saguaro.engines.pytorch import PytorchEngine
from saguaro.errors import CapacityError, ConfigError, EngineError
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.types import SamplingParams
from saguaro.plugins.attention import visible_columns
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.rows import RowTensors
from tensorrt_stub import load_tensorrt
from tiny_models import tiny_model

pytest.importorskip("triton", reason="the kernel language comes with torch's CUDA builds and the extra `kernels`")
trt = load_tensorrt()

from saguaro.build import driver  # noqa: E402
from saguaro.build.recipe import Recipe, TensorrtOptions, Tiny  # noqa: E402
from saguaro.build.tensorrt import TensorrtBuild  # noqa: E402
from saguaro.build.tiny import TinyWeights  # noqa: E402
from saguaro.engines.cuda import Cuda  # noqa: E402
from saguaro.engines.inputs import INPUTS, Layout, parts  # noqa: E402
from saguaro.engines.tensorrt import engine as runtime  # noqa: E402
from saguaro.engines.tensorrt.engine import TensorrtEngine  # noqa: E402
from saguaro.engines.tensorrt.log import Log  # noqa: E402
from scripts import load_script  # noqa: E402
from tensorrt_network import Builder  # noqa: E402
from tensorrt_runtime import Context, Runtime, Stream, engine_of  # noqa: E402

# The bindings read a plugin's attributes back as arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
BLOCK, BLOCKS, VOCAB, MAX_LEN = 4, 64, 500, 128


def pytorch(model: Any) -> PytorchEngine:
    made = PytorchEngine(model, vocab_size=VOCAB, max_model_len=MAX_LEN, block_size=BLOCK, num_blocks=BLOCKS)
    for pool in (*made._pool.keys, *made._pool.values):
        pool.fill_(torch.nan)
    return made


def rounds(seed: int) -> Iterator[ForwardBatch]:
    """What a draft is asked in a round: prompts, trunks, and branches of unequal fan-outs at two depths."""
    draw = random.Random(seed)
    blocks = draw.sample(range(BLOCKS), 30)
    tables, lengths, lookahead = [blocks[:14], blocks[14:22], blocks[22:]], [21, 6, 9], 2
    fan_outs = [FanOut((2, 0, 3)), FanOut((1, 4, 1)), FanOut((0, 0, 1))]

    def tokens(count: int) -> list[int]:
        return draw.choices(range(VOCAB), k=count)

    yield causal_batch([tokens(n) for n in lengths], [0, 0, 0], tables, [0, 0, 0], BLOCK)
    yield causal_batch([tokens(lookahead + 1) for _ in lengths], lengths, tables, [3, 3, 3], BLOCK)
    for depth in range(2):
        ids = torch.tensor(tokens(sum(f.branches for f in fan_outs)))
        yield fan_out_batch(ids, fan_outs, lengths, tables, depth, BLOCK)


# The loop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_rows", "max_sequences"), [(64, 4), (5, 2), (7, 1)])
def test_logits_and_kv_are_those_of_the_pytorch_engine(max_rows: int, max_sequences: int) -> None:
    """However large the engine is, and so however a batch is padded or cut: also the KV, and nothing beside it."""
    engine = engine_of(tiny_model("qwen3"), max_rows=max_rows, max_sequences=max_sequences)
    reference = pytorch(tiny_model("qwen3"))
    for batch in rounds(seed=max_rows):
        torch.testing.assert_close(
            engine.forward(batch).logits, reference.forward(batch).logits, rtol=0, atol=1e-4, equal_nan=False
        )
    for name, pool in engine._memory.pools.items():
        kind, _, layer = name.partition("_pool.")
        expected = {"key": reference._pool.keys, "value": reference._pool.values}[kind][int(layer)]
        torch.testing.assert_close(pool, expected, rtol=0, atol=1e-4, equal_nan=True)


def test_trunks_and_branches_replay_a_graph_and_prompts_do_not() -> None:
    engine = engine_of(tiny_model("llama", num_hidden_layers=1), max_rows=40, max_sequences=4)
    stream = engine._cuda
    assert isinstance(stream, Stream)
    contexts = engine._prompts._context.engine.contexts
    assert [context.is_captured for context in contexts] == [False, *[True] * 7]  # 1, 2, 4, 8, 16, 32, 40 rows
    for batch, expected in zip(rounds(seed=0), ["execute", "replay", "replay", "replay"], strict=True):
        stream.log.clear()
        engine.forward(batch)
        assert stream.log == ["upload", expected]


def test_logits_are_the_callers_own() -> None:
    engine = engine_of(tiny_model("llama", num_hidden_layers=1))
    first, second = (list(rounds(seed)) for seed in (0, 1))
    engine.forward(first[0])
    kept = engine.forward(first[1]).logits
    copy = kept.clone()
    engine.forward(second[0])
    engine.forward(second[1])
    assert torch.equal(kept, copy)


def test_logits_wanted_in_any_order_over_several_parts() -> None:
    engine, reference = engine_of(tiny_model("llama"), max_rows=4), pytorch(tiny_model("llama"))
    batch = causal_batch([list(range(13))], [0], [range(8)], [13], BLOCK)
    batch = replace(batch, logit_rows=torch.tensor([12, 0, 7, 3]))
    torch.testing.assert_close(engine.forward(batch).logits, reference.forward(batch).logits, rtol=0, atol=1e-4)


def test_branches_that_need_more_columns_than_compiled_are_refused() -> None:
    engine = engine_of(tiny_model("llama", num_hidden_layers=1), num_blocks=300)
    batch = fan_out_batch(torch.zeros(40).long(), [FanOut((40,))], [100], [range(80)], 4, BLOCK)
    with pytest.raises(EngineError, match="takes 301 KV columns with its branches, but .* 256.*branch_columns"):
        engine.forward(batch)


def test_a_longer_block_table_than_compiled_is_no_matter_while_it_is_not_read() -> None:
    engine, reference = engine_of(tiny_model("llama")), pytorch(tiny_model("llama"))
    batch = causal_batch([[1, 2, 3]], [0], [[*range(BLOCKS), *range(BLOCKS)]], [3], BLOCK)
    torch.testing.assert_close(engine.forward(batch).logits, reference.forward(batch).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("refused", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_what_tensorrt_refuses_is_an_error(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, f"_{refused}", lambda self, **values: False)
    with pytest.raises(EngineError, match="TensorRT refused .*; its log says why"):
        engine_of(tiny_model("llama", num_hidden_layers=1))


@pytest.mark.parametrize(
    ("attribute", "stand_in", "message"),
    [
        ("bind", lambda self, layout: None, "TensorRT refused a forward"),  # inputs without shape and address
        ("enqueue", lambda self: None, "nothing was captured"),
        ("_set", lambda self, name, shape, address: None, "does not know the shape of .*key_pool"),
    ],
)
def test_a_loop_that_leaves_out_a_step_does_not_pass(
    attribute: str, stand_in: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime._Context, attribute, stand_in)
    with pytest.raises((EngineError, AssertionError), match=message):
        engine_of(tiny_model("llama", num_hidden_layers=1))


def test_pools_that_are_not_bound_in_place_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = runtime._Context._address
    elsewhere = torch.zeros(1 << 16)
    monkeypatch.setattr(
        runtime._Context,
        "_address",
        lambda self, name, address: bound(self, name, elsewhere.data_ptr() if "updated" in name else address),
    )
    with pytest.raises(AssertionError, match="must be the memory of"):
        engine_of(tiny_model("llama", num_hidden_layers=1))


def test_a_graph_must_not_be_captured_with_new_shapes_or_changed_afterwards() -> None:
    engine = engine_of(tiny_model("llama", num_hidden_layers=1))
    bucket = engine._buckets[-1]
    with pytest.raises(AssertionError, match="must be left alone"):
        bucket._context.bind(bucket._layout)
    engine._prompts.bind(bucket._layout)
    with engine._cuda.on_stream(), pytest.raises(AssertionError, match="would be captured"):
        engine._cuda.capture(engine._prompts.enqueue)


# Parts and their layout -----------------------------------------------------------------------------------------------


WIDTH = 30 + 4 + 20 * 4  # prefix, trunk and branches at four depths, at most
counts = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(1, 9), st.integers(1, 3))
def test_parts_are_the_batch_row_for_row(data: st.DataObject, max_rows: int, max_sequences: int) -> None:
    """Every row once and in order, with its token, place and columns; no part larger than allowed."""
    fans = data.draw(st.lists(counts, min_size=1, max_size=5).filter(lambda fans: sum(map(sum, fans)) > 0))
    prefixes = data.draw(st.lists(st.integers(0, 30), min_size=len(fans), max_size=len(fans)))
    tables = [[*range(200 * s, 200 * s + WIDTH)] for s in range(len(fans))]
    total = sum(map(sum, fans))
    if data.draw(st.booleans()):
        tokens, depth = torch.arange(total), data.draw(st.integers(0, 3))
        batch = fan_out_batch(tokens, [FanOut(tuple(fan)) for fan in fans], prefixes, tables, depth, 1)
    else:
        tokens = [list(range(sum(fan))) for fan in fans]
        wanted = [data.draw(st.integers(0, len(ids))) for ids in tokens]
        batch = causal_batch(tokens, prefixes, tables, wanted, 1)
    mask = batch.positions if batch.fan_out is None else batch.fan_out
    rows = RowTensors.of(batch.rows, batch.block_tables, mask)
    made = list(parts(batch, rows, {"N": max_rows, "S": max_sequences, "W": WIDTH}))

    for name in ("token_ids", "positions", "slots"):
        assert torch.equal(torch.cat([part.inputs[name] for part in made]), getattr(batch, name))
    found = [index for part in made for index in part.wanted]
    assert sorted(found) == list(range(len(batch.logit_rows)))
    row = 0
    for part in made:
        assert 1 <= part.rows <= max_rows
        assert len(part.inputs["sequences"]) <= max_sequences
        assert [row + int(r) for r in part.inputs["logit_rows"]] == batch.logit_rows[part.wanted].tolist()
        seen = {}
        for table, fields in zip(part.inputs["block_table"], part.inputs["sequences"].tolist(), strict=True):
            prefix, trunk, branches, steps, first, count = fields
            for r in range(first, first + count):
                own = torch.arange(steps) * branches + part.inputs["branch"][r] + prefix + trunk
                columns = [*range(prefix + int(part.inputs["fork"][r]) + 1), *own.tolist()]
                assert r not in seen
                seen[r] = [int(table[column]) for column in columns]
        for r in range(part.rows):
            sequence = next(s for s in range(len(fans)) if row < sum(batch.rows[: s + 1]))
            columns = visible_columns(mask, row, torch.arange(WIDTH)).nonzero()[:, 0].tolist()
            assert seen[r] == [tables[sequence][column] for column in columns]
            row += 1
    assert row == total


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.integers(1, 40))
def test_inputs_lie_apart_and_aligned(rows: int, logits: int, sequences: int, width: int) -> None:
    layout = Layout({"N": rows, "L": logits, "S": sequences, "W": width})
    ends = 0
    for name, shape in layout.shapes.items():
        assert layout.offsets[name] >= ends
        assert layout.offsets[name] * 4 % 256 == 0
        ends = layout.offsets[name] + torch.Size(shape).numel()
    assert ends <= layout.size
    padding = layout.pack({})
    assert (padding[layout.offsets["slots"] :][:rows] == -1).all()  # written nowhere
    assert not padding[layout.offsets["sequences"] :][: 6 * sequences].any()  # of no sequence
    given = {name: torch.ones([max(1, n // 2) for n in shape]) for name, shape in layout.shapes.items()}
    assert int(layout.pack(given).clamp(min=0).sum()) == sum(tensor.numel() for tensor in given.values())


# Drafting with it -----------------------------------------------------------------------------------------------------


SHALLOW = {"num_hidden_layers": 2}


def target() -> PytorchEngine:
    model = tiny_model("llama", **SHALLOW)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # agrees with its draft often, but not always
        parameter.data += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return pytorch(model)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_speculation_is_that_of_the_pytorch_engine(rule: Any) -> None:
    """Round for round over whole requests: the drafts, what is prepared, and so the text."""
    draw = random.Random(rule)
    prompts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (3, 11)]
    sent = []
    for draft in (engine_of(tiny_model("llama", **SHALLOW)), pytorch(tiny_model("llama", **SHALLOW))):
        pair = Pair(target(), draft, rule, lookahead=3, budget=5)
        params = [SamplingParams(temperature=t, seed=7, max_tokens=8) for t in (0.0, 0.8)]
        sequences = [pair.sequence(p, s, "ssd") for p, s in zip(prompts, params, strict=True)]
        texts = pair.finish(sequences)
        sent.append((texts, pair.channel.sent))
        assert {record.hit for sequence in sequences for record in sequence.rounds} >= {True, False}
    assert sent[0] == sent[1]
    plain = Pair(target(), pytorch(tiny_model("llama", **SHALLOW)), rule)
    if rule == "coupled":
        assert sent[0][0] == [plain.run(p, s, "ar") for p, s in zip(prompts, params, strict=True)]


def test_a_reduced_vocabulary_leaves_out_tokens_and_nothing_else() -> None:
    kept = sorted(random.Random(0).sample(range(VOCAB), 120))
    rest = [token for token in range(VOCAB) if token not in kept]
    for options in ({}, {"tie_word_embeddings": True}):
        engine = engine_of(tiny_model("qwen2", **SHALLOW, **options), kept=kept)
        reference = pytorch(tiny_model("qwen2", **SHALLOW, **options))
        for batch in rounds(seed=3):
            logits, expected = engine.forward(batch).logits, reference.forward(batch).logits
            assert (logits[:, rest] == -torch.inf).all()
            torch.testing.assert_close(logits[:, kept], expected[:, kept], rtol=0, atol=1e-4)


def test_a_reduced_vocabulary_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `coupled` the text is the target's; under `ratio` q is over what is kept, and sums to 1 there."""
    kept = list(range(60))
    draft = engine_of(tiny_model("llama", **SHALLOW), kept=kept)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=8) for t in (0.0, 1.0)]
    prompt = [5, 400, 17, 499, 80]
    for p in params:
        plain = Pair(target(), draft).run(prompt, p, "ar")
        assert Pair(target(), draft).run(prompt, p, "ssd") == plain
        assert any(token not in kept for token in plain)
    drafted = []
    draft_of = ModelDrafter.draft
    monkeypatch.setattr(ModelDrafter, "draft", lambda *given: drafted.append(draft_of(*given)) or drafted[-1])
    Pair(target(), draft, "ratio").run(prompt, params[1], "ssd")
    speculations = [speculation for made in drafted for row in made for speculation in row]
    assert speculations
    for speculation in speculations:
        assert set(speculation.tokens) <= set(kept)
        for probs in speculation.draft_probs or ():
            assert set(probs.ids) <= set(kept)
            assert abs(sum(probs.probs) - 1) < 1e-9


# Directories ----------------------------------------------------------------------------------------------------------

TINY = Tiny("llama", layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=300, max_model_len=64)
OPTIONS = TensorrtOptions(
    max_batch_size=2, max_rows=16, usual_rows=4, block_size=4, max_kv_tokens=256, branch_columns=64, splits=1
)


def build(
    directory: Path,
    dtype: Any = "float32",
    capability: str = "9.0",
    draft_vocab: int | None = None,
    **options: Any,
) -> Path:
    changed = replace(OPTIONS, **options)
    recipe = Recipe("test", "tensorrt", tiny=TINY, dtype=dtype, draft_vocab=draft_vocab, tensorrt=changed)
    work = TensorrtBuild(recipe, TinyWeights(TINY), capability=capability, timings=directory / "timings")
    read: list[int] = []
    made = directory / "engine"
    made.mkdir()
    work.write(made, "0" * 64, read.append)
    assert sum(read) == work.size
    return made


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "Builder", Builder)
    monkeypatch.setattr(trt, "Runtime", Runtime)
    monkeypatch.setattr(runtime, "Cuda", lambda device: Stream(device=device or torch.device("cpu")))


def load(directory: Path, **options: Any) -> Any:
    return load_engine(directory, **{"block_size": 4, "num_blocks": 60} | options)


@pytest.mark.usefixtures("stand_ins")
def test_a_built_engine_is_loaded_and_computes_what_the_pytorch_engine_does(tmp_path: Path) -> None:
    from saguaro.build.pytorch import PytorchBuild

    directory = build(tmp_path)
    engine = load(directory, group=None, device=torch.device("cpu"))  # as a rank does
    assert (engine.vocab_size, engine.max_model_len, engine.block_size, engine.num_blocks) == (300, 64, 4, 60)
    assert (tmp_path / "timings" / f"tensorrt-{trt.__version__}-9.0.cache").read_bytes() == b"times"
    manifest = Manifest.load(directory)
    assert (manifest.engine, manifest.device, manifest.dtype, manifest.tp) == ("tensorrt", "9.0", "float32", 1)
    assert manifest.versions["tensorrt"] == trt.__version__
    assert not manifest.damaged(directory)
    other = tmp_path / "pytorch"
    other.mkdir()
    PytorchBuild(Recipe("test", "pytorch", tiny=TINY, dtype="float32"), TinyWeights(TINY)).write(
        other, "0" * 64, lambda size: None
    )
    assert Manifest.load(other).token_map_sha256 == manifest.token_map_sha256
    batch = causal_batch([list(range(20))], [0], [range(5)], [20], 4)
    torch.testing.assert_close(engine.forward(batch).logits, load(other).forward(batch).logits, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("stand_ins")
def test_saguaro_build_builds_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saguaro.build.tensorrt.Cuda", Stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "find_spec", lambda name: name)
    recipe = Recipe("test", "tensorrt", tiny=TINY, dtype="float32", tensorrt=OPTIONS)
    directory = driver.build(recipe, tmp_path, progress=False)
    assert load(directory).vocab_size == 300
    monkeypatch.setattr(TensorrtBuild, "write", None)
    assert driver.build(recipe, tmp_path, progress=False) == directory
    assert len(list((tmp_path / "timing").iterdir())) == 1


@pytest.mark.usefixtures("stand_ins")
def test_the_description_has_tensorrt_llms_keys(tmp_path: Path) -> None:
    config = json.loads((build(tmp_path, draft_vocab=100) / "config.json").read_text())
    assert config["pretrained_config"] | {"rotary_base": 10000.0} == {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 8,
        "intermediate_size": config["pretrained_config"]["intermediate_size"],
        "hidden_act": "silu",
        "norm_epsilon": 1e-6,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "tie_word_embeddings": config["pretrained_config"]["tie_word_embeddings"],
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "gpus_per_node": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    built = config["build_config"]
    assert (built["max_batch_size"], built["max_num_tokens"], built["max_seq_len"]) == (2, 16, 64)
    assert (built["max_kv_blocks"], built["max_blocks_per_sequence"]) == (64, 32)
    assert built["plugin_config"] == {"tokens_per_block": 4}
    assert built["head_token_ids"] == 100
    engine = load(tmp_path / "engine")
    logits = engine.forward(causal_batch([[1, 2, 3]], [0], [[0]], [3], 4)).logits
    assert logits[0].isfinite().nonzero().flatten().tolist() == json.loads(
        (tmp_path / "engine" / DRAFT_VOCAB).read_text()
    )
    assert int(logits.isfinite().sum()) == 3 * 100
    assert logits[:, :100].isfinite().all()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16}, "compiled for KV blocks of 4 tokens, .* block_size 16. Set it to 4"),
        ({"num_blocks": 65}, "asks for 65 KV blocks, but the engine was compiled for 64"),
        ({"deterministic": True}, "speculation.deterministic is set"),
        ({"graphs": False}, "cuda_graphs is false"),
    ],
)
def test_a_deployment_that_does_not_fit_the_engine_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=message):
        load(build(tmp_path), **options)


@pytest.mark.usefixtures("stand_ins")
def test_an_engine_of_another_device_version_or_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = build(tmp_path, capability="8.0")
    with pytest.raises(EngineError, match="compute capability 8.0, but cpu has 9.0. Build it on this machine"):
        load(directory)
    manifest = replace(Manifest.load(directory), device="9.0")
    for changes, message in (
        ({"versions": {"tensorrt": "10.3.0"}}, "compiled by TensorRT 10.3.0, but 10.14"),
        ({"versions": {}}, "compiled by TensorRT None"),
        ({"vocab_size": 299}, "logits of 300 token ids, but the tokenizer 299"),
    ):
        replace(manifest, **changes).write(directory)
        with pytest.raises(EngineError, match=message):
            load(directory)
    manifest.write(directory)
    (directory / "rank0.engine").write_bytes(b"nonsense"[: manifest.files["rank0.engine"].size])
    replace(manifest, files={}).write(directory)
    with pytest.raises(EngineError, match="TensorRT cannot read it"):
        load(directory)


@pytest.mark.usefixtures("stand_ins")
def test_pool_and_buffers_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build(tmp_path)
    monkeypatch.setattr("saguaro.engines.kv_pool.available_memory", lambda device: 20_000)
    with pytest.raises(CapacityError, match="60 blocks of 4 tokens"):
        load(directory)


def test_a_network_that_is_no_draft_is_refused() -> None:
    engine = engine_of(tiny_model("llama", num_hidden_layers=1))
    compiled = engine._prompts._context.engine
    del compiled.tensors["fork"]
    with pytest.raises(EngineError, match="not a draft of this version: fork. Build it again"):
        TensorrtEngine(compiled, vocab_size=VOCAB, max_model_len=MAX_LEN, num_blocks=BLOCKS, cuda=Stream())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tp": 2}, ConfigError, "tp is 2"),
        ({"max_model_len": 65}, ConfigError, "max_model_len is 65"),
        ({}, EngineError, "TensorRT compiles on the GPU it compiles for, and there is none here"),
        (
            {"tensorrt": TensorrtOptions(max_kv_tokens=2**28), "capability": "9.0"},
            ConfigError,
            "max_kv_tokens is 268435456, .* less than 2.31 values, which is 134217727 tokens",
        ),
    ],
)
def test_recipes_that_cannot_be_compiled_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    capability = changes.pop("capability", None)
    recipe = Recipe(**{"name": "test", "engine": "tensorrt", "tiny": TINY, "dtype": "float32"} | changes)
    with pytest.raises(error, match=message):
        TensorrtBuild(recipe, TinyWeights(TINY), capability=capability)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"usual_rows": 513}, "usual_rows must be between 1 and max_rows"),
        ({"max_kv_tokens": 8}, "max_kv_tokens must be at least a block"),
    ],
)
def test_options_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorrtOptions(**fields)


def test_what_tensorrt_says_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Log().log(trt.ILogger.ERROR, "no memory")
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("tensorrt", "ERROR", "no memory")
    ]


def test_every_input_is_one_of_the_attentions_or_a_rows() -> None:
    assert set(INPUTS) == {
        "token_ids",
        "positions",
        "slots",
        "logit_rows",
        *("block_table", "sequences"),
        "fork",
        "branch",
    }


# CUDA ---------------------------------------------------------------------------------------------------------------


def test_the_stream_is_in_order_with_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own classes, of which nothing but the signatures is at work."""
    log = Mock()
    own, caller = (create_autospec(torch.cuda.Stream, instance=True, spec_set=True) for _ in range(2))
    log.attach_mock(own.wait_stream, "own_waits_for")
    log.attach_mock(caller.wait_stream, "caller_waits_for")
    graph = create_autospec(torch.cuda.CUDAGraph, instance=True)
    captured = create_autospec(torch.cuda.graph)
    log.attach_mock(captured.return_value.__enter__, "begin")
    log.attach_mock(captured.return_value.__exit__, "end")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", log.set_device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", create_autospec(torch.cuda.stream))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    cuda = Cuda()
    assert (str(cuda.device), cuda.capability) == ("cuda:1", "9.0")
    log.set_device.assert_called_once_with(cuda.device)
    with cuda.on_stream():
        replay = cuda.capture(log.enqueue)
        cuda.capture(log.other)
    names = [name for name, _, _ in log.mock_calls]
    assert names == [
        "set_device",
        "own_waits_for",
        "begin",
        "enqueue",
        "end",
        "begin",
        "other",
        "end",
        "caller_waits_for",
    ]
    # All graphs share the memory of the first.
    pools = [call.kwargs.pop("pool") for call in captured.call_args_list]
    assert pools == [None, graph.pool.return_value]
    assert [call.kwargs for call in captured.call_args_list] == [{"stream": own}] * 2
    own.wait_stream.assert_called_once_with(caller)
    caller.wait_stream.assert_called_once_with(own)
    replay()
    graph.replay.assert_called_once_with()


# The script for a GPU -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("tests/gpu/tensorrt_draft.py")


def test_the_gpu_script_checks_on_stand_ins_where_there_is_no_gpu(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setattr(script, "FAMILIES", ["qwen3"])
    assert script.main(["--cpu", "--out", str(found)]) == 0
    assert "qwen3 on cpu: 0 forwards wrong" in capsys.readouterr().out
    assert json.loads(found.read_text()) == {"device": "cpu", "wrong": []}
    monkeypatch.setattr(script, "TOLERANCE", -1.0)
    assert script.main(["--cpu", "--out", str(found)]) == 1
    assert len(json.loads(found.read_text())["wrong"]) == 2 * 6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main(["--out", str(found)])
    assert "no CUDA device; --cpu checks the engine's loop" in capsys.readouterr().err


def test_the_gpu_script_s_table(script: Any) -> None:
    page = script.table([script.Result(32768, 4, 16, 1024, 812.3, 903.9, 700.4)])
    assert page.endswith("| 32768 | 4 | 16 | 1024 | 812 | 904 | 700 | 1.16 |\n")
