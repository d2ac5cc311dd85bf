"""Which attention kernel: all that is compiled into it, and the tile, split and grid that follow from that."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from saguaro.errors import EngineError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_SPLITS = 32
# Columns of one split: below this, putting the parts together costs more than the split saves.
_MIN_SPLIT = 256


@dataclass(frozen=True)
class Variant:
    """All that is compiled into the kernels: there is one binary for each. Raises EngineError for what cannot be."""

    dtype: torch.dtype  # float16, bfloat16 or float32; sums are in float32 always
    heads: int  # query heads H
    kv_heads: int
    head_dim: int  # D, 1 to 128
    block_size: int  # KV slots in a block
    scale: float
    most_rows: int  # of one sequence
    splits: int = 1  # of the columns, a power of two; more than 1 needs a workspace and `merge_kernel`
    window: int = 0  # sliding window in tokens, 0: none
    soft_cap: float = 0.0  # 0: none
    max_shared: int | None = None  # bytes of shared memory of a program, where the launcher has a limit of its own
    guarded: bool = False  # safe with rows and tables that nobody checked

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise EngineError(f"dtype: the attention kernel computes float16, bfloat16 and float32, not {self.dtype}.")
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise EngineError(f"heads: needs a multiple of the {self.kv_heads} KV heads, got {self.heads}.")
        if not 1 <= self.head_dim <= 128:
            raise EngineError(f"head_dim: the attention kernel takes heads of 1 to 128, got {self.head_dim}.")
        if not 1 <= self.splits <= _MAX_SPLITS or self.splits & (self.splits - 1):
            raise EngineError(f"splits: needs a power of two from 1 to {_MAX_SPLITS}, got {self.splits}.")
        if not 0.0 < self.scale < float("inf"):
            raise EngineError(f"scale: needs a positive number, got {self.scale}.")
        if min(self.block_size, self.most_rows) < 1 or min(self.window, self.soft_cap) < 0:
            raise EngineError(
                f"block_size, most_rows, window, soft_cap: need 1, 1, 0, 0 or more, got {self.block_size}, "
                f"{self.most_rows}, {self.window}, {self.soft_cap}."
            )

    @property
    def block_m(self) -> int:
        """Rows times query heads of one tile: what a sequence has, up to what the registers hold."""
        wanted = self.most_rows * self.heads // self.kv_heads
        return min(max(_power_of_two(wanted), 16), 32 if self.dtype == torch.float32 else 64)

    @property
    def block_n(self) -> int:
        """Columns of one tile. Under a limit, what leaves room for the query and two tiles of keys and of values."""
        columns = 32 if self.dtype == torch.float32 else 64
        if self.max_shared is not None:
            room = self.max_shared - 1024  # the compiler takes some for itself
            while columns > 16 and (self.block_m + 4 * columns) * self._block_d * self.dtype.itemsize > room:
                columns //= 2
        return columns

    @property
    def options(self) -> dict[str, int]:
        """How the compiler builds `fan_out_attention_kernel`: what spills nothing (see tests/compile_kernels.py)."""
        if self.dtype == torch.float32:
            return {"num_warps": 8, "num_stages": 2}
        # A third stage adds a little shared memory, which under a limit may be what does not fit.
        return {"num_warps": 8 if self.block_m == 64 else 4, "num_stages": 3 if self.max_shared is None else 2}

    def constants(self) -> dict[str, int | float]:
        """Constants of `fan_out_attention_kernel`."""
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.heads // self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "SCALE": self.scale,
            "WINDOW": self.window,
            "SOFT_CAP": self.soft_cap,
            "SPLITS": self.splits,
            "GUARDED": self.guarded,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_D": self._block_d,
        }

    def merge_constants(self) -> dict[str, int | float]:
        """Constants of `merge_kernel`."""
        return {"HEADS": self.heads, "HEAD_DIM": self.head_dim, "SPLITS": self.splits, "BLOCK_D": self._block_d}

    @property
    def _block_d(self) -> int:
        return max(16, _power_of_two(self.head_dim))

    def grid(self, num_sequences: int) -> tuple[int, int, int]:
        """Programs of `fan_out_attention_kernel`."""
        tiles = -(-self.most_rows * (self.heads // self.kv_heads) // self.block_m)
        return tiles, num_sequences * self.kv_heads, self.splits

    def split_for(self, num_sequences: int, most_columns: int, processors: int) -> Variant:
        """The same with as many splits as keep all processors of the device busy twice."""
        tiles, heads, _ = self.grid(num_sequences)
        splits = 1
        while splits < _MAX_SPLITS and tiles * heads * splits < 2 * processors and splits * _MIN_SPLIT < most_columns:
            splits *= 2
        return replace(self, splits=splits)


def _power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
