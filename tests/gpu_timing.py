"""What the scripts for a GPU share: their time limit, medians, and the model they time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LIMIT_S = 220.0
_STARTED = time.monotonic()


def seconds_left() -> float:
    return LIMIT_S - (time.monotonic() - _STARTED)


def host_ms(step: Callable[[], object], repetitions: int = 20) -> float:
    """Median time of a step that ends when the host has its result."""
    times = []
    for _ in range(repetitions + 3):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def device_ms(step: Callable[[], object], repetitions: int = 15) -> float:
    """Median time of what a step enqueues on the current stream, between two events."""
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_ceiling() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / (device_ms(lambda: target.copy_(source)) / 1000)


def llama_1b(max_model_len: int) -> Any:
    """The configuration of a model of the shape of Llama-3.2-1B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
