"""Attention of flat query rows over a paged KV pool in C++ on the CPU: `fan_out_attention.cpp`, for float32.

Beside PyTorch's kernels (`attention.py`) it reads a sequence's keys and values once for all of its rows, wherever its
blocks lie, in one call a layer. A row's result is the same bits whatever else is in the batch.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from saguaro.errors import EngineError
from saguaro.plugins import cpp
from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import SEQUENCE_FIELDS, check_rows


@dataclass(frozen=True)
class CppPlan:
    """What every layer of one forward needs to know of rows, blocks and mask."""

    kernel: Callable[..., None]
    tensors: array[int]  # int32, one behind the other: block table [S, W], `SEQUENCE_FIELDS` [S, 6], fork, branch [N]
    addresses: tuple[int, ...]  # of these four
    rows: int
    sequences: int
    width: int  # of the block table
    pool_shape: tuple[int, int]  # blocks and block size

    def attend(self, query: Tensor, key_pool: Tensor, value_pool: Tensor, scale: float) -> Tensor:
        """Attention output [N, H, D] of the rows `query` [N, H, D]; its rows may lie apart, but each in one piece.

        Raises EngineError for another dtype than float32, and for a pool or rows of another number than was planned.
        All else is for `check_tensors`, once for a model.
        """
        rows, heads, dim = query.shape
        blocks, block_size, kv_heads, _ = key_pool.shape
        if not query.dtype is key_pool.dtype is value_pool.dtype is torch.float32:
            raise EngineError(
                f"query: the attention in C++ needs torch.float32, got {query.dtype} over pools of {key_pool.dtype} "
                f"and {value_pool.dtype}. Use plan_attention for other dtypes."
            )
        if rows != self.rows or (blocks, block_size) != self.pool_shape:
            raise EngineError(
                f"query: {self.rows} rows over {self.pool_shape[0]} blocks of {self.pool_shape[1]} were planned, got "
                f"shape {list(query.shape)} over pools of {list(key_pool.shape)}. Plan again."
            )
        row, head, element = query.stride()
        if head != dim or element != 1:
            query = query.contiguous()
            row = heads * dim
        output = query.new_empty(rows, heads, dim)
        self.kernel(
            query.data_ptr(),
            key_pool.data_ptr(),
            value_pool.data_ptr(),
            *self.addresses,
            output.data_ptr(),
            row,
            self.width,
            self.sequences,
            block_size,
            kv_heads,
            heads // kv_heads,
            dim,
            scale,
        )
        return output


def plan_cpp(
    rows: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_blocks: int,
    mask: Tensor | FanOutMask,
    device: torch.device | str = "cpu",
) -> CppPlan:
    """The kernel's `plan_attention`: same arguments, same errors. Compiles the kernel where that has not been done."""
    check_rows(rows, block_tables, block_size, num_blocks, mask)
    if torch.device(device).type != "cpu":
        raise EngineError(f"device: the attention in C++ runs on the CPU, got {device}. Use plan_kernel on a GPU.")
    # As `RowTensors`, but in the fewest calls: for a few rows a tensor takes longer to make than to read in all layers.
    if isinstance(mask, FanOutMask):
        prefixes, trunks, steps = mask.prefix.tolist(), mask.trunk.tolist(), mask.depth + 1
        branches, forks, numbers = mask.branches.tolist(), mask.fork.tolist(), mask.branch.tolist()
    else:
        prefixes = trunks = [0] * len(rows)
        branches, steps, forks = [1] * len(rows), 0, mask.tolist()
        numbers = [0] * len(forks)
    width = max(map(len, block_tables))
    tensors = array("i")
    for table in block_tables:
        tensors.extend(table)
        tensors.extend([0] * (width - len(table)))
    for prefix, trunk, branch, first, count in zip(prefixes, trunks, branches, accumulate(rows, initial=0), rows):
        tensors.extend((prefix, trunk, branch, steps, first, count))  # SEQUENCE_FIELDS
    tensors.extend(forks)
    tensors.extend(numbers)
    sizes = (width * len(rows), len(SEQUENCE_FIELDS) * len(rows), len(forks))
    start, _ = tensors.buffer_info()
    addresses = tuple(start + tensors.itemsize * offset for offset in accumulate(sizes, initial=0))
    return CppPlan(load_kernel(), tensors, addresses, len(forks), len(rows), width, (num_blocks, block_size))


def rotate_and_store(
    projected: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor, key_pool: Tensor, value_pool: Tensor
) -> Tensor:
    """Store the keys, rotated, and values of `projected` [N, (H + 2 KV heads) * D]; returns its queries, rotated.

    They are [N, H, D]. Row n goes to slots[n] (int64, block * block_size + offset), and each pair (x1, x2) of elements
    half a head apart becomes (x1 cos - x2 sin, x2 cos + x1 sin) by its angles, cosines[n] and sines[n]: [N, ..., D], of
    which the second halves are read, so that the sign of the first does not matter. All are contiguous and, but for the
    slots, float32.

    Raises EngineError for others, and for a slot that the pool does not have; nothing is written then.
    """
    rows, width = projected.shape
    blocks, block_size, kv_heads, dim = key_pool.shape
    heads = width // dim - 2 * kv_heads
    if not (
        heads >= 1
        and width % dim == dim % 2 == 0
        and cosines.numel() == sines.numel() == rows * dim
        and slots.shape == (rows,)
        and slots.dtype is torch.int64
        and key_pool.shape == value_pool.shape
        and projected.dtype is cosines.dtype is sines.dtype is key_pool.dtype is value_pool.dtype is torch.float32
        and projected.is_contiguous()
        and cosines.is_contiguous()
        and sines.is_contiguous()
        and slots.is_contiguous()
        and key_pool.is_contiguous()
        and value_pool.is_contiguous()
    ):
        names = ("projected", "cosines", "sines", "slots", "key_pool", "value_pool")
        tensors = (projected, cosines, sines, slots, key_pool, value_pool)
        got = (f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True))
        raise EngineError(
            "projected: needs contiguous float32 of [N, (heads + 2 * KV heads) * D], D even, with cosines and sines of "
            f"[N, D], int64 slots of [N] and pools of one shape; got {', '.join(got)}."
        )
    query = projected.new_empty(rows, heads, dim)
    wrong = load_rotation()(
        projected.data_ptr(),
        cosines.data_ptr(),
        sines.data_ptr(),
        slots.data_ptr(),
        query.data_ptr(),
        key_pool.data_ptr(),
        value_pool.data_ptr(),
        rows,
        blocks * block_size,
        heads,
        kv_heads,
        dim,
    )
    if wrong >= 0:
        raise EngineError(
            f"slots[{wrong}]: needs one of the pool's 0 to {blocks * block_size - 1}, got {int(slots[wrong])}."
        )
    return query


@cache
def load_kernel() -> Callable[..., None]:
    """The attention, with the types of its arguments."""
    kernel = cpp.load("fan_out_attention").fan_out_attention
    kernel.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 2 + [ctypes.c_int32] * 5 + [ctypes.c_float]
    kernel.restype = None
    return kernel


@cache
def load_rotation() -> Callable[..., int]:
    """What stores the rows before it."""
    kernel = cpp.load("fan_out_attention").rotate_and_store
    kernel.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 2 + [ctypes.c_int32] * 3
    kernel.restype = ctypes.c_int64
    return kernel
