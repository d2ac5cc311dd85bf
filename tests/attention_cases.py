"""Batches for whatever computes attention over paged KV: random ones, with poison wherever nothing may be read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from masks import mask_of
from saguaro.plugins.attention import reference_attention, visible_columns
from saguaro.plugins.fan_out_mask import FanOutMask

BLOCK_SIZES = (1, 4, 16, 64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """A batch with its pools. Slots that no row sees hold NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: list[int]
    tables: list[list[int]]
    mask: Tensor | FanOutMask
    window: int = 0
    soft_cap: float = 0.0

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    @property
    def layout(self) -> tuple[list[int], list[list[int]], int, int, Tensor | FanOutMask]:
        """Arguments of the planners."""
        return self.rows, self.tables, self.keys.shape[1], len(self.keys), self.mask

    def to(self, kind: torch.dtype | str) -> Case:
        return replace(self, query=self.query.to(kind), keys=self.keys.to(kind), values=self.values.to(kind))

    def plain(self) -> Tensor:
        """Plain torch in the case's own dtype."""
        options = {"window": self.window, "soft_cap": self.soft_cap}
        return reference_attention(
            self.query, self.keys, self.values, self.rows, self.tables, self.mask, self.scale, **options
        )

    def excess(self, output: Tensor) -> float:
        """FlashAttention's rule: how far the output's error is above twice that of plain torch plus a tiny constant."""
        truth = self.to(torch.float64).plain()
        assert output.dtype == self.query.dtype
        assert output.isfinite().all()
        error, plain = (float((o.double() - truth).abs().max()) for o in (output, self.plain()))
        return error - (2 * plain + 1e-5 * float(truth.abs().max()))


def fan_out_case(
    counts: list[tuple[int, ...]],
    prefixes: list[int],
    depth: int,
    *,
    kept: Sequence[int] | None = None,
    **options: object,
) -> Case:
    """`kept`: the rows of branches that still grow; None: all."""
    columns = [p + len(c) + sum(c) * (depth + 1) for c, p in zip(counts, prefixes)]
    mask = mask_of(counts, prefixes, depth, kept)
    return make_case(mask.rows.tolist(), columns, mask, **options)


def causal_case(sequences: list[tuple[int, int]], **options: object) -> Case:
    """Sequences of (tokens before, rows)."""
    positions = torch.tensor([start + i for start, count in sequences for i in range(count)])
    return make_case([n for _, n in sequences], [s + n for s, n in sequences], positions, **options)


def make_case(
    rows: list[int],
    columns: list[int],
    mask: Tensor | FanOutMask,
    *,
    heads: tuple[int, int] = (2, 3),
    head_dim: int = 8,
    block_size: int = 4,
    scattered: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Case:
    """`columns[s]` columns are reserved for sequence s; `heads` are KV heads and query heads for each."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-c // block_size) for c in columns]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=generator).tolist() if scattered else list(range(blocks))
    tables = []
    for count in needed:
        tables.append(order[:count])
        order = order[count:]
    kv_heads, group = heads
    seen = torch.zeros(blocks * block_size, dtype=torch.bool)
    row = 0
    for count, table in zip(rows, tables):
        slots = (torch.tensor(table, dtype=torch.int64)[:, None] * block_size + torch.arange(block_size)).flatten()
        for _ in range(count):
            # What lies outside a window has been written all the same.
            seen[slots[visible_columns(mask, row, torch.arange(len(slots)))]] = True
            row += 1

    def pool(spread: float) -> Tensor:
        values = spread * torch.randn(blocks * block_size, kv_heads, head_dim, generator=generator, dtype=torch.float64)
        values[~seen] = torch.nan
        return values.view(blocks, block_size, kv_heads, head_dim).to(dtype)

    query = torch.randn(row, kv_heads * group, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    return Case(query, pool(2), pool(1), rows, tables, mask, window, soft_cap)


def random_case(seed: int, *, options: bool = True, **fixed: object) -> Case:
    """Any batch there is: fan-outs with unequal and zero counts, whole or thinned, or trunks; K of 1 to 16, prefixes of
    0 to 257.

    With `options` some have a window or a soft cap.
    """
    choose = random.Random(seed)
    chosen: dict[str, object] = {
        "heads": (choose.choice((1, 2)), choose.randint(1, 8)),
        "head_dim": choose.choice((64, 96, 128)),
        "block_size": choose.choice(BLOCK_SIZES),
        "scattered": choose.random() < 0.8,
        "dtype": choose.choice(DTYPES),
        "seed": seed,
    }
    if options:
        chosen["window"] = choose.choice((0, 0, choose.randint(1, 300)))
        chosen["soft_cap"] = choose.choice((0.0, 0.0, 5.0, 50.0))
    lookaheads = [choose.randint(1, 16) for _ in range(choose.randint(1, 3))]
    prefixes = [choose.choice((0, 1, choose.randint(0, 257), 257)) for _ in lookaheads]
    if choose.random() < 0.3:
        return causal_case([(p, k + 1) for p, k in zip(prefixes, lookaheads)], **chosen | fixed)
    counts = []
    for lookahead in lookaheads:
        guesses = [0] * (lookahead + 1)
        for _ in range(choose.choice((0, 1, choose.randint(1, 24)))):
            guesses[min(int(choose.expovariate(0.5)), lookahead)] += 1
        counts.append(tuple(guesses))
    if not any(map(sum, counts)):
        counts[0] = (0,) * lookaheads[0] + (1,)
    depth, rows = choose.randint(0, min(lookaheads)), range(sum(map(sum, counts)))
    kept = sorted(choose.sample(rows, choose.randint(1, len(rows)))) if choose.random() < 0.3 else None
    return fan_out_case(counts, prefixes, depth, kept=kept, **chosen | fixed)
