"""The same sequences through an engine in different company: what every row's logits are compared over."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from saguaro.engines.base import Engine, causal_batch

COUNT, LENGTH = 8, 19  # sequences, and tokens of each
BLOCK, BLOCKS = 4, 64
_DRAW = random.Random(3)
SEQUENCES = [_DRAW.choices(range(500), k=LENGTH) for _ in range(COUNT)]
SCATTERED = _DRAW.sample(range(BLOCKS), BLOCKS)
Cuts = Sequence[int]  # tokens of each forward in which a sequence takes part, from its first on


def replay(engine: Engine, cuts: Sequence[Cuts], which: Sequence[int], order: Sequence[int]) -> list[Tensor]:
    """Logits [LENGTH, V] of each of the sequences `which`, run together; the pool's blocks are used in `order`."""
    tables = [order[8 * i : 8 * i + 8] for i in range(len(which))]
    rows: list[list[Tensor]] = [[] for _ in which]
    ends = [list(itertools.accumulate(cut, initial=0)) for cut in cuts]
    for step in range(max(map(len, cuts))):
        running = [i for i in range(len(which)) if step < len(cuts[i])]
        tokens = [SEQUENCES[which[i]][ends[i][step] : ends[i][step + 1]] for i in running]
        counts = [len(t) for t in tokens]
        batch = causal_batch(tokens, [ends[i][step] for i in running], [tables[i] for i in running], counts, BLOCK)
        for i, logits in zip(running, engine.forward(batch).logits.split(counts), strict=True):
            rows[i].append(logits)
    return [torch.cat(parts) for parts in rows]


def speculated(prompt: Cuts, lookahead: int) -> list[int]:
    """A prompt in those chunks, then trunks of K+1 tokens, the last one shorter."""
    whole, rest = divmod(LENGTH - sum(prompt), lookahead + 1)
    return [*prompt, *[lookahead + 1] * whole, *([rest] if rest else [])]


def one_by_one(engine: Engine, count: int = COUNT) -> list[Tensor]:
    """The logits of plain decoding, each of the first `count` sequences alone."""
    return [replay(engine, [[1] * LENGTH], [i], range(BLOCKS))[0] for i in range(count)]


def in_company(
    engine: Engine, lookaheads: Sequence[int] = range(1, 9), sizes: Sequence[int] = range(2, 9)
) -> list[tuple[str, int, Tensor]]:
    """(what was run, which sequence, its logits): alone with K = 1..8, in batches of 2..8, prompts whole and cut."""
    found = []
    for lookahead in lookaheads:
        prompt: Cuts = [[9], [4, 3, 2]][lookahead % 2]
        (logits,) = replay(engine, [speculated(prompt, lookahead)], [0], SCATTERED)
        found.append((f"alone, K={lookahead}, prompt in {prompt}", 0, logits))
    for size in sizes:
        which = list(range(size))[::-1]
        prompts: list[Cuts] = [[[9], [4, 3, 2], [1] * 5, [13], [8, 5]][i % 5] for i in which]
        cuts = [speculated(prompt, 1 + i) for i, prompt in zip(which, prompts, strict=True)]
        for i, logits in zip(which, replay(engine, cuts, which, SCATTERED), strict=True):
            found.append((f"in a batch of {size}", i, logits))
    return found
