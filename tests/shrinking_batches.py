"""The forwards of a batch that shrinks, as the two roles ask for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from saguaro.engines.base import ForwardBatch, causal_batch, fan_out_batch
from saguaro.plugins.fan_out import FanOut


def shrinking_batches(
    seed: int, tables: Sequence[Sequence[int]], vocab_size: int, block_size: int
) -> Iterator[ForwardBatch]:
    """Prompts of up to nine tokens, then trunks and branches at two depths, of fewer sequences each time."""
    draw = random.Random(seed)
    count = draw.randint(1, len(tables))
    lengths = [draw.randint(1, 9) for _ in range(count)]

    def tokens(n: int) -> list[int]:
        return draw.choices(range(vocab_size), k=n)

    yield causal_batch([tokens(n) for n in lengths], [0] * count, tables[:count], [1] * count, block_size)
    while count > 0:
        trunks = [tokens(3) for _ in range(count)]
        yield causal_batch(trunks, lengths[:count], tables[:count], [3] * count, block_size)
        fan_outs = [FanOut(tuple(draw.randint(0, 3) for _ in range(3))) for _ in range(count)]
        branches = sum(fan_out.branches for fan_out in fan_outs)
        for depth in range(2 if branches else 0):
            fed = torch.tensor(tokens(branches))
            yield fan_out_batch(fed, fan_outs, lengths[:count], tables[:count], depth, block_size)
        count -= draw.randint(1, 2)
