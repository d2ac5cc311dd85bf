"""The rows of one forward, checked once, and as the small integer tensors that kernels read.

Every way to compute the attention (torch, the Triton-lang kernel, the TensorRT plugin) takes the same rows, block
tables and mask. What is wrong with them is found here, once per forward and on the host, never in a layer or on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.errors import EngineError
from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.transfers import to_device

SEQUENCE_FIELDS = ("prefix", "trunk", "branches", "steps", "first row", "rows")
# `RowTensors` by name, all int32, as kernels take them. A letter is a size: S sequences, N rows, W blocks of the
# longest block table. A compiled network leaves all of them open.
MASK: dict[str, tuple[int | str, ...]] = {
    "block_table": ("S", "W"),
    "sequences": ("S", len(SEQUENCE_FIELDS)),
    "fork": ("N",),
    "branch": ("N",),
}
_ALIGNED = 4  # int32s: where a tensor starts inside the packed one, since kernels read 16 bytes at a time


@dataclass(frozen=True)
class RowTensors:
    """What a kernel reads of N rows of S sequences; all int32, on one device.

    A causal row is a row of a fan-out without own columns: steps 0, branches 1, prefix 0 and the position as its fork.
    """

    block_table: Tensor  # [S, M], behind a sequence's blocks: 0
    sequences: Tensor  # [S, 6]: SEQUENCE_FIELDS
    fork: Tensor  # [N]
    branch: Tensor  # [N]
    most_rows: int  # of a sequence
    most_columns: int  # that a sequence's rows read

    @staticmethod
    def of(
        rows: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        mask: Tensor | FanOutMask,
        device: torch.device | str = "cpu",
    ) -> RowTensors:
        """The tensors of checked rows. One transfer, whatever their number."""
        count = torch.tensor(rows, dtype=torch.int32)
        first = count.cumsum(0, dtype=torch.int32) - count
        if isinstance(mask, FanOutMask):
            prefix, trunk, branches = mask.prefix, mask.trunk, mask.branches.clamp(min=1)
            steps = torch.full_like(prefix, mask.depth + 1)
            fork, branch = mask.fork, mask.branch
            columns = int((prefix + trunk + branches * steps).max())
        else:
            prefix, trunk, steps, branches = (torch.full_like(count, value) for value in (0, 0, 0, 1))
            fork, branch = mask, torch.zeros_like(mask)
            columns = int(mask.max()) + 1
        width = max(len(table) for table in block_tables)
        table = torch.tensor([[*table, *[0] * (width - len(table))] for table in block_tables], dtype=torch.int32)
        sequences = torch.stack([prefix, trunk, branches, steps, first, count], dim=1)
        table, sequences, fork, branch = _to_device([table, sequences, fork, branch], device)
        return RowTensors(table, sequences, fork, branch, max(rows), columns)


def _to_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """The tensors as int32 views of one tensor on the device."""
    parts, sizes = [], []
    for tensor in tensors:
        flat = tensor.flatten().to(torch.int32)
        sizes.append(-(-len(flat) // _ALIGNED) * _ALIGNED)
        parts.append(torch.nn.functional.pad(flat, (0, sizes[-1] - len(flat))))
    packed = to_device(torch.cat(parts), device)
    return [part[: t.numel()].view(t.shape) for part, t in zip(packed.split(sizes), tensors, strict=True)]


def check_rows(
    rows: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_blocks: int,
    mask: Tensor | FanOutMask,
) -> None:
    """Raises EngineError, naming the argument, for rows that cannot be attended to: see `plan_attention`."""
    if len(rows) != len(block_tables):
        raise EngineError(
            f"block_tables: needs one table for each of the {len(rows)} sequences, got {len(block_tables)}."
        )
    total = sum(rows)
    if total < 1 or min(rows) < 0:
        raise EngineError(f"rows: needs counts of 0 or more and at least one row in all, got {list(rows)}.")
    if isinstance(mask, FanOutMask):
        needed = _fan_out_columns(rows, mask)
    else:
        _require_integers("mask (positions)", mask, total)
        positions = mask.tolist()
        if min(positions) < 0:
            raise EngineError(f"mask (positions): needs 0 or more, got {min(positions)}.")
        needed, first = [], 0
        for count in rows:
            needed.append(max(positions[first : first + count], default=-1) + 1)
            first += count
    for sequence, (table, columns) in enumerate(zip(block_tables, needed)):
        if columns > len(table) * block_size:
            raise EngineError(
                f"sequence {sequence} of the batch reads {columns} KV columns, but its block table has {len(table)} "
                f"blocks of {block_size}. Grow the table before the forward."
            )
        if table and not 0 <= min(table) <= max(table) < num_blocks:
            wrong = min(table) if min(table) < 0 else max(table)
            raise EngineError(
                f"block_tables[{sequence}]: holds block {wrong}, but the pool has blocks 0 to {num_blocks - 1}."
            )


def _fan_out_columns(rows: Sequence[int], mask: FanOutMask) -> list[int]:
    """Columns each sequence reads, after its part of the mask was checked."""
    if mask.depth < 0:
        raise EngineError(f"mask.depth: needs 0 or more, got {mask.depth}.")
    for name in ("prefix", "trunk", "branches", "rows"):
        _require_integers(f"mask.{name}", getattr(mask, name), len(rows))
    for name in ("fork", "branch"):
        _require_integers(f"mask.{name}", getattr(mask, name), sum(rows))
    if mask.rows.tolist() != list(rows):
        raise EngineError(f"mask.rows: needs {list(rows)} like rows, got {mask.rows.tolist()}.")
    fork, branch = mask.fork.tolist(), mask.branch.tolist()
    columns, first = [], 0
    sizes = zip(rows, mask.prefix.tolist(), mask.trunk.tolist(), mask.branches.tolist())
    for s, (count, prefix, trunk, branches) in enumerate(sizes):
        part = slice(first, first + count)
        if prefix < 0 or trunk < 1:
            raise EngineError(
                f"mask: sequence {s} needs a prefix of 0 or more and a trunk of K+1, got {prefix}, {trunk}."
            )
        if count and not 0 <= min(fork[part]) <= max(fork[part]) < trunk:
            raise EngineError(f"mask.fork: sequence {s} has trunk rows 0 to {trunk - 1} (K), got {fork[part]}.")
        if count and not (0 <= min(branch[part]) <= max(branch[part]) < branches and len(set(branch[part])) == count):
            raise EngineError(
                f"mask.branch: sequence {s} needs {count} different ones of 0 to {branches - 1}, got {branch[part]}."
            )
        columns.append(prefix + trunk + branches * (mask.depth + 1) if count else 0)
        first += count
    return columns


def _require_integers(name: str, tensor: Tensor, length: int) -> None:
    if tensor.shape != (length,) or tensor.dtype not in (torch.int32, torch.int64) or tensor.device.type != "cpu":
        raise EngineError(
            f"{name}: needs an int64 tensor of shape [{length}] on the CPU, got {tensor.dtype} of shape "
            f"{list(tensor.shape)} on {tensor.device}."
        )


def check_tensors(query: Tensor, key_pool: Tensor, value_pool: Tensor, num_rows: int) -> None:
    """Raises EngineError, naming the argument, unless query and pools fit each other.

    The query is [N, H, D], each pool [num_blocks, block_size, KV heads, D], contiguous, of one dtype and device, and H
    a multiple of the KV heads.
    """
    if query.dim() != 3 or len(query) != num_rows:
        raise EngineError(f"query: needs shape [{num_rows}, heads, head dim], got {list(query.shape)}.")
    _, heads, dim = query.shape
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        if pool.dim() != 4 or pool.shape[-1] != dim or pool.shape[2] < 1 or heads % pool.shape[2]:
            raise EngineError(
                f"{name}: needs shape [blocks, block size, KV heads, {dim}] with a number of KV heads that divides the "
                f"query's {heads} heads, got {list(pool.shape)}."
            )
        if pool.dtype != query.dtype or not query.dtype.is_floating_point or pool.device != query.device:
            raise EngineError(
                f"{name}: needs the query's floating point dtype and device, {query.dtype} on {query.device}, got "
                f"{pool.dtype} on {pool.device}."
            )
        if not pool.is_contiguous():
            raise EngineError(f"{name}: needs to be contiguous, got strides {pool.stride()} for {list(pool.shape)}.")
    if key_pool.shape != value_pool.shape:
        raise EngineError(
            f"value_pool: needs the key pool's shape {list(key_pool.shape)}, got {list(value_pool.shape)}."
        )
