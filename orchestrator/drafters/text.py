"""What the drafters without a model have in common: they need the text, not the KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from saguaro.orchestrator.drafters.base import Guess, Trunk, never
from saguaro.orchestrator.drafters.token_memory import Text, TokenMemory
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.types import Outcome, Speculation
from saguaro.plugins.fan_out import FanOut


class TextDrafter(ABC):
    """Tokens are proposed, not drawn: point masses. A speculation may be shorter than asked for, down to empty."""

    def __init__(self, memory: TokenMemory) -> None:
        self.memory = memory

    @abstractmethod
    def continuation(self, row: DraftRow, text: Text, count: int) -> list[int]:
        """At most `count` tokens after `text`, which begins with what is committed of the row."""

    @abstractmethod
    def guesses(self, row: DraftRow, text: Text, count: int, excluded: int | None) -> list[int]:
        """At most `count` different tokens that may come next, best first, `excluded` not among them."""

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            self.memory.store(row, row.tokens[:-1])

    def predict(self, trunks: Sequence[Trunk], fan_outs: Sequence[FanOut]) -> list[list[Guess]]:
        guesses: list[list[Guess]] = []
        for trunk, fan_out in zip(trunks, fan_outs, strict=True):
            self.memory.store(trunk.row, trunk.row.tokens + trunk.draft_tokens)
            text = self._text(trunk)
            found: list[Guess] = []
            for k, count in enumerate(fan_out.counts):
                sent = trunk.draft_tokens[k] if k < len(trunk.draft_tokens) else None
                if count:
                    tokens = self.guesses(trunk.row, _joined(text, trunk.draft_tokens[:k]), count, sent)
                    found.extend(Guess(Outcome(k, token)) for token in tokens)
            guesses.append(found)
        return guesses

    def draft(
        self, trunks: Sequence[Trunk], guesses: Sequence[Sequence[Guess]], enough: Callable[[], bool] = never
    ) -> list[list[Speculation]]:
        speculations: list[list[Speculation]] = []
        for trunk, guessed in zip(trunks, guesses, strict=True):
            text = self._text(trunk)
            outcomes = [guess.outcome for guess in guessed]
            tails = [[*trunk.draft_tokens[: outcome.accepted], outcome.bonus] for outcome in outcomes]
            count = trunk.row.lookahead
            speculations.append(
                [Speculation(tuple(self.continuation(trunk.row, _joined(text, tail), count))) for tail in tails]
            )
        return speculations

    def _text(self, trunk: Trunk) -> Text:
        """Tokens up to column `prefix`."""
        return self.memory.text(trunk.row)[: trunk.prefix + 1]


def _joined(text: Text, tail: Sequence[int]) -> Text:
    return np.concatenate([text, np.asarray(tail, dtype=np.int64)])
