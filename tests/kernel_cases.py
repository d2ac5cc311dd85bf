"""The attention kernel in Triton's interpreter, against the definition.

    TRITON_INTERPRET=1 SAGUARO_KERNEL_CASES=300 pytest tests/kernel_cases.py

The interpreter replaces the compiler for a whole process, so these tests have one to themselves, which
`test_triton_lang.py` starts.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from attention_cases import Case, causal_case, fan_out_case, random_case
from cuda_stand_in import Stream
from saguaro.engines import cuda_graphs
from saguaro.engines.base import causal_batch, fan_out_batch
from saguaro.engines.pytorch import PytorchEngine
from saguaro.plugins import triton_lang
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.rows import RowTensors
from saguaro.plugins.triton_lang import Workspace, launch, plan_kernel
from saguaro.plugins.variant import Variant
from tiny_models import tiny_model

CASES = int(os.environ.get("SAGUARO_KERNEL_CASES", "12"))


@pytest.fixture(scope="session", autouse=True)
def bfloat16_as_on_devices() -> None:
    """Devices multiply bfloat16 numbers, add in float32 and round to nearest; the interpreter multiplies bit patterns
    and cuts bits off."""
    assert triton.knobs.runtime.interpret, "start with TRITON_INTERPRET=1"
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    bfloat16, float32 = triton.language.bfloat16, triton.language.float32

    def widen(operand: TensorHandle) -> TensorHandle:
        if operand.dtype.scalar != bfloat16:
            return operand
        return TensorHandle(_convert_float(operand.data, bfloat16, float32, None).view(np.float32), float32)

    def rounded(builder: InterpreterBuilder, source: TensorHandle, kind: triton.language.dtype) -> TensorHandle:
        if (source.dtype.scalar, kind.scalar) != (float32, bfloat16):
            return cast(builder, source, kind)
        nearest = torch.from_numpy(np.array(source.data)).bfloat16()
        return TensorHandle(nearest.view(torch.int16).numpy().view(np.uint16), bfloat16)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)
    InterpreterBuilder.cast_impl = rounded


def variant_of(case: Case, rows: RowTensors, splits: int) -> Variant:
    heads, dim = case.query.shape[1:]
    block_size, kv_heads = case.keys.shape[1:3]
    return Variant(
        case.query.dtype,
        heads,
        kv_heads,
        dim,
        block_size,
        case.scale,
        rows.most_rows,
        splits,
        case.window,
        case.soft_cap,
    )


def run(case: Case, splits: int, rows: RowTensors | None = None) -> Tensor:
    """The kernel's output; what it does not write stays poison."""
    rows = rows or RowTensors.of(case.rows, case.tables, case.mask)
    variant = variant_of(case, rows, splits)
    workspace = Workspace.of(variant, len(case.query), "cpu")
    if workspace:
        workspace.parts.fill_(torch.nan)
        workspace.lse.fill_(torch.nan)
    output = torch.full_like(case.query, torch.nan)
    launch(variant, rows, case.query, case.keys, case.values, output, workspace)
    return output


@pytest.mark.parametrize("seed", range(CASES))
def test_a_random_batch_equals_the_definition(seed: int) -> None:
    case = random_case(seed)
    assert case.excess(run(case, splits=(1, 2, 4, 8)[seed % 4])) <= 0


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_head_sizes_and_splits(head_dim: int) -> None:
    case = fan_out_case([(3, 0, 2), (1, 1)], [70, 5], 1, head_dim=head_dim, dtype=torch.float32)
    for splits in (1, 4):  # the second sequence has less columns than splits, so some of them are empty
        assert case.excess(run(case, splits)) <= 0


def test_a_graph_s_padding_is_neither_read_nor_written() -> None:
    """One launch serves any batch that fits: more rows, sequences and table columns than it has."""
    case = fan_out_case([(2, 0, 3), (0, 0), (1, 1)], [9, 4, 20], 2, dtype=torch.float32)
    rows = RowTensors.of(case.rows, case.tables, case.mask)
    poison = 2**30
    padded = RowTensors(
        torch.nn.functional.pad(rows.block_table, (0, 5, 0, 2), value=poison),
        torch.nn.functional.pad(rows.sequences, (0, 0, 0, 2)),
        torch.nn.functional.pad(rows.fork, (0, 4), value=poison),
        torch.nn.functional.pad(rows.branch, (0, 4), value=poison),
        rows.most_rows + 9,
        rows.most_columns,
    )
    wide = replace(case, query=torch.nn.functional.pad(case.query, (0, 0, 0, 0, 0, 4), value=torch.nan))
    output = run(wide, 1, padded)
    assert case.excess(output[: len(case.query)]) <= 0
    assert output[len(case.query) :].isnan().all()


