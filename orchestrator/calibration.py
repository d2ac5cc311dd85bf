"""What a forward takes on this machine, measured before the first request."""

from __future__ import annotations

import time

import torch

from saguaro.engines.base import Engine, causal_batch
from saguaro.orchestrator.protocol import Step

_ROWS = (1, 4, 16)


def measure(engine: Engine) -> tuple[Step, ...]:
    """Forwards over 1, 4 and 16 rows of one sequence, the second of two each.

    They write into the KV pool, which has to be empty; what they leave there is never read. Rows that the pool or the
    context has no room for are left out.
    """
    steps: list[Step] = []
    for rows in _ROWS:
        blocks = -(-rows // engine.block_size)
        if rows > engine.max_model_len or blocks > engine.num_blocks:
            break
        batch = causal_batch([[0] * rows], [0], [range(blocks)], [rows], engine.block_size)
        for attempt in range(2):  # the first one also allocates and compiles
            start = time.perf_counter_ns()
            logits = engine.forward(batch).logits
            if logits.is_cuda:
                torch.cuda.synchronize()
            if attempt:
                steps.append(Step(rows, time.perf_counter_ns() - start))
    return tuple(steps)
