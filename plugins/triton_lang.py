"""Attention of flat query rows over a paged KV pool as one kernel in the Triton language, causal or under a fan-out.

The mask is the predicate of `fan_out_mask.py`, evaluated where the scores are: no mask is read, none is stored. The
rows of one sequence times the query heads of one KV head form the tile of a tensor-core product, so that the branches
of a sequence share every key and value they load. A causal row (trunk, prefill, decoding) is a row of a fan-out without
own columns, so the trunk needs no second kernel. Columns are split over programs; `merge_kernel` joins the parts.

Nothing here is allocated, read back or decided on the device's data at launch: depth, prefix and rows are read by the
kernel, and a CUDA graph of one step replays at every depth. Only this file imports `triton`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import RowTensors, check_rows
from saguaro.plugins.variant import Variant

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@triton.jit(do_not_specialize=["num_rows", "table_width", "num_blocks"])  # type: ignore[untyped-decorator]
def fan_out_attention_kernel(  # type: ignore[no-untyped-def]
    query,  # [N, H, D]
    key_pool,  # [num_blocks, BLOCK_SIZE, KV_HEADS, D], dtype of query; values likewise
    value_pool,
    block_table,  # [S, table_width] int32: blocks of each sequence in column order
    sequences,  # [S, 6] int32: prefix, trunk, branches (>= 1), steps, first row, rows
    fork,  # [N] int32: the row sees shared columns 0 .. prefix + fork
    branch,  # [N] int32: ... and of the own columns those of this branch
    num_rows,  # N, int32
    table_width,  # int32
    num_blocks,  # of a pool, int32
    output,  # SPLITS == 1: [N, H, D], dtype of query; else the parts, [SPLITS, N, H, D] float32
    lse,  # [SPLITS, N, H] float32, base 2: log2 of the sum of 2^score, -inf for none. Unused if SPLITS == 1
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads on one KV head, H = KV_HEADS * GROUP
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # KV slots in a block
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none. A row at position p sees positions above p - WINDOW
    SOFT_CAP: tl.constexpr,  # 0.0: none. Scores become cap * tanh(score / cap)
    SPLITS: tl.constexpr,
    GUARDED: tl.constexpr,  # whatever the int32s hold, no memory but the tensors' is touched and every loop ends
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, >= HEAD_DIM
):
    """Grid: (ceil(most rows of a sequence * GROUP / BLOCK_M), S * KV_HEADS, SPLITS).

    A fan-out step at depth d: steps = d + 1, rows = branches. Causal: steps = 0, branches = 1, and a row at position
    p has prefix + fork = p (trunk rows: prefix = columns before the trunk, fork = 0 .. K). Each sequence may do either.
    A sequence of 0 rows costs nothing; rows of no sequence are left as they are, so a graph's batch may be padded.

    The kernel reads every shared column up to the last that a row of the tile sees, and all own columns of the
    sequence: they must have been written. No other slot is read.
    """
    tile = tl.program_id(0)
    sequence = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)

    prefix = tl.load(sequences + sequence * 6)
    trunk = tl.load(sequences + sequence * 6 + 1)
    branches = tl.load(sequences + sequence * 6 + 2)
    steps = tl.load(sequences + sequence * 6 + 3)
    first_row = tl.load(sequences + sequence * 6 + 4)
    rows = tl.load(sequences + sequence * 6 + 5)
    if GUARDED:
        most = table_width * BLOCK_SIZE
        prefix = tl.minimum(tl.maximum(prefix, 0), most)
        trunk = tl.minimum(tl.maximum(trunk, 0), most)
        branches = tl.minimum(tl.maximum(branches, 1), most)
        steps = tl.minimum(tl.maximum(steps, 0), most // branches)
        first_row = tl.minimum(tl.maximum(first_row, 0), num_rows)
        rows = tl.minimum(tl.maximum(rows, 0), num_rows - first_row)
    if tile * BLOCK_M >= rows * GROUP:
        return

    # Row m of the tile is one query head of one row of the sequence.
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_row = m < rows * GROUP
    row = first_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    row_fork = tl.load(fork + row, mask=is_row, other=0)
    row_branch = tl.load(branch + row, mask=is_row, other=-1)
    if GUARDED:
        row_fork = tl.minimum(tl.maximum(row_fork, -1), most - 1 - prefix)
    context = tl.where(is_row, prefix + row_fork + 1, 0)
    place = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    in_head = (d < HEAD_DIM)[None, :]
    in_tile = is_row[:, None] & in_head
    q = tl.load(query + place[:, None] * HEAD_DIM + d[None, :], mask=in_tile, other=0.0)

    # The columns read, numbered without gaps: shared ones, then own ones. This program takes `start` to `end` of them.
    first_column = 0
    if WINDOW > 0:
        least = tl.min(tl.where(is_row, context, 2147483647))
        first_column = tl.minimum(tl.maximum(least + steps - WINDOW, 0), tl.max(context))
    shared = tl.max(context) - first_column
    columns = shared + steps * branches
    per_split = tl.cdiv(tl.cdiv(columns, SPLITS), BLOCK_N) * BLOCK_N
    start = split * per_split
    end = tl.minimum(start + per_split, columns)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_N):
        index = at + n
        inside = index < end
        own = index - shared  # >= 0: number of the own column
        column = tl.where(own >= 0, prefix + trunk + own, first_column + index)
        if GUARDED:
            inside &= column < most
        block = tl.load(block_table + sequence * table_width + column // BLOCK_SIZE, mask=inside, other=0)
        if GUARDED:
            inside &= (block >= 0) & (block < num_blocks)
        slot = block.to(tl.int64) * BLOCK_SIZE + column % BLOCK_SIZE
        offsets = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        loaded = inside[:, None] & in_head
        keys = tl.load(key_pool + offsets, mask=loaded, other=0.0)
        values = tl.load(value_pool + offsets, mask=loaded, other=0.0)

        visible = tl.where(
            (own >= 0)[None, :], (own % branches)[None, :] == row_branch[:, None], column[None, :] < context[:, None]
        )
        if WINDOW > 0:
            # Positions, relative to the row's context: a shared column is at column - context, an own one at its depth.
            near = tl.where(
                (own >= 0)[None, :],
                (own // branches + WINDOW >= steps)[None, :],
                column[None, :] + WINDOW >= context[:, None] + steps,
            )
            visible &= near
        visible &= inside[None, :]

        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if SOFT_CAP > 0.0:
            # tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow.
            ratio = scores * (SCALE / SOFT_CAP)
            e = tl.exp(-2.0 * tl.abs(ratio))
            capped = SOFT_CAP * 1.4426950408889634 * (1.0 - e) / (1.0 + e)
            scores = tl.where(ratio < 0.0, -capped, capped)
        else:
            scores = scores * (SCALE * 1.4426950408889634)  # log2(e): exponentials are taken to base 2
        scores = tl.where(visible, scores, float("-inf"))

        better = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(better == float("-inf"), 0.0, better)  # a row that has seen nothing yet
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        best = better

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing in this split: its part is 0, its sum 2^-inf
    acc = acc / total[:, None]
    if SPLITS == 1:
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], acc.to(output.dtype.element_ty), mask=in_tile)
    else:
        place += split.to(tl.int64) * num_rows * (KV_HEADS * GROUP)
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], acc, mask=in_tile)
        tl.store(lse + place, best + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    parts,  # [SPLITS, N, H, D] float32
    lse,  # [SPLITS, N, H] float32, base 2
    num_rows,  # N, int32
    output,  # [N, H, D]
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two
    BLOCK_D: tl.constexpr,
):
    """Put the parts of each row and head together. Grid: (N, HEADS)."""
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    places = place + s.to(tl.int64) * num_rows * HEADS
    sums = tl.load(lse + places)
    weights = tl.exp2(sums - tl.max(sums, 0))
    weights = weights / tl.sum(weights, 0)
    part = tl.load(parts + places[:, None] * HEAD_DIM + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    merged = tl.sum(part * weights[:, None], 0)
    tl.store(output + place * HEAD_DIM + d, merged.to(output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["num_slots"])  # type: ignore[untyped-decorator]
def update_kv_kernel(  # type: ignore[no-untyped-def]
    key,  # [N, KV_HEADS, D], value likewise: WIDTH elements a row
    value,
    slots,  # [N] int32: where each row goes, block * block_size + offset; outside of the pool: nowhere
    _key_pool,  # the pools again, as inputs of an operation that changes them in place
    _value_pool,
    num_slots,  # of a pool, int32
    key_pool,  # [num_slots, KV_HEADS, D]
    value_pool,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, >= WIDTH
):
    """Write the rows' keys and values into the pools. Grid: (N). Doing it twice is doing it once."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    e = tl.arange(0, BLOCK)
    inside = e < WIDTH
    tl.store(key_pool + slot * WIDTH + e, tl.load(key + row * WIDTH + e, mask=inside), mask=inside)
    tl.store(value_pool + slot * WIDTH + e, tl.load(value + row * WIDTH + e, mask=inside), mask=inside)


