"""What every engine must do, over all engines that run here; then what each promises beyond that."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import require_compiler
from saguaro.engines import ENGINES, load_engine
from saguaro.engines.base import Engine, causal_batch, fan_out_batch, slots_of
from saguaro.engines.kv_pool import available_memory, kv_bytes_per_block
from saguaro.engines.linears import PackedLinear, pack_linears
from saguaro.engines.manifest import Dtype
from saguaro.engines.profile import Agreement, Profile
from saguaro.engines.pytorch import PytorchEngine, compute_in_float32, convert
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.engines.simulated import SimulatedEngine
from saguaro.errors import CapacityError, EngineError, ModelError
from saguaro.plugins.fan_out import FanOut
from tensorrt_stub import load_tensorrt
from tiny_models import FAMILIES, VOCAB_ROWS, save_engine, tiny_model

BLOCK = 4
BLOCKS = 64
VOCAB = 500
MAX_LEN = 128
SHUFFLED = random.Random(0).sample(range(BLOCKS), BLOCKS)
TABLE = SHUFFLED[:40]  # one sequence's blocks, scattered over the pool


# The contract ---------------------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """An engine and how close two ways to the same logits must come."""

    engine: Engine
    tolerance: float


def scripted() -> Subject:
    def table(context: tuple[int, ...]) -> Sequence[Fraction]:
        """Depends on every token and its place."""
        weights = [1 + hash((context, token)) % 7 for token in range(11)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return Subject(ScriptedEngine(table, 11, MAX_LEN, BLOCK, BLOCKS), 0.0)


def simulated() -> Subject:
    profile = Profile({1: 0.0}, Agreement(0.8, 0.4, 0.6))
    sizes = {"vocab_size": VOCAB, "max_model_len": MAX_LEN, "block_size": BLOCK, "num_blocks": BLOCKS}
    return Subject(SimulatedEngine(profile, first=3, **sizes), 0.0)


def pytorch(model: Any) -> PytorchEngine:
    engine = PytorchEngine(model, vocab_size=VOCAB, max_model_len=MAX_LEN, block_size=BLOCK, num_blocks=BLOCKS)
    for pool in (*engine._pool.keys, *engine._pool.values):
        pool.fill_(torch.nan)  # so that reading what was never written cannot go unnoticed
    return engine


def quantised(family: str, dtype: Dtype) -> Subject:
    require_compiler()
    model = tiny_model(family)
    convert(model, dtype)
    # Attention's last bits depend on the shape of the batch and may round an activation the other way, by a whole step.
    # That costs int4 up to 0.02 of the scale here, quantising itself many times as much. That this is all is shown
    # where the shape is fixed: there both are equal to the bit (test_deterministic.py).
    return Subject(pytorch(model), 0.05)


@pytest.fixture
def bfloat16_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with bfloat16 instructions; without them it is emulated, slowly."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)


def tensorrt(family: str) -> Subject:
    """The engine's own loop; the compiled network is evaluated in torch. Batches of the tests come in several parts."""
    pytest.importorskip("triton", reason="the kernel language comes with torch's CUDA builds and the extra `kernels`")
    from tensorrt_runtime import engine_of

    return Subject(engine_of(tiny_model(family)), 1e-5)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "scripted": scripted,
    "simulated": simulated,
    **{f"{f}-float32": lambda f=f: Subject(pytorch(tiny_model(f)), 1e-5) for f in FAMILIES},
    **{f"{f}-float64": lambda f=f: Subject(pytorch(tiny_model(f, torch.float64)), 1e-12) for f in FAMILIES},
    "qwen2-int8": lambda: quantised("qwen2", "int8"),
    **{f"{f}-int4": lambda f=f: quantised(f, "int4") for f in FAMILIES},
    "llama-tensorrt": lambda: tensorrt("llama"),
}
# The bindings read a plugin's attributes back as arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


def tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(min(vocab, VOCAB)), k=count)


def feed(engine: Engine, ids: Sequence[int], start: int = 0, table: Sequence[int] = TABLE, wanted: int = 1) -> Tensor:
    """Run the tokens of one sequence from position `start` on; logits of the last `wanted`."""
    return engine.forward(causal_batch([ids], [start], [table], [wanted], engine.block_size)).logits


def close(subject: Subject, actual: Tensor, expected: Tensor) -> None:
    scale = expected[expected.isfinite()].abs().max().clamp(min=1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(subject.tolerance * scale))


def test_logits_are_those_of_the_wanted_rows_over_the_tokenizer_s_ids(subject: Subject) -> None:
    engine = subject.engine
    ids = tokens(9, engine.vocab_size)
    logits = feed(engine, ids, wanted=9)
    assert logits.shape == (9, engine.vocab_size)
    assert logits.dtype in (torch.float32, torch.float64)
    assert logits.isfinite().all()
    assert feed(engine, ids, wanted=0).shape == (0, engine.vocab_size)
    batch = causal_batch([ids], [0], [TABLE], [9], BLOCK)
    some = engine.forward(replace(batch, logit_rows=torch.tensor([7, 2]))).logits
    close(subject, some, logits[[7, 2]])
    logits.add_(1)  # an ordinary tensor, the caller's own


def test_prefill_in_chunks_and_token_by_token_equals_prefill_at_once(subject: Subject) -> None:
    engine = subject.engine
    ids = tokens(30, engine.vocab_size)
    whole = feed(engine, ids, wanted=30)
    chunks = [feed(engine, ids[a:b], a, SHUFFLED[40:60], b - a) for a, b in ((0, 7), (7, 8), (8, 24), (24, 30))]
    close(subject, torch.cat(chunks), whole)
    steps = [feed(engine, [token], position) for position, token in enumerate(ids)]
    close(subject, torch.cat(steps), whole)


def test_a_batch_of_prefill_and_decode_rows_equals_each_sequence_alone(subject: Subject) -> None:
    engine = subject.engine
    sequences = [tokens(n, engine.vocab_size, seed=n) for n in (23, 5, 12)]
    starts, tables, wanted = [22, 0, 8], [SHUFFLED[0:8], SHUFFLED[8:11], SHUFFLED[11:16]], [1, 5, 2]
    alone = []
    for ids, start, table, count in zip(sequences, starts, tables, wanted):
        feed(engine, ids[:start] or ids, 0, table)
        alone.append(feed(engine, ids[start:], start, table, count))
    rows = [ids[start:] for ids, start in zip(sequences, starts)]
    together = engine.forward(causal_batch(rows, starts, tables, wanted, BLOCK)).logits
    close(subject, together, torch.cat(alone))


def test_kv_rollback_after_a_partial_accept_equals_a_fresh_prefill(subject: Subject) -> None:
    engine = subject.engine
    ids = tokens(20, engine.vocab_size)
    feed(engine, ids[:14])
    feed(engine, [ids[14], ids[15], *reversed(ids[:5])], 14)  # a trunk of which only the first two rows are kept
    after = feed(engine, ids[16:], 16, wanted=4)
    close(subject, after, feed(engine, ids, 0, SHUFFLED[40:50], wanted=20)[16:])


def branch_logits(
    engine: Engine, fan_outs: Sequence[FanOut], prefixes: Sequence[int], tables: Sequence[Sequence[int]], paths: Tensor
) -> list[Tensor]:
    """[depth] logits of all branches, whose tokens are `paths` [N, depths]."""
    return [
        engine.forward(fan_out_batch(paths[:, d], fan_outs, prefixes, tables, d, engine.block_size)).logits
        for d in range(paths.shape[1])
    ]


