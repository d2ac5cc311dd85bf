"""The KV pool of one model: for each layer, keys and values of every slot. Allocated once; it knows no sequence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import CapacityError


class KvPool:
    """Keys and values, each [layers][num_blocks, block_size, KV heads, head dim].

    Raises CapacityError when it does not fit into the memory that is free.
    """

    def __init__(
        self, config: Any, *, block_size: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = num_blocks * kv_bytes_per_block(config, block_size, dtype)
        require_memory(size, f"the KV pool ({num_blocks} blocks of {block_size} tokens)", device)
        shape = (num_blocks, block_size, config.num_key_value_heads, head_dim(config))
        # Zeros, not empty: the memory is taken now, while failing is cheap, and not in the middle of a request.
        self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers))
        self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers))
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(self.keys, self.values)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, KV heads, head dim] of one layer at `slots` [N]."""
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, slots, keys)
        value_slots.index_copy_(0, slots, values)


def head_dim(config: Any) -> int:
    """Size of an attention head; some model configurations state it, others imply it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_bytes_per_block(config: Any, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block's keys and values over all layers, from a Hugging Face model configuration."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * dtype.itemsize
    return int(block_size * per_token)


def require_memory(needed: int, what: str, device: torch.device) -> None:
    """Raises CapacityError unless `needed` bytes are available on the device."""
    available = available_memory(device)
    if needed > available:
        raise CapacityError(
            f"not enough memory on {device} for {what}: {needed / 2**20:,.0f} MiB needed, {available / 2**20:,.0f} MiB "
            "available. Lower kv_tokens in the deployment, choose a smaller model or dtype, or free some memory."
        )


def available_memory(device: torch.device) -> int:
    """Bytes that can be taken on the device without swapping, within this container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_container_memory(), _system_memory()]
    return min(limit for limit in limits if limit is not None)


def _system_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return _table(meminfo)["MemAvailable:"] * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_memory() -> int | None:
    """What a control group (version 2) leaves: its limit less its anonymous memory; file pages can be dropped."""
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return None
    return max(0, int(text) - _table(group / "memory.stat")["anon"])


def _table(path: Path) -> dict[str, int]:
    """A kernel file of lines `name number [unit]`."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in fields}