@dataclass(frozen=True)
class Workspace:
    """The parts of a split attention. Needs no initial value; may be shared by all layers of a model."""

    parts: Tensor  # [splits, N, H, D] float32
    lse: Tensor  # [splits, N, H] float32

    @staticmethod
    def of(variant: Variant, num_rows: int, device: torch.device | str) -> Workspace | None:
        """What `launch` needs for N rows: nothing without splits."""
        if variant.splits == 1:
            return None
        shape = (variant.splits, num_rows, variant.heads)
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return Workspace(torch.empty(*shape, variant.head_dim, **options), torch.empty(shape, **options))


def launch(
    variant: Variant,
    rows: RowTensors,
    query: Tensor,  # [N, H, D]
    key_pool: Tensor,  # [num_blocks, block_size, KV heads, D]
    value_pool: Tensor,
    output: Tensor,  # [N, H, D], written
    workspace: Workspace | None,
) -> None:
    """Attention of the rows into `output`, on the current stream: one kernel, two with splits.

    Nothing is checked (`check_rows`, `check_tensors`), allocated or waited for. All tensors are contiguous.
    """
    num_rows = len(query)
    fan_out_attention_kernel[variant.grid(len(rows.sequences))](
        query,
        key_pool,
        value_pool,
        rows.block_table,
        rows.sequences,
        rows.fork,
        rows.branch,
        num_rows,
        rows.block_table.shape[1],
        len(key_pool),
        workspace.parts if workspace else output,
        workspace.lse if workspace else None,
        **variant.constants(),
        **variant.options,
    )
    if workspace:
        merge_kernel[(num_rows, variant.heads)](
            workspace.parts, workspace.lse, num_rows, output, **variant.merge_constants()
        )