def test_branches_together_equal_each_alone_and_plain_causal_forwards(subject: Subject) -> None:
    engine = subject.engine
    fan_outs, prefixes, depths = [FanOut((2, 0, 3, 1)), FanOut((1, 2))], [21, 6], 4
    tables = [SHUFFLED[0:15], SHUFFLED[15:22]]
    histories = [tokens(p + len(f.counts), engine.vocab_size, p) for f, p in zip(fan_outs, prefixes)]
    paths = torch.tensor([tokens(depths, engine.vocab_size, 100 + i) for i in range(9)])
    for ids, table in zip(histories, tables):
        feed(engine, ids, 0, table)
    together = branch_logits(engine, fan_outs, prefixes, tables, paths)

    spare = SHUFFLED[40:60]
    row = 0
    for fan_out, prefix, ids, table in zip(fan_outs, prefixes, histories, tables):
        for fork in fan_out.forks:
            only = FanOut(tuple(int(k == fork) for k in range(len(fan_out.counts))))
            alone = branch_logits(engine, [only], [prefix], [table], paths[row : row + 1])
            plain = feed(engine, ids[: prefix + fork + 1] + paths[row].tolist(), 0, spare, depths)
            for depth in range(depths):
                close(subject, together[depth][row], plain[depth])
                close(subject, alone[depth][0], plain[depth])
            row += 1


def test_a_long_speculation_spans_many_blocks(subject: Subject) -> None:
    engine = subject.engine
    fan_out, prefix, depths = FanOut((1,) * 12), 3, 9
    ids = tokens(prefix + 12, engine.vocab_size)
    paths = torch.tensor([tokens(depths, engine.vocab_size, i) for i in range(12)])
    feed(engine, ids)
    last = branch_logits(engine, [fan_out], [prefix], [TABLE], paths)[-1]
    for fork in (0, 5, 11):
        plain = feed(engine, ids[: prefix + fork + 1] + paths[fork].tolist(), 0, SHUFFLED[40:60])
        close(subject, last[fork], plain[0])


def test_a_position_beyond_the_longest_context_is_refused(subject: Subject) -> None:
    with pytest.raises(EngineError, match=str(MAX_LEN)):
        feed(subject.engine, [1, 2], MAX_LEN - 1)


# pytorch --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    # Hugging Face's eager attention takes every softmax in float32, so the float64 oracle is its other attention.
    ("dtype", "tolerance", "attention"),
    [(torch.float32, 1e-5, "eager"), (torch.float64, 1e-12, "sdpa")],
)
def test_logits_are_hugging_face_s(family: str, dtype: torch.dtype, tolerance: float, attention: str) -> None:
    ids = tokens(90, VOCAB)  # well beyond the 32 positions from which Llama 3.1 scales its frequencies
    with torch.no_grad():
        model = tiny_model(family, dtype, attn_implementation=attention)
        expected = model(torch.tensor([ids])).logits[0, :, :VOCAB]
    subject = Subject(pytorch(tiny_model(family, dtype)), tolerance)
    logits = feed(subject.engine, ids, wanted=90)
    assert logits.dtype == dtype
    close(subject, logits, expected)


@pytest.mark.parametrize(
    ("family", "options"), [*((f, {}) for f in FAMILIES), ("llama", {"attention_bias": True, "mlp_bias": True})]
)
def test_logits_are_hugging_face_s_where_layers_are_put_together(family: str, options: dict[str, Any]) -> None:
    ids = tokens(90, VOCAB)
    model = tiny_model(family, **options)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, :, :VOCAB]
    compute_in_float32(model, pack_linears)
    assert not hasattr(model.model.layers[0].self_attn, "q_proj")
    close(Subject(pytorch(model), 1e-5), feed(pytorch(model), ids, wanted=90), expected)


