"""The pytorch engine as it runs on CUDA, on a stand-in for the device: graphs, padding, and who waits for what.

That a GPU captures and replays what is enqueued is for `tests/gpu/pytorch_pair.py` to show.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cuda_stand_in import Stream, engine_on
from harness import Pair
from saguaro.engines import cuda_graphs
from saguaro.engines.base import ForwardBatch, ForwardOutput, causal_batch
from saguaro.engines.cuda_graphs import BRANCH_COLUMNS, MAX_ROWS, GraphInputs
from saguaro.engines.pytorch import PytorchEngine, memory_needed
from saguaro.errors import CapacityError, EngineError
from saguaro.orchestrator import sampling, target
from saguaro.orchestrator.types import Rule, SamplingParams
from saguaro.plugins import transfers
from saguaro.plugins.rows import RowTensors
from scripts import load_script
from shrinking_batches import shrinking_batches
from tiny_models import save_engine, tiny_model

SIZES = {"vocab_size": 500, "max_model_len": 128, "block_size": 4, "num_blocks": 64}
BLOCKS = random.Random(3).sample(range(64), 64)
TOLERANCE = 1e-10  # of float64 logits of some tens: the products have other shapes, and nothing else differs


@pytest.fixture(scope="module")
def engines() -> tuple[PytorchEngine, PytorchEngine, Stream]:
    """One without graphs, one with, and the latter's stream."""
    stream = Stream()
    plain = PytorchEngine(tiny_model("qwen2", torch.float64), **SIZES)
    return plain, engine_on(stream, tiny_model("qwen2", torch.float64), **SIZES), stream


def both(engines: tuple[PytorchEngine, PytorchEngine, Stream], batch: ForwardBatch) -> list[str]:
    """Run a batch on both, compare, and say what the stream has been given."""
    plain, graphs, stream = engines
    expected = plain.forward(batch).logits
    stream.log.clear()
    found = graphs.forward(batch).logits
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    # All KV that real rows may ever see is the same; what padding has written lies behind it.
    for one, other in zip(plain._pool.keys + plain._pool.values, graphs._pool.keys + graphs._pool.values, strict=True):
        torch.testing.assert_close(other[:64], one, rtol=0, atol=TOLERANCE)
    return list(stream.log)


def fresh(engines: tuple[PytorchEngine, PytorchEngine, Stream]) -> None:
    """Nothing has been written to either pool; the block of padding is poison to whoever reads it."""
    for engine in engines[:2]:
        for pool in engine._pool.keys + engine._pool.values:
            pool.zero_()
            pool[64:] = torch.nan


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_padded_and_shrinking_batches_have_the_logits_and_the_kv_of_the_plain_engine(
    engines: tuple[PytorchEngine, PytorchEngine, Stream], seed: int
) -> None:
    fresh(engines)
    tables = [BLOCKS[i * 16 : (i + 1) * 16] for i in range(4)]
    for batch in shrinking_batches(seed, tables, 500, 4):
        done = both(engines, batch)
        run_by_a_graph = 4 * len(batch.logit_rows) >= len(batch.token_ids)
        assert done == ["upload", "replay"] * run_by_a_graph


