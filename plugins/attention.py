"""Attention of flat query rows over a paged KV pool, causal or under the fan-out mask, on the CPU.

Rows of one sequence share most of what they see: the columns before the first that one of them must not see are
attended once for all rows, by PyTorch's fused kernel, without a mask and without scores in memory. What differs is
small and attended apart: the few shared columns behind that, each hidden from the rows that fork before it, and the
depth+1 columns of each row's own path. The two are put together by their log-sum-exp. What is where is worked out once
per forward (`plan_attention`), not once per layer.

A KV pool is [num_blocks, block_size, KV heads, head dim]. A block table lists the blocks of a sequence in column order.
Query head h reads KV head h // (heads / KV heads). This module knows nothing of models, engines or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import check_rows

# Rows of one call: a causal prefill computes no scores behind a chunk's last row, so chunks save work; and they bound
# the scores that are in memory, those of the columns that not all rows see.
MAX_ROWS = 64
# The fused kernel behind `scaled_dot_product_attention` on the CPU, which alone returns the log-sum-exp as well.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
    visible: int  # of them that every row sees
    hidden: Tensor  # [rows, columns - visible] bool: which of the others a row must not see
    own: Tensor | None  # [rows, depth+1] slots of each row's own path

    @property
    def alone(self) -> bool:
        """Whether it is one causal row, which sees every column that is read."""
        return self.own is None and self.rows.stop - self.rows.start == 1


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
    max_rows: int = MAX_ROWS,
) -> AttentionPlan:
    """Plan the attention of N flat rows: `rows[s]` rows for each of S sequences, adjacent.

    `mask` is either [N] positions (causal: a row at position i sees columns 0..i) or a FanOutMask. With `max_rows` 1
    the products of a causal row are of its own columns alone, whatever the other rows are.
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
        for start in range(first, last, max_rows):
            part = slice(start, min(start + max_rows, last))
            visible, columns = min(limit_list[part]), max(limit_list[part])
            hidden = (torch.arange(visible, columns) >= limits[part, None]).to(device)
            own = None if paths is None else _slots(table, paths[part], block_size).to(device)
            blocks = _blocks(table[: -(-columns // block_size)], device)
            chunks.append(_Chunk(part, blocks, columns, visible, hidden, own))
        first = last
    return AttentionPlan(tuple(chunks))


def fan_out_attention(query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention output [N, H, D] of the rows `query` [N, H, D] under the plan's mask, in the dtype of `query`.

    All is computed in float32 (float64 if `query` is). Shapes are not checked here, once a layer:
    `check_tensors` does that once for a model.
    """
    outputs = [
        (_attend_row if chunk.alone else _attend)(query[chunk.rows], key_pool, value_pool, chunk, scale)
        for chunk in plan.chunks
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_row(query: Tensor, key_pool: Tensor, value_pool: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    """`_attend` for a causal row by itself, a step of plain decoding, in as few calls as there can be."""
    _, heads, dim = query.shape
    _, block_size, kv_heads, _ = key_pool.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(1, kv_heads, heads // kv_heads, dim).to(dtype)
    if isinstance(chunk.blocks, slice):
        size = (1, kv_heads, chunk.columns, dim)
        token = kv_heads * dim
        start = chunk.blocks.start * block_size * token
        keys, values = (
            pool.as_strided(size, (token, dim, token, 1), pool.storage_offset() + start).to(dtype)
            for pool in (key_pool, value_pool)
        )
    else:
        keys, values = (_shared(pool, chunk).to(dtype).transpose(0, 1)[None] for pool in (key_pool, value_pool))
    output: Tensor = _fused(grouped, keys, values, scale=scale)[0]
    return output.reshape(1, heads, dim).to(query.dtype)


def _attend(query: Tensor, key_pool: Tensor, value_pool: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = key_pool.shape[2]
    group = heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)

    # The query heads of a KV head become rows of the same product: keys are read once and never repeated.
    grouped = (query.to(dtype) * scale).view(rows, kv_heads, group, dim)
    folded = grouped.permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    keys, values = (_shared(pool, chunk).to(dtype).transpose(0, 1) for pool in (key_pool, value_pool))
    seen = chunk.visible
    fused, lse = _fused(folded[None], keys[None, :, :seen], values[None, :, :seen], scale=1.0)
    output: Tensor = fused[0]  # [KV heads, group * rows, D]
    if seen == chunk.columns and chunk.own is None:
        return output.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim).to(query.dtype)

    # What all rows see is from here on one column: its score is the log-sum-exp, its value what has been computed.
    scores = [lse.view(kv_heads, group, rows, 1)]
    if seen < chunk.columns:
        partly = torch.bmm(folded, keys[:, seen:].transpose(1, 2)).view(kv_heads, group, rows, -1)
        scores.append(partly.masked_fill_(chunk.hidden, -torch.inf))
    if chunk.own is not None:
        own_keys, own_values = (pool.flatten(0, 1)[chunk.own].to(dtype) for pool in (key_pool, value_pool))
        scores.append((grouped @ own_keys.permute(0, 2, 3, 1)).permute(1, 2, 0, 3))  # [KV heads, group, rows, depth+1]
    probs = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    output = output.mul_(probs[..., :1].reshape(kv_heads, group * rows, 1))
    end = 1 + chunk.columns - seen
    if end > 1:
        output.baddbmm_(probs[..., 1:end].reshape(kv_heads, group * rows, -1), values[:, seen:])
    output = output.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3)
    if chunk.own is not None:
        output = output + probs[..., end:].permute(2, 0, 1, 3) @ own_values.transpose(1, 2)
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


def visible_columns(mask: Tensor | FanOutMask, row: int | Tensor, columns: Tensor, window: int = 0) -> Tensor:
    """Which `columns` of its sequence's block table a row sees; rows [R, 1] give [R, columns]. A causal mask is given
    by the [N] positions.
    """
    if isinstance(mask, FanOutMask):
        return mask.visible(torch.as_tensor(row), columns, window)
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
