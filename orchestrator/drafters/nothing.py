"""The backup `none`: a row that missed decodes one token."""

from __future__ import annotations

from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import Text
from saguaro.orchestrator.protocol import DraftRow


class NoDrafter(TextDrafter):
    def continuation(self, row: DraftRow, text: Text, count: int) -> list[int]:
        return []

    def guesses(self, row: DraftRow, text: Text, count: int, excluded: int | None) -> list[int]:
        return []