def test_there_is_a_graph_for_every_power_of_two_and_the_least_that_fits_is_taken(
    engines: tuple[PytorchEngine, PytorchEngine, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(engines)
    seen: list[int] = []
    compute = PytorchEngine._compute

    def counted(engine: PytorchEngine, inputs: GraphInputs) -> Tensor:
        seen.append(len(inputs.token_ids))
        return compute(engine, inputs)

    monkeypatch.setattr(PytorchEngine, "_compute", counted)
    made = engine_on(Stream(), tiny_model("llama", num_hidden_layers=1), **SIZES)
    assert seen == [n for n in (256, 128, 64, 32, 16, 8, 4, 2, 1) for _ in ("warm", "captured")]
    for rows, used in ((1, 1), (2, 2), (3, 4), (5, 8), (33, 64), (100, 128)):
        seen.clear()
        batch = causal_batch([range(rows)], [0], [BLOCKS[:32]], [rows], 4)
        assert made.forward(batch).logits.shape == (rows, 500)
        assert seen == [used]


def test_prompts_and_what_is_too_large_are_launched_by_rule(
    engines: tuple[PytorchEngine, PytorchEngine, Stream],
) -> None:
    _, engine, _ = engines
    graphs = engine._graphs
    assert graphs is not None
    batch = causal_batch([range(20)], [0], [BLOCKS[:5]], [5], 4)
    assert graphs.fits(batch)
    assert not graphs.fits(replace(batch, logit_rows=batch.logit_rows[1:]))  # a prompt
    wide = causal_batch([[1]] * MAX_ROWS, [0] * MAX_ROWS, [[0]] * MAX_ROWS, [1] * MAX_ROWS, 4)
    assert graphs.fits(wide)
    wider = causal_batch([[1]] * (MAX_ROWS + 1), [0] * (MAX_ROWS + 1), [[0]] * (MAX_ROWS + 1), [1] * (MAX_ROWS + 1), 4)
    assert not graphs.fits(wider)
    roomy = engine_on(Stream(), tiny_model("llama", num_hidden_layers=1), **SIZES | {"num_blocks": 512})
    most = -(-(SIZES["max_model_len"] + BRANCH_COLUMNS) // 4)
    assert roomy._graphs is not None
    assert roomy._graphs.fits(replace(batch, block_tables=(tuple(range(most)),)))
    assert not roomy._graphs.fits(replace(batch, block_tables=(tuple(range(most + 1)),)))


def test_wanted_rows_come_in_their_order_and_sequences_without_rows_take_no_part(
    engines: tuple[PytorchEngine, PytorchEngine, Stream],
) -> None:
    fresh(engines)
    batch = causal_batch([[5, 6, 7], [], [8]], [0, 0, 0], [BLOCKS[:1], BLOCKS[1:2], BLOCKS[2:3]], [3, 0, 1], 4)
    assert both(engines, replace(batch, logit_rows=torch.tensor([3, 0, 2]))) == ["upload", "replay"]


def test_logits_are_the_callers_own(engines: tuple[PytorchEngine, PytorchEngine, Stream]) -> None:
    fresh(engines)
    batches = [causal_batch([[token]], [0], [BLOCKS[:1]], [1], 4) for token in (5, 6)]
    first = engines[1].forward(batches[0]).logits
    kept = first.clone()
    engines[1].forward(batches[1])
    assert torch.equal(first, kept)
    first.add_(1)  # an ordinary tensor
    assert torch.equal(engines[1].forward(batches[0]).logits, kept)


def test_what_a_graph_cannot_run_is_refused_like_elsewhere(
    engines: tuple[PytorchEngine, PytorchEngine, Stream],
) -> None:
    with pytest.raises(EngineError, match="a row of the batch is at position 128"):
        engines[1].forward(causal_batch([[1]], [128], [BLOCKS[:40]], [1], 4))
    with pytest.raises(EngineError, match=r"block_tables\[0\]: holds block 64, but the pool has blocks 0 to 63"):
        engines[1].forward(causal_batch([[1]], [0], [[64]], [1], 4))  # the block of padding


def test_without_graphs_nothing_is_captured_and_buffers_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()
    engine = engine_on(stream, tiny_model("llama", num_hidden_layers=1), graphs=False, **SIZES)
    assert len(engine._pool.keys[0]) == SIZES["num_blocks"]
    engine.forward(causal_batch([[1]], [0], [[0]], [1], 4))
    assert stream.log == []
    monkeypatch.setattr(cuda_graphs, "MAX_ROWS", 2**40)
    with pytest.raises(CapacityError, match="the inputs and logits of CUDA graphs"):
        engine_on(stream, tiny_model("llama", num_hidden_layers=1), **SIZES)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sizes", [{"block_size": 4, "num_blocks": 64}, {"block_size": 16, "num_blocks": 200}])
def test_the_memory_needed_is_that_of_weights_pool_and_what_graphs_share(
    tmp_path: Path, graphs: bool, sizes: dict[str, int]
) -> None:
    model = tiny_model("qwen3", torch.bfloat16)
    manifest = save_engine(model, tmp_path)
    needed = memory_needed(tmp_path, manifest, **sizes, device=torch.device("cuda"), graphs=graphs)
    engine = engine_on(Stream(), model, graphs=graphs, **SIZES | sizes)
    held = [*engine._pool.keys, *engine._pool.values]
    held += [engine._graphs._inputs, engine._graphs._logits] if engine._graphs else []
    assert needed == (tmp_path / "model.safetensors").stat().st_size + sum(tensor.nbytes for tensor in held)


# Who waits ------------------------------------------------------------------------------------------------------------


class _MetaPlan:
    def __init__(self, reads: bool) -> None:
        self._reads = reads

    def attend(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float) -> Tensor:
        if self._reads:
            bool(query.any())
        return torch.empty_like(query)


@pytest.mark.parametrize("family", ["llama3.1", "qwen2", "qwen3"])
def test_what_is_captured_reads_nothing_back_and_brings_nothing_from_the_host(family: str) -> None:
    """On tensors without contents every such thing is an error, as it is during a capture."""
    engine = PytorchEngine(tiny_model(family).to("meta"), **SIZES)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "meta"}
    rows = RowTensors(*(torch.empty(shape, **ints) for shape in ((8, 32), (8, 6), (8,), (8,))), 8, 128)
    inputs = GraphInputs(
        *(torch.empty(8, **ints) for _ in "tp"), torch.empty(8, dtype=torch.int64, device="meta"), rows
    )
    engine._plan_graph = lambda rows: _MetaPlan(reads=False)
    assert engine._compute(inputs).shape == (8, 500)
    engine._plan_graph = lambda rows: _MetaPlan(reads=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        engine._compute(inputs)


_WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


class OnDevice(Tensor):
    """A tensor as on a device: whatever would wait for it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in _WAITS, f"{name} waits for the device"
        if name == "__getitem__" and isinstance(args[1], Tensor):
            assert args[1].dtype != torch.bool, "a mask as index waits for the device"
        return super().__torch_function__(func, types, args, kwargs or {})


class DeviceEngine:
    """An engine whose logits are on a device."""

    def __init__(self, engine: PytorchEngine) -> None:
        self._engine = engine
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        output = self._engine.forward(batch)
        self.forwards += len(batch.logit_rows) > 0
        return ForwardOutput(output.logits.as_subclass(OnDevice))


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"top_p": 0.9, "seed": 7}])
def test_every_forward_is_waited_for_once(
    rule: Rule, params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal reads
        reads += any(isinstance(tensor, OnDevice) for tensor in tensors)
        return tuple(tensor.as_subclass(Tensor) for tensor in tensors)

    monkeypatch.setattr(sampling, "to_host", to_host)
    monkeypatch.setattr(target, "to_host", to_host)
    models = [tiny_model("llama", torch.float64, seed=seed, num_hidden_layers=1) for seed in (0, 0)]
    plain = [PytorchEngine(model, **SIZES) for model in models]
    engines = [DeviceEngine(engine) for engine in plain]
    asked = SamplingParams(max_tokens=12, **params)  # type: ignore[arg-type]
    options: dict[str, Any] = {"rule": rule, "min_confidence": 0.01}
    prompt = [3, 1, 4, 1, 5]
    assert Pair(*engines, **options).run(prompt, asked) == Pair(*plain, **options).run(prompt, asked)
    assert reads == sum(engine.forwards for engine in engines) > 10


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert transfers.to_device(tensor, "cpu") is tensor
    assert transfers.to_host(tensor, tensor) == (tensor, tensor)


# The script for a GPU -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("tests/gpu/pytorch_pair.py")


def test_the_gpu_script_checks_on_the_stand_in_where_there_is_no_gpu(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_ROWS", 64)
    quick = ["--device", "cpu", "--seeds", "2", "--tokens", "14"]
    monkeypatch.setattr(script, "TOLERANCES", {torch.float32: (1e-3, 1e-3)})
    assert script.main(quick) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["wrong"], report["times"]) == ("cpu", [], [])
    assert report["found"]["float32"]["modes unlike ar at temperature 1"] == []
    monkeypatch.setattr(script, "TOLERANCES", {torch.float32: (-1.0, -1.0)})
    monkeypatch.setattr(script, "tokens_by_mode", lambda *_: {"ar": [[1]], "sd": [[1]], "ssd": [[2]]})
    assert script.main(quick) == 1
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert "at temperature 0 ssd gave other tokens than ar" in wrong[2]
    assert len(wrong) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main([])
    assert "no CUDA device; --device cpu checks" in capsys.readouterr().err
