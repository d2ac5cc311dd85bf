"""What may draft after a miss, or from the text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from saguaro.orchestrator.drafters.base import Drafter
from saguaro.orchestrator.drafters.ngram import NgramDrafter
from saguaro.orchestrator.drafters.nothing import NoDrafter
from saguaro.orchestrator.drafters.random_tokens import RandomDrafter
from saguaro.orchestrator.drafters.suffix import SuffixDrafter
from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.types import Backup, Rule, TextBackup


class Primary(Drafter, Protocol):
    """A drafter that knows the text of each sequence, which the others read."""

    memory: TokenMemory


def backup_drafter(name: Backup, primary: Primary, rule: Rule, tokens: Sequence[int]) -> Drafter:
    """`tokens`: the ordinary ones of the tokenizer, neither special nor padding."""
    if name == "primary" or name == "defer":  # they differ in when it drafts
        return primary
    return text_drafter(name, primary.memory, rule, tokens)


def text_drafter(name: TextBackup, memory: TokenMemory, rule: Rule, tokens: Sequence[int]) -> TextDrafter:
    match name:
        case "ngram":
            return NgramDrafter(memory)
        case "suffix":
            return SuffixDrafter(memory, shared=rule == "coupled")
        case "random":
            return RandomDrafter(memory, tokens)
        case "none":
            return NoDrafter(memory)
