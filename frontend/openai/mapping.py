"""A request body as the ensemble's input tensors, by way of `SamplingParams`, which knows every limit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tritonclient.grpc import InferInput

from saguaro.errors import ConfigError
from saguaro.frontend.openai.errors import ApiError, field_of
from saguaro.frontend.openai.schema import FIELDS, ChatRequest, CompletionRequest, Generation
from saguaro.orchestrator.types import SamplingParams

_COMPLETION_TOKENS = 16  # OpenAI's default of the older endpoint; a chat goes on to the end of the context
_GUIDES = ("json_schema", "regex", "grammar")
_DTYPES: dict[str, tuple[str, Any]] = {
    "text": ("BYTES", np.object_),
    "int": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "float": ("FP32", np.float32),
    "bool": ("BOOL", np.bool_),
}
# Tensors whose fields have other names; errors of the ensemble are about tensors.
_FIELD_OF = {
    "stop_words": "stop",
    "num_return_sequences": "n",
    "speculation_mode": "speculation",
    "speculation_lookahead": "speculation",
    "guided_decoding_guide": "response_format",
}


@dataclass(frozen=True)
class Prompt:
    """`text` as it is, or `messages` (JSON) that go through the chat template."""

    text: str
    messages: str | None = None


def prompts(body: Generation, tokenizer: Tokenizer) -> list[Prompt]:
    """One for each prompt of the body. Raises ApiError for token ids that no text has."""
    if isinstance(body, ChatRequest):
        return [Prompt("", json.dumps([message.plain() for message in body.messages], ensure_ascii=False))]
    if not isinstance(body, CompletionRequest):
        raise TypeError(f"there is no endpoint for {type(body).__name__}")
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if isinstance(given[0], int):
        given = [given]
    return [Prompt(item if isinstance(item, str) else _text_of(item, tokenizer)) for item in given]


def field_names(body: Generation) -> dict[str, str]:
    """The field of this body for each name that an error of the ensemble may begin with."""
    text = "messages" if isinstance(body, ChatRequest) else "prompt"
    return {name: name for name in type(body).model_fields} | _FIELD_OF | {"text_input": text, "prompt": text}


def sampling(body: Generation, context: int) -> SamplingParams:
    """Raises ApiError naming field and limit. Without a limit an answer may fill the context (tokens)."""
    try:
        return SamplingParams(
            temperature=_given(body.temperature, 1.0),
            top_k=max(0, body.top_k) if body.top_k is not None and body.top_k >= -1 else _given(body.top_k, 0),
            top_p=_given(body.top_p, 1.0),
            min_p=_given(body.min_p, 0.0),
            repetition_penalty=_given(body.repetition_penalty, 1.0),
            presence_penalty=_given(body.presence_penalty, 0.0),
            frequency_penalty=_given(body.frequency_penalty, 0.0),
            logit_bias=_logit_bias(body.logit_bias or {}),
            bad_words=tuple(body.bad_words or ()),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=_given(body.min_tokens, 0),
            max_tokens=_max_tokens(body, context),
            seed=body.seed,
            n=_answers(body),
            logprobs=_logprobs(body),
            **_guide(body),
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param=field_of(str(error), FIELDS), code="invalid_value") from error


def tensors(prompt: Prompt, params: SamplingParams, body: Generation, deadline_s: float) -> list[InferInput]:
    """The ensemble's inputs; a sampling parameter is always sent, so that no default of the ensemble has a say."""
    inputs = [
        _tensor("text_input", "text", prompt.text),
        _tensor("max_tokens", "int", params.max_tokens),
        _tensor("min_tokens", "int", params.min_tokens),
        _tensor("temperature", "float", params.temperature),
        _tensor("top_k", "int", params.top_k),
        _tensor("top_p", "float", params.top_p),
        _tensor("min_p", "float", params.min_p),
        _tensor("repetition_penalty", "float", params.repetition_penalty),
        _tensor("presence_penalty", "float", params.presence_penalty),
        _tensor("frequency_penalty", "float", params.frequency_penalty),
        _tensor("ignore_eos", "bool", params.ignore_eos),
        _tensor("include_stop_str_in_output", "bool", params.include_stop_str_in_output),
        _tensor("num_return_sequences", "int", params.n),
        _tensor("timeout_s", "float", deadline_s),
        _tensor("stream", "bool", True),
        _tensor("exclude_input_in_output", "bool", True),
        _tensor("return_num_input_tokens", "bool", True),
        _tensor("return_num_output_tokens", "bool", True),
    ]
    guide = next(((kind, getattr(params, kind)) for kind in _GUIDES if getattr(params, kind) is not None), None)
    optional: list[tuple[str, str, Any]] = [
        ("messages", "text", prompt.messages),
        ("seed", "seed", params.seed),
        ("logprobs", "int", params.logprobs),
        ("return_log_probs", "bool", True if params.logprobs is not None else None),
        ("stop_words", "text", params.stop or None),
        ("bad_words", "text", params.bad_words or None),
        ("stop_token_ids", "int", params.stop_token_ids or None),
        ("logit_bias", "text", json.dumps(params.logit_bias) if params.logit_bias else None),
        ("guided_decoding_guide_type", "text", guide and guide[0]),
        ("guided_decoding_guide", "text", guide and (guide[1] if isinstance(guide[1], str) else json.dumps(guide[1]))),
        ("priority", "int", body.priority),
        ("speculation_mode", "text", body.speculation and body.speculation.mode),
        ("speculation_lookahead", "int", body.speculation and body.speculation.lookahead),
    ]
    return inputs + [_tensor(name, kind, value) for name, kind, value in optional if value is not None]


