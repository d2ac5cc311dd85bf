"""Prompts to token ids, with a Hugging Face tokenizer: text as it is, a chat through the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saguaro.errors import ConfigError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of text, of a chat (role and content), or as they are. Raises ConfigError without a chat template."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if prompt and isinstance(prompt[0], Mapping):
        if tokenizer.chat_template is None:
            raise ConfigError("this model has no chat template: give the prompt as text (--raw)")
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    return list(prompt)  # type: ignore[arg-type]
