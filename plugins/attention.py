"""Attention of flat query rows over a paged KV pool, causal or under the fan-out mask: the plain torch path.

Rows of one sequence share most of what they see, so each sequence is attended once for all its rows: one matrix product
over the shared columns, whatever their number. The fan-out mask then costs two small corrections: trunk columns behind
a row's fork are hidden, and the depth+1 columns of a row's own path are added, inside the same softmax. What is where
is worked out once per forward (`plan_attention`), not once per layer.

A KV pool is [num_blocks, block_size, KV heads, head dim]. A block table lists the blocks of a sequence in column order.
Query head h reads KV head h // (heads / KV heads). This module knows nothing of models, engines or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro.plugins.fan_out import FanOutMask
from saguaro.plugins.rows import check_rows

# Scores of one matrix product, per head: bounds the memory of a long prefill (float32, 64 heads: 32 MiB).
MAX_SCORES = 2**17
# Rows of one matrix product: a causal prefill computes no scores behind a chunk's last row, so chunks save work.
# Measured at 14 heads on 2 KV heads of 64: 64 rows take 0.74 to 0.96 of the time of 256 at 500 to 4096 tokens.
MAX_ROWS = 64


class Plan(Protocol):
    """What every layer of one forward needs to know of rows, blocks and mask, for one way to compute the attention."""

    def attend(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float) -> Tensor:
        """Attention output [N, H, D] of the rows `query` [N, H, D], in its dtype."""
        ...


@dataclass(frozen=True)
class _Chunk:
    """Rows of one sequence that are attended together."""

    rows: slice
    blocks: slice | Tensor  # of the shared columns: a range of the pool when consecutive, so that nothing is copied
    columns: int  # shared columns read; the last is visible to at least one row, so all of them have been written
    hidden: Tensor | None  # [rows, t] bool: which of the last t shared columns a row must not see
    own: Tensor | None  # [rows, depth+1] slots of each row's own path


@dataclass(frozen=True)
class AttentionPlan:
    """A `Plan` in plain torch: what every layer of one forward needs to know of rows, blocks and mask."""

    chunks: tuple[_Chunk, ...]

    def attend(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float) -> Tensor:
        """See `fan_out_attention`."""
        return fan_out_attention(query, key_pool, value_pool, self, scale)


def plan_attention(
    rows: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_blocks: int,
    mask: Tensor | FanOutMask,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Plan the attention of N flat rows: `rows[s]` rows for each of S sequences, adjacent.

    `mask` is either [N] positions (causal: a row at position i sees columns 0..i) or a FanOutMask.
    Raises EngineError, naming the argument, when they do not fit each other, a table holds a block the pool does not
    have, or is too short for what its rows see.
    """
    check_rows(rows, block_tables, block_size, num_blocks, mask)
    if isinstance(mask, FanOutMask):
        limits, paths = mask.context, mask.path
    else:
        limits, paths = mask + 1, None
    limit_list = limits.tolist()
    chunks = []
    first = 0
    for count, table in zip(rows, block_tables, strict=True):
        if count == 0:
            continue
        last = first + count
        longest = max(limit_list[first:last])
        step = max(1, min(MAX_ROWS, MAX_SCORES // longest))
        for start in range(first, last, step):
            part = slice(start, min(start + step, last))
            visible, columns = min(limit_list[part]), max(limit_list[part])
            hidden = None
            if visible < columns:
                hidden = (torch.arange(visible, columns) >= limits[part, None]).to(device)
            own = None if paths is None else _slots(table, paths[part], block_size).to(device)
            blocks = _blocks(table[: -(-columns // block_size)], device)
            chunks.append(_Chunk(part, blocks, columns, hidden, own))
        first = last
    return AttentionPlan(tuple(chunks))


def fan_out_attention(query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention output [N, H, D] of the rows `query` [N, H, D] under the plan's mask, in the dtype of `query`.

    Scores, softmax and sums are in float32 (float64 if `query` is). Shapes are not checked here, once a layer:
    `check_tensors` does that once for a model.
    """
    outputs = [_attend(query[chunk.rows], key_pool, value_pool, chunk, scale) for chunk in plan.chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(query: Tensor, key_pool: Tensor, value_pool: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = key_pool.shape[2]
    group = heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)

    # The query heads of a KV head become rows of the same product: keys are read once and never repeated.
    grouped = (query.to(dtype) * scale).view(rows, kv_heads, group, dim)
    folded = grouped.permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    keys = _shared(key_pool, chunk).to(dtype)  # [C, KV heads, D]
    scores = torch.bmm(folded, keys.permute(1, 2, 0))  # [KV heads, group * rows, C]
    if chunk.hidden is not None:
        tail = scores.view(kv_heads, group, rows, -1)[..., -chunk.hidden.shape[1] :]
        tail.masked_fill_(chunk.hidden, -torch.inf)
    if chunk.own is not None:
        own_keys = key_pool.flatten(0, 1)[chunk.own].to(dtype)  # [rows, depth+1, KV heads, D]
        own_scores = grouped @ own_keys.permute(0, 2, 3, 1)  # [rows, KV heads, group, depth+1]
        scores = torch.cat([scores, own_scores.permute(1, 2, 0, 3).flatten(1, 2)], dim=-1)
    probs = torch.softmax(scores, dim=-1)

    values = _shared(value_pool, chunk).to(dtype)
    output = torch.bmm(probs[..., : chunk.columns], values.transpose(0, 1))  # [KV heads, group * rows, D]
    output = output.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3)
    if chunk.own is not None:
        own_values = value_pool.flatten(0, 1)[chunk.own].to(dtype)
        own_probs = probs[..., chunk.columns :].reshape(kv_heads, group, rows, -1).permute(2, 0, 1, 3)
        output = output + own_probs @ own_values.transpose(1, 2)
    return output.reshape(rows, heads, dim).to(query.dtype)


def _shared(pool: Tensor, chunk: _Chunk) -> Tensor:
    """[C, KV heads, D]: the chunk's shared columns, as a view of the pool where its blocks are consecutive."""
    blocks = pool[chunk.blocks] if isinstance(chunk.blocks, slice) else pool.index_select(0, chunk.blocks)
    return blocks.flatten(0, 1)[: chunk.columns]


def _blocks(table: Sequence[int], device: torch.device | str) -> slice | Tensor:
    if list(table) == list(range(table[0], table[0] + len(table))):
        return slice(table[0], table[0] + len(table))
    return torch.tensor(table, dtype=torch.int64, device=device)


def _slots(table: Sequence[int], columns: Tensor, block_size: int) -> Tensor:
    return torch.tensor(table, dtype=torch.int64)[columns // block_size] * block_size + columns % block_size


def visible_columns(mask: Tensor | FanOutMask, row: int, columns: Tensor, window: int = 0) -> Tensor:
    """Which `columns` of its sequence's block table a row sees. A causal mask is given by the [N] positions."""
    if isinstance(mask, FanOutMask):
        return mask.visible(torch.tensor(row), columns, window)
    seen = columns <= mask[row]
    return seen & (columns > mask[row] - window) if window else seen


def reference_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    rows: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    mask: Tensor | FanOutMask,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """The definition, one row and one head at a time: softmax over the columns a row sees. [N, H, D] like `query`.

    With a sliding `window`, a row at position p sees positions above p - window; with a `soft_cap`, a score s becomes
    soft_cap * tanh(s / soft_cap). 0 is none.
    Slow and obviously right: what `fan_out_attention` and every kernel is checked against.
    """
    block_size, kv_heads = key_pool.shape[1:3]
    heads = query.shape[1]
    keys, values = key_pool.flatten(0, 1), value_pool.flatten(0, 1)
    output = torch.empty_like(query)
    row = 0
    for count, table in zip(rows, block_tables, strict=True):
        columns = torch.arange(len(table) * block_size)
        for _ in range(count):
            slots = _slots(table, columns[visible_columns(mask, row, columns, window)], block_size)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = keys[slots, kv_head] @ query[row, head] * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                output[row, head] = torch.softmax(scores, dim=0) @ values[slots, kv_head]
            row += 1
    return output
