"""Bad words given as text become token sequences: at the leader, once, when the request is submitted."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer

from saguaro.orchestrator.types import SamplingParams


def encode_bad_words(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """The same parameters with every bad word as token ids, as it is written alone and after a space.

    What is banned are these token sequences; the same letters divided otherwise are other sequences.
    """
    words: dict[tuple[int, ...], None] = {}  # in order, without repeats
    for word in params.bad_words:
        if isinstance(word, str):
            bare = word.strip()
            for text in (bare, f" {bare}"):
                words[tuple(tokenizer.encode(text, add_special_tokens=False).ids)] = None
        else:
            words[word] = None
    return replace(params, bad_words=tuple(words))
