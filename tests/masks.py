"""Fan-out masks for tests of whatever reads them."""

from __future__ import annotations

import torch

from saguaro.engines.base import fan_out_batch
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.fan_out_mask import FanOutMask


def mask_of(counts: list[tuple[int, ...]], prefixes: list[int], depth: int) -> FanOutMask:
    """The mask exactly as engines get it."""
    fan_outs = [FanOut(c) for c in counts]
    columns = [p + len(f.counts) + f.branches * (depth + 1) for p, f in zip(prefixes, fan_outs)]
    rows = sum(f.branches for f in fan_outs)
    tables = [list(range(c)) for c in columns]
    mask = fan_out_batch(torch.zeros(rows, dtype=torch.int64), fan_outs, prefixes, tables, depth, 1).fan_out
    assert mask is not None
    return mask
