"""Attention of flat query rows over a paged KV pool as one kernel in the Triton language, causal or under a fan-out.

The mask is the predicate of `plugins/fan_out.py`, evaluated where the scores are: no mask is read, none is stored. The
rows of one sequence times the query heads of one KV head form the tile of a tensor-core product, so that the branches
of a sequence share every key and value they load. A causal row (trunk, prefill, decoding) is a row of a fan-out without
own columns, so the trunk needs no second kernel. Columns are split over programs; `merge_kernel` puts the parts together.

Nothing here is allocated, read back or decided on the device's data at launch: depth, prefix and rows are read by the
kernel, and a CUDA graph of one step replays at every depth. Only this file imports `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from saguaro.errors import EngineError

# Columns of `sequences`.
PREFIX, TRUNK, BRANCHES, STEPS, FIRST_ROW, ROWS = range(6)


@triton.jit
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
        block = tl.load(block_table + sequence * table_width + column // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + column % BLOCK_SIZE
        offsets = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        loaded = inside[:, None] & in_head
        keys = tl.load(key_pool + offsets, mask=loaded, other=0.0)
        values = tl.load(value_pool + offsets, mask=loaded, other=0.0)

        visible = tl.where(
            (own >= 0)[None, :], (own % branches)[None, :] == row_branch[:, None], column[None, :] < context[:, None]
        )
        if WINDOW > 0:
            # Positions, relative to the row's context: a shared column lies at column - context, an own one at its depth.
            near = tl.where(
                (own >= 0)[None, :],
                (own // branches + WINDOW >= steps)[None, :],
                column[None, :] + WINDOW >= context[:, None] + steps,
            )
            visible &= near
        visible &= inside[None, :]

        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if SOFT_CAP > 0.0:
            # tanh(x) = 1 - 2 / (1 + e^2x), which at both ends goes to where it should.
            scores = SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + tl.exp(scores * (2.0 * SCALE / SOFT_CAP)))
            scores = scores * 1.4426950408889634
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

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], acc.to(output.dtype.element_ty), mask=in_tile)
    else:
        place += split.to(tl.int64) * num_rows * (KV_HEADS * GROUP)
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], acc, mask=in_tile)
        tl.store(lse + place, tl.where(total == 0.0, float("-inf"), best + tl.log2(total)), mask=is_row)


@triton.jit
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


@triton.jit
def update_kv_kernel(  # type: ignore[no-untyped-def]
    key,  # [N, KV_HEADS, D], value likewise: WIDTH elements a row
    value,
    slots,  # [N] int32: where each row goes, block * block_size + offset; outside of the pool: nowhere
    _key_pool,  # the pools as inputs: the memory of the outputs, by TensorRT's order of arguments
    _value_pool,
    num_slots,  # of a pool, int32
    key_pool,  # [num_slots, KV_HEADS, D]
    value_pool,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, >= WIDTH
):
    """Write the rows' keys and values into the pools. Grid: (N). Writing twice is writing once."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    e = tl.arange(0, BLOCK)
    inside = e < WIDTH
    tl.store(key_pool + slot * WIDTH + e, tl.load(key + row * WIDTH + e, mask=inside), mask=inside)
    tl.store(value_pool + slot * WIDTH + e, tl.load(value + row * WIDTH + e, mask=inside), mask=inside)


@dataclass(frozen=True)
class Compiled:
    """A kernel as PTX for launchers other than Triton's own. Its parameters are the kernel's, but the constants."""

    name: str
    ptx: str
    threads: int  # in a block
    shared: int  # bytes of shared memory, dynamic


def compile_ptx(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, capability: int, num_warps: int, num_stages: int
) -> Compiled:
    """Compile for a compute capability (90 is 9.0); needs no GPU. `types` are Triton's, such as "*bf16" and "i32".

    Triton adds two parameters of its own, scratch memory of its launcher, which TensorRT would not pass: they are
    removed. Raises EngineError when the kernel uses them.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # Buffers are aligned to 16 bytes at least: loads can be as wide as the hardware's.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    name = made.metadata.name
    return Compiled(name, _without_scratch(made.asm["ptx"], name, len(types)), num_warps * 32, made.metadata.shared)


def _without_scratch(ptx: str, name: str, parameters: int) -> str:
    """The PTX with the kernel's first `parameters` parameters only."""
    start = ptx.index(f".entry {name}(") + len(f".entry {name}(")
    end = ptx.index(")", start)
    declared = ptx[start:end].split(",")
    for extra in range(parameters, len(declared)):
        if f"{name}_param_{extra}]" in ptx[end:]:
            raise EngineError(f"the kernel {name} needs scratch memory, which only Triton's own launcher passes.")
    return ptx[:start] + ",".join(declared[:parameters]) + "\n" + ptx[end:]