def _tensor(name: str, kind: str, value: Any) -> InferInput:
    values = value if isinstance(value, tuple) else (value,)
    triton, dtype = _DTYPES[kind]
    encoded = [item.encode() for item in values] if kind == "text" else values
    array = np.array([encoded], dtype=dtype)  # [1, N]: the first dimension is the batch
    return InferInput(name, list(array.shape), triton).set_data_from_numpy(array)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text these token ids are read as. Raises ApiError where encoding it gives other ids."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    text = str(tokenizer.decode(ids, skip_special_tokens=False)) if all(0 <= i < size for i in ids) else ""
    if not ids or list(tokenizer.encode(text).ids) != ids:
        raise ApiError(
            400,
            "prompt: these token ids are not what the model's tokenizer makes of any text: send the prompt as text",
            param="prompt",
            code="invalid_value",
        )
    return text


def _max_tokens(body: Generation, context: int) -> int:
    newer = body.max_completion_tokens if isinstance(body, ChatRequest) else None
    if newer is not None and body.max_tokens not in (None, newer):
        raise ConfigError("max_completion_tokens and max_tokens differ: give max_completion_tokens alone")
    given = newer if newer is not None else body.max_tokens
    if given is not None and given > context:
        raise ConfigError(f"max_tokens must be at most the {context} tokens of the model's context, got {given}")
    return given if given is not None else context if isinstance(body, ChatRequest) else _COMPLETION_TOKENS


def _answers(body: Generation) -> int:
    best_of = body.best_of if isinstance(body, CompletionRequest) else None
    if best_of not in (None, body.answers):
        raise ConfigError(f"best_of must be n ({body.answers}) or left out: answers are not ranked, got {best_of}")
    return body.answers


def _logprobs(body: Generation) -> int | None:
    if isinstance(body, CompletionRequest):
        if body.echo and body.logprobs is not None:
            raise ConfigError("logprobs of an echoed prompt are not offered: leave out echo or logprobs")
        return body.logprobs
    if not isinstance(body, ChatRequest):
        return None
    if body.top_logprobs is not None and not body.logprobs:
        raise ConfigError("top_logprobs needs logprobs: true")
    return body.top_logprobs or 0 if body.logprobs else None


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if wrong is not None:
        raise ConfigError(f"logit_bias must have token ids as keys, got {wrong[:40]!r}")
    return {int(key): value for key, value in given.items()}


def _guide(body: Generation) -> dict[str, Any]:
    """What the answer has to fit, as the fields of `SamplingParams`."""
    form, other = body.response_format, body.structured_outputs
    guide: dict[str, Any] = {}
    if form and form.type == "json_schema" and form.json_schema is None:
        raise ConfigError("response_format must have json_schema: {name, schema} for the type json_schema")
    if form and form.type != "json_schema" and form.json_schema is not None:
        raise ConfigError(f"response_format has a json_schema, but its type is {form.type}: make it json_schema")
    if form and form.type != "text":
        guide["json_schema"] = form.json_schema.schema_ if form.json_schema else {"type": "object"}
    if other:
        choice = "|".join(map(re.escape, other.choice)) if other.choice else None
        given = {"json_schema": other.json_, "regex": other.regex, "grammar": other.grammar, "choice": choice}
        chosen = {name: value for name, value in given.items() if value is not None}
        if len(chosen) != 1 or guide:
            raise ConfigError(
                "structured_outputs must have one of json, regex, grammar, choice, beside no other format"
            )
        guide = {"regex": choice} if choice is not None else chosen
    return guide