def test_llama_3_1_frequencies_matter_here() -> None:
    ids = tokens(90, VOCAB)
    plain, scaled = (feed(pytorch(tiny_model(family)), ids) for family in ("llama", "llama3.1"))
    assert (plain - scaled).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_hugging_face_s_token_for_token(family: str) -> None:
    prompt = tokens(17, VOCAB)
    model = tiny_model(family)
    model.lm_head.weight.data[VOCAB:] = 0  # padding rows never win, so that both may use the whole vocabulary
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
    )[0].tolist()
    engine = pytorch(tiny_model(family))
    sequence = list(prompt)
    logits = feed(engine, prompt)
    while len(sequence) < len(expected):
        sequence.append(int(logits[0].argmax()))
        logits = feed(engine, sequence[-1:], len(sequence) - 1)
    assert sequence == expected


def test_padding_rows_of_the_vocabulary_are_cut_off() -> None:
    model = tiny_model("qwen2")
    model.lm_head.weight.data[VOCAB:] = 100.0
    assert VOCAB < VOCAB_ROWS
    assert feed(pytorch(model), tokens(5, VOCAB)).shape == (1, VOCAB)


def test_bfloat16_logits_come_as_float32() -> None:
    model = tiny_model("llama", torch.bfloat16)
    with torch.no_grad():
        expected = tiny_model("llama", torch.bfloat16).double()(torch.tensor([tokens(20, VOCAB)])).logits[0, -1, :VOCAB]
    logits = feed(pytorch(model), tokens(20, VOCAB))[0]
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_more_tokens_than_the_model_has_are_refused() -> None:
    with pytest.raises(EngineError, match="513 token ids, but the model only 512"):
        PytorchEngine(tiny_model("llama"), vocab_size=513, max_model_len=64, block_size=4, num_blocks=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding window of 64 tokens"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
)
def test_models_that_would_not_be_computed_exactly_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        pytorch(tiny_model("qwen2", **options))


def test_a_sliding_window_as_long_as_the_context_is_no_window() -> None:
    options = {"use_sliding_window": True, "sliding_window": MAX_LEN, "max_window_layers": 1}
    ids = tokens(20, VOCAB)
    assert torch.equal(feed(pytorch(tiny_model("qwen2", **options)), ids), feed(pytorch(tiny_model("qwen2")), ids))


def test_a_pool_that_does_not_fit_is_refused_before_it_is_taken() -> None:
    model = tiny_model("llama")
    blocks = available_memory(torch.device("cpu")) // kv_bytes_per_block(model.config, 16, torch.float32) + 10_000
    with pytest.raises(
        CapacityError, match=r"not enough memory on cpu for the KV pool .* MiB needed, .* MiB available"
    ):
        PytorchEngine(model, vocab_size=VOCAB, max_model_len=64, block_size=16, num_blocks=blocks)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_bytes_per_block_are_those_of_the_pool(family: str) -> None:
    engine = pytorch(tiny_model(family))
    taken = sum(pool.nbytes for pool in (*engine._pool.keys, *engine._pool.values))
    assert taken == BLOCKS * kv_bytes_per_block(engine._model.config, BLOCK, torch.float32)


# Engine directories ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("bfloat16_is_native")
def test_a_saved_engine_gives_the_same_logits(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    def model() -> Any:
        return tiny_model(family, dtype, tie_word_embeddings=tied)

    save_engine(model(), tmp_path)
    engine = load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)
    assert (engine.vocab_size, engine.max_model_len) == (VOCAB, MAX_LEN)
    assert (engine.block_size, engine.num_blocks) == (BLOCK, BLOCKS)
    ids = tokens(60, VOCAB)
    assert torch.equal(feed(engine, ids, wanted=60), feed(pytorch(model()), ids, wanted=60))


