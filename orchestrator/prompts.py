"""Prompts to token ids, with a Hugging Face tokenizer: text as it is, a chat through the model's template."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from saguaro.errors import ConfigError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def load_tokenizer(engine: Path) -> Any:
    """The tokenizer of an engine directory, with its chat template: its tokenizer.json as every other part reads it.

    Not transformers' AutoTokenizer: that imports torch, which costs seconds and 200 MB in processes that only encode.
    It knows no longest text: a prompt that is too long is the service's to refuse, and not to be warned of first.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(engine, local_files_only=True)
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of text, of a chat (role and content), or as they are. Raises ConfigError without a chat template."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if prompt and isinstance(prompt[0], Mapping):
        if tokenizer.chat_template is None:
            raise ConfigError("this model has no chat template: give the prompt as text (--raw)")
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    return list(prompt)  # type: ignore[arg-type]
