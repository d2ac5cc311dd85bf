"""Fan-out masks for tests of whatever reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saguaro.engines.base import FanOutSteps
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.fan_out_mask import FanOutMask


def mask_of(
    counts: list[tuple[int, ...]], prefixes: list[int], depth: int, kept: Sequence[int] | None = None
) -> FanOutMask:
    """The mask exactly as engines get it; of the rows in `kept`, where the other branches grow no more."""
    fan_outs = [FanOut(c) for c in counts]
    columns = [p + len(f.counts) + f.branches * (depth + 1) for p, f in zip(prefixes, fan_outs)]
    rows = sum(f.branches for f in fan_outs)
    tables = [list(range(c)) for c in columns]
    steps = FanOutSteps(fan_outs, prefixes, tables, 1, range(depth, depth + 1))
    if kept is not None:
        steps, rows = steps.keep(kept), len(kept)
    mask = steps.batch(torch.zeros(rows, dtype=torch.int64), depth).fan_out
    assert mask is not None
    return mask