def test_weights_are_mapped_not_copied_and_nothing_is_left_out(tmp_path: Path) -> None:
    save_engine(tiny_model("llama3.1", tie_word_embeddings=True), tmp_path)
    model = PytorchEngine.load(tmp_path, block_size=BLOCK, num_blocks=4)._model
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [range(*(int(end, 16) for end in line.split("-"))) for line in maps]
    assert all(any(parameter.data_ptr() in mapped for mapped in ranges) for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_bfloat16_weights_are_computed_in_float32_where_the_cpu_has_no_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    save_engine(tiny_model("qwen2", torch.bfloat16, tie_word_embeddings=True), tmp_path)
    engine = PytorchEngine.load(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)
    assert not any(isinstance(module, nn.Linear) for module in engine._model.modules())
    ids = tokens(60, VOCAB)
    expected = feed(pytorch(tiny_model("qwen2", torch.bfloat16, tie_word_embeddings=True).float()), ids, wanted=60)
    torch.testing.assert_close(feed(engine, ids, wanted=60), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("biases", [(False,), (True,), (True, False, True), (False, False)])
def test_packed_linears_compute_the_same(rows: int, biases: tuple[bool, ...]) -> None:
    linears = [nn.Linear(48, 80 - 16 * i, bias=bias) for i, bias in enumerate(biases)]
    x = torch.randn(2, rows, 48)
    with torch.no_grad():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        torch.testing.assert_close(PackedLinear(*linears)(x), expected, rtol=0, atol=1e-5)


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    size = path.stat().st_size
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["config.json"]["size"] = size
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_a_directory_split_over_ranks_is_refused(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path, tp=4)
    with pytest.raises(EngineError, match="split over 4 ranks, but is loaded on 1. Build it with tp: 1"):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path)
    edit_config(tmp_path, model_type="gemma2", architectures=["Gemma2ForCausalLM"])
    with pytest.raises(EngineError, match="does not run models of type 'gemma2'; it runs llama, qwen2, qwen3"):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path)
    edit_config(tmp_path, model_type="no such model")
    with pytest.raises(EngineError, match="config.json: is not a model configuration"):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_hidden_layers": 4},
            r"9 tensors are not those .*layers.3.input_layernorm.weight: none, expected float32",
        ),
        ({"num_hidden_layers": 2}, r"9 tensors are not those .*float32 \[96\], expected none"),
        ({"intermediate_size": 80}, r"down_proj.weight: float32 \[96, 160\], expected float32 \[96, 80\]"),
    ],
)
def test_weights_of_another_model_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=message):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)


def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path, dtype="bfloat16")
    with pytest.raises(ModelError, match="float32 .*, expected bfloat16"):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=BLOCKS)


def test_weights_and_pool_must_fit_together(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path)
    with pytest.raises(CapacityError, match="the model and .* tokens of KV"):
        load_engine(tmp_path, block_size=BLOCK, num_blocks=2**40)


def test_an_engine_that_is_not_loaded_this_way_is_refused(tmp_path: Path) -> None:
    save_engine(tiny_model("llama"), tmp_path, engine="trtllm")
    with pytest.raises(EngineError, match="built for the engine 'trtllm'.*known: pytorch"):
        load_engine(tmp_path)


def test_an_engine_whose_package_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_engine(tiny_model("llama"), tmp_path, engine="tensorrt")
    monkeypatch.delitem(sys.modules, "saguaro.engines.tensorrt.engine", raising=False)
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # importing it fails
    with pytest.raises(EngineError, match="engine 'tensorrt', which needs the package tensorrt, and that is not"):
        load_engine(tmp_path)


@pytest.mark.parametrize("name", ENGINES)
def test_every_entry_of_the_table_can_be_loaded(name: str) -> None:
    if name == "tensorrt":
        pytest.importorskip("triton")
        load_tensorrt()
    module, _, attribute = ENGINES[name].partition(":")
    assert callable(getattr(import_module(module), attribute).load)


