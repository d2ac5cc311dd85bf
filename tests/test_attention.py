"""Both ways to compute fan-out attention on the CPU against its definition, over random shapes and block tables."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, causal_case, fan_out_case, make_case, random_case
from masks import mask_of
from saguaro.bench import fan_out_attention as bench
from saguaro.errors import EngineError
from saguaro.plugins import cpp, cpp_attention
from saguaro.plugins.attention import MAX_ROWS, Plan, fan_out_attention, plan_attention
from saguaro.plugins.cpp_attention import plan_cpp, rotate_and_store
from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import RowTensors, check_tensors


def fast(case: Case, max_rows: int = MAX_ROWS) -> Tensor:
    plan = plan_attention(*case.layout, max_rows=max_rows)
    return fan_out_attention(case.query, case.keys, case.values, plan, case.scale)


@dataclass(frozen=True)
class Way:
    """One way to compute the attention, in the dtype that says most about it."""

    plan: Callable[..., Plan]
    dtype: torch.dtype

    def attend(self, case: Case) -> Tensor:
        return self.plan(*case.layout).attend(case.query, case.keys, case.values, case.scale)

    def check(self, case: Case) -> None:
        case = case.to(self.dtype)
        if self.dtype == torch.float64:
            torch.testing.assert_close(self.attend(case), case.plain(), rtol=0, atol=1e-12)
        else:
            assert case.excess(self.attend(case)) <= 0


# What the kernel in C++ is compiled for: vectors and blocks have other sizes on each.
CPUS = {"this CPU": cpp._FLAGS, "any CPU": tuple(flag for flag in cpp._FLAGS if flag != "-march=native")}
if platform.machine() == "x86_64":
    CPUS["no AVX-512"] = (*cpp._FLAGS, "-mno-avx512f")


@cache
def compiled(cpu: str) -> Way:
    if not any(map(shutil.which, cpp._COMPILERS)):
        pytest.skip("NOT TESTED: this machine has no C++ compiler (apt-get install g++)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "_FLAGS", CPUS[cpu])
        patch.setattr(cpp, "load", cpp.load.__wrapped__)
        kernel = cpp_attention.load_kernel.__wrapped__()
    return Way(lambda *layout: replace(plan_cpp(*layout), kernel=kernel), torch.float32)


@pytest.fixture(scope="session", params=CPUS)
def kernel(request: pytest.FixtureRequest) -> Way:
    """The kernel in C++."""
    return compiled(request.param)


@pytest.fixture(scope="session", params=["torch", *CPUS])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(plan_attention, torch.float64) if request.param == "torch" else compiled(request.param)


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
def test_fan_out_equals_the_definition(
    way: Way, cases: list[tuple[tuple[int, ...], int]], depth: int, options: dict
) -> None:
    if not any(sum(counts) for counts, _ in cases):
        return
    case = fan_out_case([counts for counts, _ in cases], [prefix for _, prefix in cases], depth, **options)
    way.check(case)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.lists(st.tuples(COUNTS, st.integers(0, 7)), min_size=1, max_size=3), st.integers(0, 3), OPTIONS)
def test_branches_that_grow_no_more_have_no_rows(
    way: Way, data: st.DataObject, cases: list[tuple[tuple[int, ...], int]], depth: int, options: dict
) -> None:
    """Nor is anything read from their columns, which hold NaN here."""
    counts, prefixes = [counts for counts, _ in cases], [prefix for _, prefix in cases]
    kept = [row for row in range(sum(map(sum, counts))) if data.draw(st.booleans())]
    if kept:
        way.check(fan_out_case(counts, prefixes, depth, kept=kept, **options))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4), OPTIONS)
def test_causal_prefill_and_decode_rows_equal_the_definition(
    way: Way, sequences: list[tuple[int, int]], options: dict
) -> None:
    way.check(causal_case(sequences, **options))


def test_rows_need_not_be_consecutive(way: Way) -> None:
    way.check(make_case([3, 2], [9, 6], torch.tensor([4, 1, 8, 0, 5])))


@pytest.mark.parametrize("rows", [64, 3, 1])
def test_chunks_bound_the_rows_and_change_nothing(rows: int) -> None:
    for case in (causal_case([(3, 9), (0, 12)]), fan_out_case([(3, 0, 4), (5, 2)], [6, 1], 2)):
        torch.testing.assert_close(fast(case, rows), case.plain(), rtol=0, atol=1e-12)
        sizes = [chunk.rows.stop - chunk.rows.start for chunk in plan_attention(*case.layout, max_rows=rows).chunks]
        assert sum(sizes) == len(case.query)
        assert max(sizes) <= rows


def test_consecutive_blocks_are_read_in_place() -> None:
    case = causal_case([(5, 2), (30, 3)], scattered=False)
    plan = plan_attention(*case.layout)
    assert [chunk.blocks for chunk in plan.chunks] == [slice(0, 2), slice(2, 11)]


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch() -> None:
    case = fan_out_case([(2, 1, 3), (1, 4)], [7, 3], 1, dtype=torch.float32)
    alone = fan_out_case([(2, 1, 3)], [7], 1, dtype=torch.float32)
    alone = replace(alone, query=case.query[:6], keys=case.keys, values=case.values, tables=case.tables[:1])
    assert torch.equal(fast(case)[:6], fast(alone))


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 300, 50)])
def test_error_is_at_most_twice_that_of_plain_torch_in_the_same_dtype(seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed, options=False)
        assert case.excess(fast(case)) <= 0, seed


def test_the_kernel_s_error_is_at_most_twice_that_of_plain_torch(kernel: Way) -> None:
    for seed in range(15):
        kernel.check(random_case(seed, options=False))


@pytest.mark.parametrize(("heads", "head_dim"), [((1, 71), 64), ((2, 7), 80), ((3, 1), 36), ((1, 16), 1)])
def test_the_kernel_takes_heads_of_any_number_and_size(kernel: Way, heads: tuple[int, int], head_dim: int) -> None:
    """More queries in a row than in a tile; elements that fill no vector, blocks that no tile of columns ends with."""
    kernel.check(fan_out_case([(3, 0, 2), (1, 1)], [130, 5], 1, heads=heads, head_dim=head_dim, block_size=3))
    kernel.check(causal_case([(60, 12), (0, 1)], heads=heads, head_dim=head_dim, block_size=100))


def test_the_kernel_s_exponentials_are_exact_to_a_millionth(kernel: Way) -> None:
    """Scores 0 to -1, and a value for each column that tells its weight."""
    scores = -torch.arange(64) / 63
    query, keys = torch.ones(1, 1, 64), torch.zeros(64, 1, 1, 64)
    keys[:, 0, 0, 0] = scores
    layout = ([1], [list(range(64))], 1, 64, torch.tensor([63]))
    weights = kernel.plan(*layout).attend(query, keys, torch.eye(64).view(64, 1, 1, 64), 1.0)
    torch.testing.assert_close(weights.flatten().double(), scores.double().softmax(0), rtol=1e-6, atol=0)


def test_more_of_a_path_than_is_attended_at_a_time(kernel: Way) -> None:
    kernel.check(fan_out_case([(1, 2)], [3], 70))


def test_scores_far_apart_and_what_is_infinite(kernel: Way) -> None:
    case = causal_case([(5, 200)], dtype=torch.float32)
    case = replace(case, query=case.query * 1000)
    kernel.check(case)
    for poison in (torch.nan, torch.inf):
        query = case.query.clone()
        query[3, 2, 0] = poison
        output = kernel.attend(replace(case, query=query))
        assert output[3, 2].isnan().all()
        assert torch.equal(output[4:], kernel.attend(case)[4:])


SEQUENCES = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=3)
HEADS = st.sampled_from([(1, 1), (2, 3), (2, 7), (1, 12)])


@settings(deadline=None, max_examples=25)
@given(SEQUENCES, HEADS, st.sampled_from([1, 4]))
def test_a_causal_row_is_the_same_bits_in_any_company(
    kernel: Way, sequences: list[tuple[int, int]], heads: tuple[int, int], block_size: int
) -> None:
    case = causal_case(sequences, heads=heads, block_size=block_size, head_dim=24, dtype=torch.float32)
    output = kernel.attend(case)
    tables = [table for table, count in zip(case.tables, case.rows) for _ in range(count)]
    for row, table in enumerate(tables):
        alone = replace(case, query=case.query[row, None], rows=[1], tables=[table], mask=case.mask[row, None])
        assert torch.equal(kernel.attend(alone)[0], output[row])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(COUNTS, st.integers(0, 150)), min_size=1, max_size=3), st.integers(0, 5), HEADS)
def test_a_branch_is_the_same_bits_in_any_company(
    kernel: Way, cases: list[tuple[tuple[int, ...], int]], depth: int, heads: tuple[int, int]
) -> None:
    if not any(sum(counts) for counts, _ in cases):
        return
    options = {"heads": heads, "head_dim": 24, "block_size": 1, "dtype": torch.float32}
    case = fan_out_case([counts for counts, _ in cases], [prefix for _, prefix in cases], depth, **options)
    output, mask = kernel.attend(case), case.mask
    for row, sequence in enumerate(mask.sequence.tolist()):
        one = slice(sequence, sequence + 1)
        columns = [*range(int(mask.prefix[sequence] + mask.trunk[sequence])), *mask.path[row].tolist()]
        alone = FanOutMask(
            mask.prefix[one],
            mask.trunk[one],
            torch.tensor([1]),
            torch.tensor([1]),
            mask.fork[row, None],
            torch.tensor([0]),
            depth,
        )
        table = [case.tables[sequence][column] for column in columns]
        single = replace(case, query=case.query[row, None], rows=[1], tables=[table], mask=alone)
        assert torch.equal(kernel.attend(single)[0], output[row])


def test_threads_change_nothing(kernel: Way) -> None:
    case = causal_case([(30, 50), (5, 1), (0, 20)], heads=(2, 7), dtype=torch.float32)
    threads, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outputs.append(kernel.attend(case))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_the_kernel_takes_any_view_of_a_query(kernel: Way) -> None:
    """The engine's are beside the keys in one tensor."""
    case = fan_out_case([(3, 1), (0, 2)], [60, 33], 1, dtype=torch.float32)
    expected = kernel.attend(case)
    beside = torch.cat([case.query, torch.full_like(case.query, torch.nan)], dim=1)
    assert torch.equal(kernel.attend(replace(case, query=beside[:, : case.query.shape[1]])), expected)
    turned = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(kernel.attend(replace(case, query=turned)), expected)
    assert expected.is_contiguous()


