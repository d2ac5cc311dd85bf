"""The torch path of fan-out attention against its definition, over random shapes and block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from masks import mask_of
from saguaro.errors import EngineError
from saguaro.plugins import attention
from saguaro.plugins.attention import fan_out_attention, plan_attention, reference_attention
from saguaro.plugins.fan_out import FanOutMask

HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


@dataclass
class Case:
    """A batch with its pools. Slots that no row may see hold NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: list[int]
    tables: list[list[int]]
    mask: Tensor | FanOutMask

    def fast(self) -> Tensor:
        plan = plan_attention(self.rows, self.tables, *self.keys.shape[1::-1], self.mask)
        return fan_out_attention(self.query, self.keys, self.values, plan, SCALE)

    def reference(self) -> Tensor:
        return reference_attention(self.query, self.keys, self.values, self.rows, self.tables, self.mask, SCALE)


def make_case(
    rows: list[int],
    columns: list[int],
    mask: Tensor | FanOutMask,
    *,
    heads: tuple[int, int] = (2, 3),
    block_size: int = 4,
    scattered: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """`columns[s]` columns are reserved for sequence s; `heads` are KV heads and query heads for each."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-c // block_size) for c in columns]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=generator).tolist() if scattered else list(range(blocks))
    tables = []
    for count in needed:
        tables.append(order[:count])
        order = order[count:]
    kv_heads, group = heads
    shape = (blocks, block_size, kv_heads, HEAD_DIM)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    row = 0
    for count, table in zip(rows, tables):
        for _ in range(count):
            for column in range(len(table) * block_size):
                if see(mask, row, column):
                    place = table[column // block_size], column % block_size
                    if keys[place].isnan().any():
                        keys[place] = 2 * torch.randn(shape[2:], generator=generator, dtype=torch.float64).to(dtype)
                        values[place] = torch.randn(shape[2:], generator=generator, dtype=torch.float64).to(dtype)
            row += 1
    query = 2 * torch.randn(sum(rows), kv_heads * group, HEAD_DIM, generator=generator, dtype=torch.float64)
    return Case(query.to(dtype), keys, values, rows, tables, mask)


def see(mask: Tensor | FanOutMask, row: int, column: int) -> bool:
    if isinstance(mask, FanOutMask):
        return bool(mask.visible(torch.tensor(row), torch.tensor(column)))
    return column <= int(mask[row])


def fan_out_case(counts: list[tuple[int, ...]], prefixes: list[int], depth: int, **options: Any) -> Case:
    columns = [p + len(c) + sum(c) * (depth + 1) for c, p in zip(counts, prefixes)]
    return make_case([sum(c) for c in counts], columns, mask_of(counts, prefixes, depth), **options)


def causal_case(sequences: list[tuple[int, int]], **options: Any) -> Case:
    """Sequences of (tokens before, rows)."""
    positions = [start + i for start, count in sequences for i in range(count)]
    mask = torch.tensor(positions, dtype=torch.int64)
    return make_case([n for _, n in sequences], [s + n for s, n in sequences], mask, **options)


OPTIONS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 4)]),
        "block_size": st.sampled_from([1, 3, 4]),
        "scattered": st.booleans(),
        "seed": st.integers(0, 99),
    }
)
COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(COUNTS, st.integers(0, 7)), min_size=1, max_size=3), st.integers(0, 3), OPTIONS)
def test_fan_out_equals_the_definition(cases: list[tuple[tuple[int, ...], int]], depth: int, options: dict) -> None:
    if not any(sum(counts) for counts, _ in cases):
        return
    case = fan_out_case([counts for counts, _ in cases], [prefix for _, prefix in cases], depth, **options)
    torch.testing.assert_close(case.fast(), case.reference(), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4), OPTIONS)
def test_causal_prefill_and_decode_rows_equal_the_definition(sequences: list[tuple[int, int]], options: dict) -> None:
    case = causal_case(sequences, **options)
    torch.testing.assert_close(case.fast(), case.reference(), rtol=0, atol=1e-12)


def test_rows_need_not_be_consecutive() -> None:
    case = make_case([3, 2], [9, 6], torch.tensor([4, 1, 8, 0, 5]))
    torch.testing.assert_close(case.fast(), case.reference(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("budget", [(2**17, 64), (24, 64), (2**17, 3), (1, 1)])
def test_chunks_bound_the_scores_and_change_nothing(budget: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    scores, rows = budget
    monkeypatch.setattr(attention, "MAX_SCORES", scores)
    monkeypatch.setattr(attention, "MAX_ROWS", rows)
    for case in (causal_case([(3, 9), (0, 12)]), fan_out_case([(3, 0, 4), (5, 2)], [6, 1], 2)):
        torch.testing.assert_close(case.fast(), case.reference(), rtol=0, atol=1e-12)
        for chunk in plan_attention(case.rows, case.tables, 4, len(case.keys), case.mask).chunks:
            size = chunk.rows.stop - chunk.rows.start
            assert size == 1 or (size <= rows and size * chunk.columns <= scores)


def test_consecutive_blocks_are_read_in_place() -> None:
    case = causal_case([(5, 2), (30, 3)], scattered=False)
    plan = plan_attention(case.rows, case.tables, 4, len(case.keys), case.mask)
    assert [chunk.blocks for chunk in plan.chunks] == [slice(0, 2), slice(2, 11)]


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch() -> None:
    case = fan_out_case([(2, 1, 3), (1, 4)], [7, 3], 1, dtype=torch.float32)
    alone = fan_out_case([(2, 1, 3)], [7], 1, dtype=torch.float32)
    alone.query, alone.keys, alone.values, alone.tables = case.query[:6], case.keys, case.values, case.tables[:1]
    assert torch.equal(case.fast()[:6], alone.fast())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_plain_torch_in_the_same_dtype(dtype: torch.dtype) -> None:
    for case in (causal_case([(40, 1), (20, 5)], dtype=dtype), fan_out_case([(3, 2, 2)], [40], 2, dtype=dtype)):
        output, plain = case.fast(), case.reference()
        assert output.dtype == dtype
        case.query, case.keys, case.values = case.query.double(), case.keys.double(), case.values.double()
        truth = case.reference()
        assert (output - truth).abs().max() <= 2 * (plain - truth).abs().max() + 1e-7


def test_bfloat16_is_rounded_only_at_the_end() -> None:
    case = fan_out_case([(3, 2, 2)], [200], 2, dtype=torch.bfloat16)
    output = case.fast()
    case.query, case.keys, case.values = case.query.double(), case.keys.double(), case.values.double()
    torch.testing.assert_close(output.double(), case.reference(), rtol=2**-8, atol=1e-6)


def test_a_block_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(EngineError, match="sequence 1 of the batch reads 9 KV columns, but its block table has 2"):
        plan_attention([1, 2], [[0], [1, 2]], 4, 3, torch.tensor([2, 7, 8]))
    mask = mask_of([(1, 1)], [4], depth=1)
    with pytest.raises(EngineError, match="reads 10 KV columns"):
        plan_attention([2], [[0, 1]], 4, 2, mask)