def test_trunks_and_branches_may_share_a_launch() -> None:
    branches = fan_out_case([(2, 0, 3)], [9], 1, dtype=torch.float32)
    trunk = causal_case([(7, 4)], dtype=torch.float32, seed=1)
    rows = [RowTensors.of(case.rows, case.tables, case.mask) for case in (branches, trunk)]
    blocks, width = len(branches.keys), max(r.block_table.shape[1] for r in rows)
    tables = [torch.nn.functional.pad(r.block_table, (0, width - r.block_table.shape[1])) for r in rows]
    sequences = torch.cat([r.sequences for r in rows])
    sequences[1, 4] = len(branches.query)
    both = RowTensors(
        torch.cat([tables[0], tables[1] + blocks]),
        sequences,
        torch.cat([r.fork for r in rows]),
        torch.cat([r.branch for r in rows]),
        max(r.most_rows for r in rows),
        max(r.most_columns for r in rows),
    )
    joined = replace(
        branches,
        query=torch.cat([branches.query, trunk.query]),
        keys=torch.cat([branches.keys, trunk.keys]),
        values=torch.cat([branches.values, trunk.values]),
    )
    parts = run(joined, 2, both).split([len(branches.query), len(trunk.query)])
    assert branches.excess(parts[0]) <= 0
    assert trunk.excess(parts[1]) <= 0


def test_the_plan_chooses_its_splits_and_takes_any_view_of_a_query() -> None:
    case = fan_out_case([(3, 1), (0, 2)], [600, 33], 1, dtype=torch.float32)
    plan = replace(plan_kernel(*case.layout, torch.device("cpu")), processors=64)
    view = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert case.excess(plan.attend(view, case.keys, case.values, case.scale)) <= 0
    assert variant_of(case, plan.rows, 1).split_for(2, 600, 64).splits == 4


def test_an_engine_computes_the_same_logits_with_the_kernel() -> None:
    engines = [
        PytorchEngine(tiny_model("qwen3"), vocab_size=500, max_model_len=128, block_size=4, num_blocks=40)
        for _ in range(2)
    ]
    engines[1]._plan_attention = plan_kernel
    tables = [[7, 3, 21, 4, 9], [30, 2, 11, 12, 39]]
    trunks = causal_batch([range(5, 14), range(40, 46)], [0, 0], tables, [4, 3], 4)
    branches = fan_out_batch(torch.arange(100, 105), [FanOut((2, 0, 1)), FanOut((0, 2))], [6, 4], tables, 0, 4)
    for batch in (trunks, branches):
        torch_path, kernel = (engine.forward(batch).logits for engine in engines)
        torch.testing.assert_close(kernel, torch_path, rtol=0, atol=1e-4 * float(torch_path.abs().max()))


def test_an_engine_s_graphs_compute_the_same_logits_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to 8 rows and 8 sequences, at two depths, by one plan that was made before any of the batches."""
    monkeypatch.setattr(cuda_graphs, "MAX_ROWS", 8)
    monkeypatch.setattr(triton_lang, "_processors", lambda device: 16)  # so that columns are split
    sizes = {"vocab_size": 500, "max_model_len": 128, "block_size": 4, "num_blocks": 40}
    plain = PytorchEngine(tiny_model("qwen3", num_hidden_layers=2), **sizes)
    stream = Stream()
    graphs = PytorchEngine(tiny_model("qwen3", num_hidden_layers=2), cuda=stream, **sizes)  # type: ignore[arg-type]
    tables = [[7, 3, 21, 4, 9], [30, 2, 11, 12, 39]]
    fan_outs = [FanOut((2, 0, 1)), FanOut((0, 2))]
    batches = [causal_batch([range(5, 9), range(40, 43)], [0, 0], tables, [4, 3], 4)]
    batches += [fan_out_batch(torch.arange(100, 105), fan_outs, [4, 3], tables, depth, 4) for depth in (0, 1)]
    batches += [causal_batch([[9]], [3], tables[1:], [1], 4)]
    for batch in batches:
        expected, found = (engine.forward(batch).logits for engine in (plain, graphs))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert stream.log.count("replay") == len(batches)


@pytest.mark.parametrize("window", [1, 3, 7])
def test_a_window_ends_among_own_tokens_in_the_trunk_and_in_the_prefix(window: int) -> None:
    case = fan_out_case([(2, 0, 2), (1, 1)], [9, 0], 3, dtype=torch.float32, window=window)
    assert case.excess(run(case, 1)) <= 0