def test_what_the_kernel_cannot_compute_is_refused() -> None:
    case = causal_case([(5, 3)], dtype=torch.float32)
    plan = compiled("this CPU").plan(*case.layout)
    keys, values = case.keys, case.values
    with pytest.raises(EngineError, match="query: the attention in C.. needs torch.float32, got torch.bfloat16"):
        plan.attend(case.query.bfloat16(), keys, values, case.scale)
    with pytest.raises(EngineError, match="got torch.float32 over pools of torch.float32 and torch.float16"):
        plan.attend(case.query, keys, values.half(), case.scale)
    with pytest.raises(EngineError, match="query: 3 rows over 5 blocks of 4 were planned, got shape .2, 6, 8."):
        plan.attend(case.query[:2], keys, values, case.scale)
    with pytest.raises(EngineError, match="over pools of .4, 4, 2, 8.. Plan again."):
        plan.attend(case.query, keys[1:], values[1:], case.scale)
    with pytest.raises(EngineError, match="device: the attention in C.. runs on the CPU, got meta"):
        plan_cpp(*case.layout, device="meta")


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.sampled_from([(1, 1), (2, 3), (1, 12)]), st.sampled_from([2, 8, 36, 64]), st.booleans())
def test_rows_are_rotated_and_stored(rows: int, heads: tuple[int, int], dim: int, signed: bool) -> None:
    kv_heads, query_heads = heads[0], heads[0] * heads[1]
    rows *= 20
    generator = torch.Generator().manual_seed(rows + dim)
    projected = torch.randn(rows, query_heads + 2 * kv_heads, dim, generator=generator)
    angles = 100 * torch.rand(rows, 1, dim // 2, generator=generator)
    cosines, sines = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    slots = torch.randperm(3 * rows, generator=generator)[:rows]
    pools = [torch.full((rows, 3, kv_heads, dim), torch.nan) for _ in range(2)]

    first, second = projected.double().chunk(2, dim=-1)
    cosine, sine = (table[..., : dim // 2].double() for table in (cosines, sines))
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    query, keys, _ = turned.split([query_heads, kv_heads, kv_heads], dim=1)
    if signed:  # as the decoder has them
        sines[..., : dim // 2].neg_()
    compiled("this CPU")
    found = rotate_and_store(projected.flatten(1), cosines, sines, slots, *pools)
    torch.testing.assert_close(found.double(), query, rtol=0, atol=1e-6)
    key_slots, value_slots = (pool.flatten(0, 1) for pool in pools)
    torch.testing.assert_close(key_slots[slots].double(), keys, rtol=0, atol=1e-6)
    assert torch.equal(value_slots[slots], projected[:, -kv_heads:])
    for pool in (key_slots, value_slots):
        pool[slots] = 0
        assert int(pool.isnan().all(dim=(1, 2)).sum()) == 2 * rows  # and nothing else was written


def test_what_cannot_be_rotated_or_stored_is_refused() -> None:
    compiled("this CPU")
    projected, angles, slots = torch.ones(3, 40), torch.ones(3, 8), torch.tensor([0, 5, 2])
    keys, values = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    good = (projected, angles, angles, slots, keys, values)
    assert rotate_and_store(*good).shape == (3, 3, 8)
    for place, wrong in [
        (0, projected[:, :36]),
        (0, projected[:, :16]),
        (0, projected.double()),
        (0, projected.T.contiguous().T),
        (1, angles[:2]),
        (2, angles.bfloat16()),
        (3, slots[:2]),
        (3, slots.int()),
        (4, keys.transpose(0, 1)),
        (5, values[:1]),
    ]:
        with pytest.raises(EngineError, match="projected: needs contiguous float32 of"):
            rotate_and_store(*good[:place], wrong, *good[place + 1 :])
    for slot in (-1, 8):
        keys.zero_()
        with pytest.raises(EngineError, match=f"slots.1.: needs one of the pool's 0 to 7, got {slot}"):
            rotate_and_store(projected, angles, angles, torch.tensor([0, slot, 2]), keys, values)
        assert not keys.any()


def test_without_a_compiler_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(cpp, "load", cpp.load.__wrapped__)
    monkeypatch.setattr(cpp_attention, "load_kernel", cpp_attention.load_kernel.__wrapped__)
    with pytest.raises(EngineError, match="fan_out_attention is C.. .* there is no compiler here .*no-such-compiler"):
        plan_cpp(*causal_case([(5, 3)]).layout)


def test_bfloat16_is_rounded_only_at_the_end() -> None:
    case = fan_out_case([(3, 2, 2)], [200], 2, dtype=torch.bfloat16)
    torch.testing.assert_close(fast(case).double(), case.to(torch.float64).plain(), rtol=2**-8, atol=1e-6)


def test_a_window_and_a_soft_cap_change_what_the_definition_says() -> None:
    """Row by row against two lines of arithmetic, since every kernel is held to the definition."""
    case = fan_out_case([(1, 0, 1)], [5], 1, heads=(1, 1), window=4, soft_cap=1.5)
    plain, masked = case.plain(), []
    keys, values = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    # Positions: prefix 0..4, trunk 5..7; branch 0 forks at 5 and goes on at 6, 7; branch 1 forks at 7: 8, 9.
    for row, columns in ((0, [4, 5, 8, 10]), (1, [6, 7, 9, 11])):
        slots = [case.tables[0][c // 4] * 4 + c % 4 for c in columns]
        scores = 1.5 * torch.tanh(keys[slots, 0] @ case.query[row, 0] * case.scale / 1.5)
        masked.append(scores.softmax(0) @ values[slots, 0])
    torch.testing.assert_close(plain[:, 0], torch.stack(masked))


def test_a_block_table_that_is_too_short_is_refused(way: Way) -> None:
    with pytest.raises(EngineError, match="sequence 1 of the batch reads 9 KV columns, but its block table has 2"):
        way.plan([1, 2], [[0], [1, 2]], 4, 3, torch.tensor([2, 7, 8]))
    mask = mask_of([(1, 1)], [4], depth=1)
    with pytest.raises(EngineError, match="reads 10 KV columns"):
        way.plan([2], [[0, 1]], 4, 2, mask)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, tables, mask: ([2], tables[:1], mask), "mask.prefix: needs an int64 tensor of shape .1."),
        (lambda rows, tables, mask: (rows, tables[:1], mask), "block_tables: needs one table for each of the 2"),
        (lambda rows, tables, mask: ([0, 0], tables, mask), "rows: needs counts of 0 or more and at least one row"),
        (lambda rows, tables, mask: ([3, -1], tables, mask), "rows: needs counts of 0 or more"),
        (lambda rows, tables, mask: ([2, 2], tables, mask), "mask.fork: needs an int64 tensor of shape .4."),
        (lambda rows, tables, mask: ([2, 1], tables, mask), "mask.rows: needs .2, 1. like rows"),
        (
            lambda rows, tables, mask: (rows, [[0, 1, 9], tables[1]], mask),
            r"block_tables.0.: holds block 9, but the pool",
        ),
        (lambda rows, tables, mask: (rows, [[0, 1, -1], tables[1]], mask), r"block_tables.0.: holds block -1"),
        (
            lambda rows, tables, mask: (rows, tables, replace(mask, fork=mask.fork + 1)),
            "mask.fork: sequence 0 has trunk",
        ),
        (lambda rows, tables, mask: (rows, tables, replace(mask, branch=mask.branch * 0)), "mask.branch: sequence 1"),
        (
            lambda rows, tables, mask: (rows, tables, replace(mask, prefix=mask.prefix - 5)),
            "needs a prefix of 0 or more",
        ),
        (
            lambda rows, tables, mask: (rows, tables, replace(mask, fork=mask.fork.float())),
            "mask.fork: .* torch.float32",
        ),
        (lambda rows, tables, mask: (rows, tables, replace(mask, depth=-1)), "mask.depth: needs 0 or more, got -1"),
        (lambda rows, tables, mask: (rows, tables, torch.tensor([1, 2])), r"mask \(positions\): .* shape .3."),
        (lambda rows, tables, mask: (rows, tables, torch.tensor([0, 1, -1])), r"mask \(positions\): needs 0 or more"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(way: Way, change: Callable, message: str) -> None:
    rows, tables, mask = [1, 2], [[0, 1, 2], [3, 4, 5]], mask_of([(0, 1), (1, 1)], [4, 4], 0)
    way.plan(rows, tables, 4, 6, mask)
    rows, tables, mask = change(rows, tables, mask)
    with pytest.raises(EngineError, match=message):
        way.plan(rows, tables, 4, 6, mask)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"query: needs shape .3, heads, head dim., got .4, 8."),
        (lambda q, k, v: (q[:2], k, v), r"query: needs shape .3, heads, head dim."),
        (
            lambda q, k, v: (q[:, :3], k, v),
            "key_pool: needs shape .blocks, block size, KV heads, 8. .* query's 3 heads",
        ),
        (lambda q, k, v: (q, k, v[..., :4]), "value_pool: needs shape"),
        (lambda q, k, v: (q, k[0], v), "key_pool: needs shape"),
        (
            lambda q, k, v: (q, k, v.half()),
            "value_pool: needs the query's floating point dtype and device, torch.float32",
        ),
        (lambda q, k, v: (q, k.to("meta"), v), "key_pool: .* device, torch.float32 on cpu, got torch.float32 on meta"),
        (lambda q, k, v: (q, k.transpose(0, 1), v), "key_pool: needs to be contiguous"),
        (lambda q, k, v: (q, k, v[:3]), "value_pool: needs the key pool's shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change: Callable, message: str) -> None:
    query, (keys, values) = torch.zeros(3, 4, 8), torch.zeros(2, 5, 4, 2, 8)
    check_tensors(query, keys, values, 3)
    with pytest.raises(EngineError, match=message):
        check_tensors(*change(query, keys, values), 3)


def test_kernels_read_aligned_tensors_of_one_transfer() -> None:
    case = fan_out_case([(2, 0, 1), (0, 0), (0, 2)], [5, 1, 9], 1)
    rows = RowTensors.of(case.rows, case.tables, case.mask)
    assert rows.sequences.tolist() == [[5, 3, 3, 2, 0, 3], [1, 2, 1, 2, 3, 0], [9, 2, 2, 2, 3, 2]]
    assert rows.fork.tolist() == [0, 0, 2, 1, 1]
    assert rows.branch.tolist() == [0, 1, 2, 0, 1]
    assert [table[: len(t)] for table, t in zip(rows.block_table.tolist(), case.tables)] == case.tables
    assert (rows.most_rows, rows.most_columns) == (3, 15)
    tensors = (rows.block_table, rows.sequences, rows.fork, rows.branch)
    assert {t.dtype for t in tensors} == {torch.int32}
    assert {t.data_ptr() % 16 for t in tensors} == {0}
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1


def test_the_comparison_s_methods_agree_and_its_table_holds_their_times() -> None:
    result = bench.measure(2, 9, 20, repetitions=1)
    assert min(result.times.values()) >= 0
    assert 0 < result.memory["one_branch"] < result.memory["fan_out"]
    forward = bench.measure_forward(bench.Model("a", 2, 4, 2, 8), True, 9, 20, repetitions=1)
    page = bench.table([result], [forward], "command", "here", rate=1e5)
    heading, row = (line for line in page.splitlines() if line.startswith(("| B", "| 2")))
    assert row.startswith("| 2 | 9 | 20 | ")
    assert row.split(" | ")[11] == "12.90"  # four operations for each of 2 x 9 rows, 14 heads of 64 and 20 columns
    assert row.count("|") == heading.count("|")
    assert page.splitlines()[-1].startswith("| a | 2 | 9 | fan-out | 20 | ")
