"""Which tokens the reduced head of a draft computes: those that steer a text, and the most frequent of all others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from saguaro.errors import ConfigError

_CHARACTERS: Final = 1 << 20  # of a text that are encoded at a time


def frequent_tokens(tokenizer: Tokenizer, size: int, ends: Collection[int], texts: Sequence[Path]) -> list[int]:
    """`size` token ids, ascending: `ends` and added tokens, then by count in the texts, equal counts by id.

    Without texts the ids are the ranking, which is sound for BPE alone: training merges the most frequent pair first
    and numbers tokens as it makes them, so a lower id was more frequent in the text that the tokenizer was made for.
    What that misses: pieces that became part of longer tokens, and what was added for other languages in the end.

    Raises ConfigError when there is no such ranking, a text cannot be read, or the size does not fit.
    """
    known = tokenizer.get_vocab(with_added_tokens=True).values()
    always = {*ends, *tokenizer.get_added_tokens_decoder()}
    if not len(always) < size < len(known):
        raise ConfigError(
            f"draft_vocab is {size}, but must be more than the {len(always)} end and added tokens, which are always "
            f"computed, and less than all {len(known)} tokens of the tokenizer. Change it, or leave it out."
        )
    kind = json.loads(tokenizer.to_str())["model"]["type"]
    if not texts and kind != "BPE":
        raise ConfigError(
            f"draft_vocab takes the lowest token ids, which are the most frequent tokens of a BPE tokenizer; the "
            f"model's is {kind}. Name texts to count tokens in (vocab_text), or leave it out."
        )
    counts = _count(tokenizer, texts)
    ranked = sorted(set(known) - always, key=lambda token: (-counts[token], token))
    return sorted([*always, *ranked[: size - len(always)]])


def _count(tokenizer: Tokenizer, texts: Sequence[Path]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for path in texts:
        try:
            with path.open(encoding="utf-8") as file:
                while part := file.read(_CHARACTERS):
                    counts.update(tokenizer.encode(part, add_special_tokens=False).ids)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"vocab_text: {path} cannot be read as UTF-8 text ({error}). Name files of text that are there."
            ) from error
    return counts
