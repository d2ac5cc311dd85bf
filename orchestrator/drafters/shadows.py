"""What the drafters that need no model would have had accepted: so they can be chosen without having been tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.estimators import DECAY, Counts
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.types import Backup

_PLACES = 16  # of a speculation, that are looked at


class Shadows:
    """Keeps each drafter's continuation of each sequence of the last round, and compares it with what was emitted.

    They propose point masses: accepted iff the target emits them (`coupled`), or as often as it does (`ratio`).
    """

    def __init__(self, drafters: Mapping[Backup, TextDrafter], memory: TokenMemory) -> None:
        self._drafters = drafters
        self._memory = memory
        self._guesses: dict[int, tuple[int, dict[Backup, list[int]]]] = {}  # by sequence: its length, continuations
        self._accepted = {name: Counts(DECAY) for name in drafters}  # by place

    @property
    def acceptance(self) -> dict[Backup, tuple[float, ...]]:
        """Of each place that was ever reached, given that the tokens before it were right."""
        return {
            name: tuple((counts.successes / counts.trials).tolist())
            for name, counts in self._accepted.items()
            if len(counts.trials)
        }

    def follow(self, rows: Sequence[DraftRow]) -> None:
        """Rows of a round, whose committed text the memory has."""
        guesses: dict[int, tuple[int, dict[Backup, list[int]]]] = {}
        for row in rows:
            if not row.lookahead or not row.outcome and row.prefill:
                continue
            text = self._memory.text(row)
            length, before = self._guesses.get(row.sequence, (row.length, {}))
            emitted = text[length:].tolist()
            for name, guess in before.items() if emitted else ():
                right = next(
                    (i for i, (x, y) in enumerate(zip(guess, emitted)) if x != y), min(len(guess), len(emitted))
                )
                places = min(right + 1, len(emitted), _PLACES)
                self._accepted[name].add_each(places, range(right))
            made = {name: drafter.continuation(row, text, _PLACES) for name, drafter in self._drafters.items()}
            guesses[row.sequence] = (row.length, made)
        self._guesses = guesses