@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_slots_of_columns_are_found_block_by_block(
    block_size: int, start: int, count: int, chance: random.Random
) -> None:
    table = chance.sample(range(100), 81)
    columns = range(start, start + count)
    expected = [table[column // block_size] * block_size + column % block_size for column in columns]
    assert slots_of(table, columns, block_size) == expected


# scripted -------------------------------------------------------------------------------------------------------------


THIRDS = [[Fraction(1, 3), Fraction(2, 3), Fraction(0)], [0, 0, 1], [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]]


def markov(block_size: int = BLOCK) -> ScriptedEngine:
    return ScriptedEngine(markov_table(THIRDS), 3, 32, block_size, 16)


def test_scripted_logits_are_the_logarithms_of_the_table() -> None:
    logits = feed(markov(), [2, 0, 1], table=[3, 5], wanted=3)
    assert logits.dtype == torch.float64
    assert torch.equal(logits[1], torch.tensor([1 / 3, 2 / 3, 0], dtype=torch.float64).log())
    assert logits[2].tolist() == [-torch.inf, -torch.inf, 0.0]


def test_scripted_contexts_are_all_tokens_in_order_of_position() -> None:
    seen = []

    def table(context: tuple[int, ...]) -> list[int]:
        seen.append(context)
        return [1, 0, 0]

    engine = ScriptedEngine(table, 3, 32, 2, 16)
    feed(engine, [0, 1, 2, 1], table=[9, 4, 7])
    engine.forward(fan_out_batch(torch.tensor([2, 0]), [FanOut((1, 1))], [2], [[9, 4, 7]], 0, 2))
    assert seen == [(0, 1, 2, 1), (0, 1, 2, 2), (0, 1, 2, 1, 0)]


def test_scripted_notices_what_is_wrong_with_a_batch() -> None:
    engine = markov()
    feed(engine, [0, 1, 2, 1, 0], table=[3, 5])
    good = causal_batch([[2]], [5], [[3, 5]], [1], BLOCK)
    for fields, message in (
        ({"positions": torch.tensor([6])}, "never written"),
        (
            {"positions": torch.tensor([4])},
            r"positions 0..4 once each, the last in its own slot 21; it sees .* slots \[12, 13, 14, 15, 20\]",
        ),
        ({"slots": torch.tensor([3 * BLOCK + 1])}, "never written"),
        ({"block_tables": ((3, 6),)}, "never written"),
        ({"block_tables": ((5, 3),)}, "never written"),
        ({"token_ids": torch.tensor([3])}, "token id 3"),
        ({"slots": torch.tensor([16 * BLOCK])}, "slot 64"),
        ({"positions": torch.tensor([32])}, "position 32"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.forward(replace(good, **fields))
        engine = markov()
        feed(engine, [0, 1, 2, 1, 0], table=[3, 5])


def test_scripted_notices_a_wrong_mask() -> None:
    engine = markov()
    feed(engine, [0, 1, 2, 1], table=[3, 5])
    good = fan_out_batch(torch.tensor([2, 0]), [FanOut((1, 1))], [2], [[3, 5]], 0, BLOCK)
    assert good.fan_out is not None
    for fields in ({"fork": torch.tensor([1, 1])}, {"branch": torch.tensor([1, 0])}, {"prefix": torch.tensor([1])}):
        mask = replace(good.fan_out, **fields)
        with pytest.raises(EngineError, match="of the batch should see"):
            engine.forward(replace(good, fan_out=mask))
    engine.forward(good)


def test_scripted_notices_overlapping_block_tables() -> None:
    with pytest.raises(EngineError, match="same KV slot"):
        markov().forward(causal_batch([[0], [1]], [0, 0], [[3], [3]], [1, 1], BLOCK))


@pytest.mark.parametrize("probs", [[0.5, 0.5], [0.5, 0.6, 0.1], [1.5, -0.5, 0.0]])
def test_scripted_refuses_a_table_of_no_distribution(probs: list[float]) -> None:
    engine = ScriptedEngine(lambda context: probs, 3, 32, BLOCK, 16)
    with pytest.raises(EngineError, match="not 3 probabilities that sum to 1"):
        feed(engine, [0], table=[0])