@dataclass(frozen=True)
class KernelPlan:
    """What every layer of one forward on a GPU needs to know of rows, blocks and mask."""

    rows: RowTensors
    sequences: int  # for how many of them the columns are split, so that all processors have work
    processors: int  # of the device

    def attend(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float) -> Tensor:
        """Attention output [N, H, D] of the rows `query` [N, H, D], like `fan_out_attention`."""
        _, heads, dim = query.shape
        _, block_size, kv_heads, _ = key_pool.shape
        variant = Variant(query.dtype, heads, kv_heads, dim, block_size, scale, self.rows.most_rows)
        variant = variant.split_for(self.sequences, self.rows.most_columns, self.processors)
        query = query.contiguous()
        output = torch.empty_like(query)
        launch(variant, self.rows, query, key_pool, value_pool, output, Workspace.of(variant, len(query), query.device))
        return output


def plan_kernel(
    rows: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_blocks: int,
    mask: Tensor | FanOutMask,
    device: torch.device,
) -> KernelPlan:
    """The kernel's `plan_attention`: same arguments, same errors."""
    check_rows(rows, block_tables, block_size, num_blocks, mask)
    return KernelPlan(RowTensors.of(rows, block_tables, mask, device), len(rows), _processors(device))


def plan_tensors(rows: RowTensors, device: torch.device) -> KernelPlan:
    """The plan of a graph, whose tensors hold other rows at every replay: any split of N rows among N sequences.

    Columns are split as for one sequence with all rows. More sequences need fewer parts; empty ones cost little.
    """
    return KernelPlan(rows, 1, _processors(device))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True)
class Compiled:
    """A kernel built ahead of time, without a GPU.

    Its arguments are the tensors and int32s of the kernel, without the constants, in order; Triton appends two pointers
    (scratch memory, of which these kernels use none) that may be null.
    """

    name: str
    ptx: str
    cubin: bytes
    threads: int  # of a program
    shared_bytes: int  # dynamic shared memory of a program


def compile_attention(variant: Variant, capability: int, *, keep_lse: bool = False) -> Compiled:
    """Build `fan_out_attention_kernel` for a device of compute capability 80, 90, 100, ...

    Without splits the argument `lse` is a constant too, unless it is kept: the kernel ends with `output`.
    """
    pool = "*" + _TYPES[variant.dtype]
    types = dict.fromkeys(("query", "key_pool", "value_pool"), pool)
    types |= dict.fromkeys(("block_table", "sequences", "fork", "branch"), "*i32")
    types |= dict.fromkeys(("num_rows", "table_width", "num_blocks"), "i32")
    types |= {"output": pool if variant.splits == 1 else "*fp32"}
    constants: dict[str, Any] = dict(variant.constants())
    if variant.splits == 1 and not keep_lse:
        constants = {"lse": None, **constants}
    else:
        types |= {"lse": "*fp32"}
    return _compile(fan_out_attention_kernel, types, constants, variant.options, capability)


def compile_merge(variant: Variant, capability: int) -> Compiled:
    """Build `merge_kernel` likewise."""
    types = {"parts": "*fp32", "lse": "*fp32", "num_rows": "i32", "output": "*" + _TYPES[variant.dtype]}
    return _compile(merge_kernel, types, variant.merge_constants(), {"num_warps": 4}, capability)


def compile_update(dtype: torch.dtype, width: int, capability: int) -> Compiled:
    """Build `update_kv_kernel` likewise, for rows of `width` elements."""
    pool = "*" + _TYPES[dtype]
    types = {"key": pool, "value": pool, "slots": "*i32", "_key_pool": pool, "_value_pool": pool, "num_slots": "i32"}
    types |= {"key_pool": pool, "value_pool": pool}
    return _compile(update_kv_kernel, types, update_constants(width), {"num_warps": 4}, capability)


def update_constants(width: int) -> dict[str, int]:
    """Constants of `update_kv_kernel`."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def _compile(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int], capability: int
) -> Compiled:
    # Tensors start at multiples of 16 bytes: what the launcher finds out of each pointer is stated here.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name].startswith("*")}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(
        built.metadata.name, built.asm["ptx"], built.asm["cubin"], built.metadata.num_warps * 32, built.metadata.shared
    )
