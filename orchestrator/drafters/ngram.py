"""Prompt lookup: what followed the last few tokens when they occurred before in the same text (Saxena, 2023)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import Text
from saguaro.orchestrator.protocol import DraftRow

LONGEST = 4  # tokens that are looked for; fewer when so many never occurred


class NgramDrafter(TextDrafter):
    def continuation(self, row: DraftRow, text: Text, count: int) -> list[int]:
        """After the longest match, of those the latest. What reaches the end of the text is taken to repeat itself."""
        _, ends = _matches(text)
        if not len(ends):
            return []
        tokens: list[int] = text[ends[-1] :][:count].tolist()
        for index in range(count - len(tokens)):
            tokens.append(tokens[index])
        return tokens

    def guesses(self, row: DraftRow, text: Text, count: int, excluded: int | None) -> list[int]:
        """What came next after the longest match, then after shorter ones; the latest first."""
        found: dict[int, None] = {}
        length = LONGEST
        while length and len(found) < count:
            length, ends = _matches(text, length)
            found |= dict.fromkeys(token for token in text[ends[::-1]].tolist() if token != excluded)
            length -= 1
        return list(found)[:count]


def _matches(text: Text, longest: int = LONGEST) -> tuple[int, NDArray[np.int64]]:
    """Where the longest possible end of `text`, of at most `longest` tokens, ended before: its length (1 if none), and
    the indices of the tokens after it, in order."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        ends = np.flatnonzero((windows == text[-length:]).all(1)) + length
        if len(ends):
            return length, ends
    return 1, np.zeros(0, dtype=np.int64)
