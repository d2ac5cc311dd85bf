"""The paper's fast backup (4.3.2): random tokens, kept for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import Text, TokenMemory
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.randomness import Purpose, uniforms


class RandomDrafter(TextDrafter):
    """Any of `tokens`, each as likely as the other. A function of seed and position, like every draw."""

    def __init__(self, memory: TokenMemory, tokens: Sequence[int]) -> None:
        super().__init__(memory)
        self._tokens = tokens

    def continuation(self, row: DraftRow, text: Text, count: int) -> list[int]:
        drawn = uniforms(row.request.seed, range(len(text), len(text) + count), Purpose.DRAFT)
        return [self._tokens[int(u * len(self._tokens))] for u in drawn]

    def guesses(self, row: DraftRow, text: Text, count: int, excluded: int | None) -> list[int]:
        """The tokens after a random one: as good a guess as any, and no two alike."""
        (u,) = uniforms(row.request.seed, [len(text)], Purpose.DRAFT)
        first, size = int(u * len(self._tokens)), len(self._tokens)
        listed = (self._tokens[(first + i) % size] for i in range(min(count + 1, size)))
        return [token for token in listed if token != excluded][:count]
