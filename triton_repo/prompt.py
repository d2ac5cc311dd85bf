"""Prompts to token ids: what the `preprocessing` model does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
from numpy.typing import NDArray

from saguaro.errors import ConfigError
from saguaro.orchestrator.prompts import encode_prompt, load_tokenizer
from saguaro.triton_repo.fields import Fields, check_parameters
from saguaro.triton_repo.tensors import PREPROCESSING


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class PromptReader:
    """Reads prompts for one engine."""

    def __init__(self, engine: Path, max_model_len: int) -> None:
        self._tokenizer = load_tokenizer(engine)
        self._max_model_len = max_model_len
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        # Bytes that cannot fit, however they divide into tokens: refused before they take seconds to be divided.
        self._limit = max_model_len * longest

    def read(self, inputs: Mapping[str, NDArray[Any]], parameters: str) -> NDArray[np.int32]:
        """The prompt's token ids, [1, P]. Raises ConfigError naming the field and its limit."""
        check_parameters(parameters)
        fields = Fields(PREPROCESSING.inputs, inputs)
        if not fields.has("text_input"):
            raise ConfigError('text_input is missing: it is required, and "" where the prompt is in messages')
        text = fields.text("text_input", self._limit)
        if fields.has("messages"):
            if text:
                raise ConfigError('text_input must be "" where messages is given: a prompt is either text or a chat')
            ids = self._chat(fields.text("messages", self._limit))
        else:
            ids = encode_prompt(self._tokenizer, text)
        if not ids:
            raise ConfigError("text_input must have at least one token, got none")
        if len(ids) >= self._max_model_len:
            raise ConfigError(
                f"text_input has {len(ids)} tokens and the context holds {self._max_model_len}, of which at least one "
                "is for the answer: shorten it or raise max_model_len in the target's recipe"
            )
        return np.array([ids], np.int32)

    def _chat(self, text: str) -> list[int]:
        try:
            messages = msgspec.json.decode(text, type=list[_Message])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"messages must be a JSON list of objects with role and content: {error}") from error
        if not messages:
            raise ConfigError("messages must have at least one message, got none")
        try:
            return encode_prompt(self._tokenizer, [msgspec.to_builtins(message) for message in messages])
        except jinja2.TemplateError as error:
            raise ConfigError(f"messages do not fit the model's chat template: {error}") from error
