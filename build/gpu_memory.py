"""What an engine takes of each GPU's memory: weights by tensor-parallel rank, KV cache, activations; all with formulas.

Weights and KV bytes are exact. Activations, decoder buffers and what CUDA and NCCL keep are estimates and marked so:
nobody has measured them for these engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from saguaro.build.model_shape import ModelShape

GIB: Final = 1 << 30
BFLOAT16: Final = 2  # bytes of a value
FLOAT32: Final = 4

# Share of the free memory that TensorRT-LLM takes for KV blocks: the default of KvCacheConfig.free_gpu_memory_fraction.
POOL_SHARE: Final = 0.9


@dataclass(frozen=True)
class Card:
    """A GPU as a process sees it."""

    name: str
    usable: int  # bytes that CUDA reports as total: less than on the box, by what driver and ECC keep
    capability: str  # compute capability

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores compute in FP8 (Ada, Hopper and later)."""
        return tuple(map(int, self.capability.split("."))) >= (8, 9)


CARDS: Final = MappingProxyType(
    {
        "a100-80gb": Card("NVIDIA A100 80 GB", int(79.1 * GIB), "8.0"),
        "h100-80gb": Card("NVIDIA H100 80 GB", int(79.1 * GIB), "9.0"),
        "h200-141gb": Card("NVIDIA H200 141 GB", int(139.7 * GIB), "9.0"),
    }
)


@dataclass(frozen=True)
class Item:
    """Something that takes memory on each GPU."""

    name: str
    bytes: int
    formula: str
    estimate: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one GPU of the engine's."""

    card: Card
    items: tuple[Item, ...]
    kv_token_bytes: int  # of one token, on this GPU
    tokens_per_block: int
    wanted_tokens: int  # for every sequence at its full length, in whole blocks

    @property
    def fixed(self) -> int:
        """Bytes taken before the first KV block."""
        return sum(item.bytes for item in self.items)

    @property
    def pool(self) -> int:
        """Bytes of KV blocks at the default share of what is free; 0 when nothing is."""
        return max(0, int((self.card.usable - self.fixed) * POOL_SHARE))

    @property
    def pool_tokens(self) -> int:
        """Tokens the pool holds, in whole blocks."""
        block = self.kv_token_bytes * self.tokens_per_block
        return self.pool // block * self.tokens_per_block


def weight_items(shape: ModelShape, tp: int, *, matrix_bytes: int, separate_head: bool, rotary: bool) -> list[Item]:
    """Weights of one rank. `matrix_bytes` is the size of a value in the layers' matrices; all others are bfloat16.

    `separate_head`: a tied head is stored a second time. `rotary`: a float32 table of sines and cosines is part of it.
    """
    attention = shape.hidden_size * 2 * shape.query_size
    # A rank has at least one KV head: with more ranks than heads, some have the same.
    kv = shape.hidden_size * 2 * max(shape.kv_size // tp, shape.head_dim)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    per_rank = "" if tp == 1 else f" / {tp}"
    items = [
        Item(
            "layers' matrices",
            shape.layers * ((attention + mlp) // tp + kv) * matrix_bytes,
            f"{shape.layers} x (2 x hidden x query + 2 x hidden x kv + 3 x hidden x intermediate){per_rank} "
            f"x {matrix_bytes} B: split by heads and by MLP columns",
        ),
        Item(
            "embedding",
            shape.vocabulary_matrix * BFLOAT16,
            f"vocabulary x hidden x {BFLOAT16} B: whole on each rank",
        ),
        Item("norms and biases", shape.layer_vectors * BFLOAT16, f"x {BFLOAT16} B: whole on each rank"),
    ]
    if separate_head or not shape.tied:
        rows = math.ceil(shape.vocab_size / tp)
        items.insert(
            1,
            Item(
                "head",
                rows * shape.hidden_size * BFLOAT16,
                f"vocabulary{per_rank} x hidden x {BFLOAT16} B: split by vocabulary",
            ),
        )
    if rotary:
        table = shape.max_position_embeddings * shape.head_dim * FLOAT32
        items.append(Item("rotary table", table, "positions x head dim x 4 B: whole on each rank"))
    return items


def kv_token_bytes(shape: ModelShape, tp: int, value_bytes: int) -> int:
    """Bytes that keys and values of one token take on each GPU, over all layers."""
    return 2 * shape.layers * max(shape.kv_heads // tp, 1) * shape.head_dim * value_bytes


def activation_items(shape: ModelShape, tp: int, *, tokens: int, logit_rows: int, logit_copies: int) -> list[Item]:
    """Estimate of what a forward of `tokens` rows needs beside weights and KV, `logit_rows` of them with logits."""
    attention = 2 * (shape.query_size + 2 * shape.kv_size) // tp
    mlp = 3 * shape.intermediate_size // tp
    widest = "3 x intermediate" if mlp >= attention else "2 x (query + 2 x kv)"
    per_rank = "" if tp == 1 else f" / {tp}"
    return [
        Item(
            "activations",
            tokens * (3 * shape.hidden_size + max(attention, mlp)) * BFLOAT16,
            f"{tokens} tokens x (3 x hidden + {widest}{per_rank}) x {BFLOAT16} B: residual, norm, sum over ranks; and "
            "the widest part of a layer",
            estimate=True,
        ),
        Item(
            "logits and probabilities",
            logit_copies * logit_rows * shape.vocab_size * FLOAT32,
            f"{logit_copies} x {logit_rows} rows x vocabulary x {FLOAT32} B",
            estimate=True,
        ),
        Item(
            "CUDA, cuBLAS" + (", NCCL" if tp > 1 else ""),
            int((1.5 if tp > 1 else 0.8) * GIB),
            "assumed: context, loaded kernels, workspaces" + (", buffers of the all-reduce" if tp > 1 else ""),
            estimate=True,
        ),
    ]


def whole_blocks(lengths: Iterable[int], tokens_per_block: int) -> int:
    """Tokens that sequences of these lengths take in whole blocks."""
    return sum(math.ceil(length / tokens_per_block) * tokens_per_block for length in lengths)
