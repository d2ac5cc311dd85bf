"""A draft's reduced head: it computes the logits of the frequent part of the vocabulary; all others are -inf.

The draft's distribution q is then what it is, zero for what is left out, and both acceptance rules are exact for any q:
what the draft cannot propose costs acceptance and nothing else. The logits keep their width, so that noise, masks,
penalties and guesses go by token id, as ever. Filling a row is cheap beside the products that are saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saguaro.engines.manifest import DRAFT_VOCAB
from saguaro.errors import EngineError


def read_draft_vocab(directory: Path, vocab_size: int) -> Tensor:
    """[m] int64 token ids of an engine directory's reduced head, ascending. Raises EngineError when they are not."""
    path = directory / DRAFT_VOCAB
    try:
        ids = torch.tensor(json.loads(path.read_text(encoding="utf-8")), dtype=torch.int64)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise EngineError(f"{path}: is not a list of token ids ({error}). Build the engine again.") from error
    if ids.dim() != 1 or not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or not bool((ids.diff() > 0).all()):
        raise EngineError(
            f"{path}: does not list ascending token ids from 0 to {vocab_size - 1}. Build the engine again."
        )
    return ids


def narrow_head(model: Any, token_ids: Tensor) -> None:
    """Leave the model the rows [m, hidden] of its output head that belong to `token_ids`, in place."""
    head = model.get_output_embeddings()
    rows = nn.Linear(head.in_features, len(token_ids), bias=False, device="meta")
    rows.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    model.set_output_embeddings(rows)


class SpreadHead(nn.Module):
    """A narrow head, its logits in their places: [L, hidden] -> [L, vocab_size], -inf where there are none.

    `head` gives the logits of `token_ids` [m], and may give padding behind them.
    """

    token_ids: Tensor

    def __init__(self, head: nn.Module, token_ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("token_ids", token_ids, persistent=False)
        self._vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)[:, : len(self.token_ids)]
        every = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return every.index_copy_(1, self.token_ids, logits)
