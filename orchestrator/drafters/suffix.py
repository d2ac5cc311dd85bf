"""Drafting from all that was said before: the most frequent continuation of the longest match, over prompt and answers.

After SuffixDecoding (Oliaro et al., 2024), with one suffix automaton instead of suffix trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from saguaro.orchestrator.drafters.suffix_automaton import ROOT, SuffixAutomaton
from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import Text, TokenMemory
from saguaro.orchestrator.protocol import DraftRow

MAX_TOKENS = 100_000  # remembered at about 0.5 KB each; then all is forgotten and collected anew


@dataclass
class _History:
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    read: dict[int, tuple[int, int]] = field(default_factory=dict)  # by sequence: state, tokens read


class SuffixDrafter(TextDrafter):
    """With `shared` the texts of all requests serve each of them.

    Under the rule `ratio` they must not: two requests with one seed see the same random numbers, so a draft taken from
    the other's answer would depend on the very numbers that are to judge it, and the output would be biased. Each
    sequence then has only its own text. Under `coupled` no draft can change what is emitted.
    """

    def __init__(self, memory: TokenMemory, *, shared: bool, max_tokens: int = MAX_TOKENS) -> None:
        super().__init__(memory)
        self._shared = shared
        self._max_tokens = max_tokens
        self._histories: dict[int, _History] = {}

    @property
    def remembered(self) -> int:
        """Tokens held in memory."""
        return sum(history.automaton.tokens for history in self._histories.values())

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        super().catch_up(rows)
        for row in rows:
            self._read(row, self.memory.text(row))

    def continuation(self, row: DraftRow, text: Text, count: int) -> list[int]:
        automaton, state, length = self._match(row, text)
        tokens: list[int] = []
        while len(tokens) < count:
            while length and not automaton.next[state]:  # this occurrence is the end of a text
                state = automaton.link[state]
                length = automaton.length[state]
            if not length:
                break
            tokens.append(automaton.followers(state)[0])
            state, length = automaton.step(state, length, tokens[-1])
        return tokens

    def guesses(self, row: DraftRow, text: Text, count: int, excluded: int | None) -> list[int]:
        """What followed the longest match, then shorter ones."""
        automaton, state, length = self._match(row, text)
        found: dict[int, None] = {}
        while length and len(found) < count:
            found |= dict.fromkeys(token for token in automaton.followers(state) if token != excluded)
            state = automaton.link[state]
            length = automaton.length[state]
        return list(found)[:count]

    def _match(self, row: DraftRow, text: Text) -> tuple[SuffixAutomaton, int, int]:
        """The longest end of `text`, of which the committed part has been read, that occurs in what was read."""
        history = self._history(row)
        state, read = history.read.get(row.sequence, (ROOT, 0))
        automaton = history.automaton
        length = automaton.length[state]
        for token in text[read:].tolist():
            state, length = automaton.step(state, length, token)
        return automaton, state, length

    def _read(self, row: DraftRow, text: Text) -> None:
        history = self._history(row)
        state, read = history.read.get(row.sequence, (ROOT, 0))
        if self.remembered + len(text) - read > self._max_tokens:
            self._histories.clear()
            history, state, read = self._history(row), ROOT, 0
        # Of a very long text only the end, so that there is room for what follows.
        for token in text[max(read, len(text) - self._max_tokens // 2) :].tolist():
            state = history.automaton.extend(state, token)
        history.read[row.sequence] = state, len(text)

    def _history(self, row: DraftRow) -> _History:
        return self._histories.setdefault(-1 if self._shared else row.sequence, _History())
