"""Log probabilities of emitted tokens, as users of OpenAI's interface and of vLLM know them."""

from __future__ import annotations

import torch
from torch import Tensor

from saguaro.orchestrator.scores import top
from saguaro.orchestrator.types import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """What each of `tokens` cost under its row of [R, V] raw logits, with the `count` best tokens of that row.

    The log softmax is taken in float64, so that a probability close to 1 is not reported as certain. Tokens without any
    probability are not listed.
    """
    rows = torch.log_softmax(logits[: len(tokens)], -1, dtype=torch.float64)
    own = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
    if count == 0:
        return [TokenLogprobs(token, value) for token, value in zip(tokens, own)]
    values, ids = (part.tolist() for part in top(rows, min(count, rows.shape[1])))
    return [
        TokenLogprobs(token, value, tuple((i, v) for i, v in zip(best, theirs) if v > -torch.inf))
        for token, value, best, theirs in zip(tokens, own, ids, values)
    ]
