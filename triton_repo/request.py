"""What a client asks for: the input tensors of the `ssd` model as sampling parameters and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from numpy.typing import NDArray
from tokenizers import Tokenizer

from saguaro.errors import ConfigError, SaguaroError
from saguaro.orchestrator.types import Mode, SamplingParams
from saguaro.triton_repo.fields import MAX_LIST, Fields, check_parameters
from saguaro.triton_repo.tensors import SSD

MAX_MESSAGE = 1000  # characters of an error: it may quote what was given, and travels in a header
GUIDES = ("json_schema", "regex", "grammar")
# Fields that bear another name where they are honoured, and whose errors therefore would.
_TENSOR_NAMES = {
    "stop": "stop_words",
    "n": "num_return_sequences",
    "mode": "speculation_mode",
    "lookahead": "speculation_lookahead",
    **dict.fromkeys(GUIDES, "guided_decoding_guide"),
}
# What has only one value here, and what it would take to have another.
_FIXED = {
    "beam_width": (1, "there is no beam search"),
    "length_penalty": (1.0, "it ranks beams, and there is no beam search"),
    "return_context_logits": (False, "logits are not kept; see return_log_probs and logprobs"),
    "return_generation_logits": (False, "logits are not kept; see return_log_probs and logprobs"),
    "return_perf_metrics": (False, "the figures of a request are in the output stats"),
}
# By type of error: Triton's code, and how the message begins. Triton has no code for a full queue alone.
_KINDS = {
    "ConfigError": ("INVALID_ARG", ""),
    "CapacityError": ("UNAVAILABLE", "overloaded: "),
    "DrainingError": ("UNAVAILABLE", "unavailable: "),
    "LinkError": ("UNAVAILABLE", "unavailable: "),
}


@dataclass(frozen=True)
class Request:
    """One request to the `ssd` model."""

    prompt: list[int]
    params: SamplingParams
    stream: bool  # a response per round and answer; else one response with everything
    echo: bool  # begin the text of a response that is not streamed with the prompt's
    mode: Mode | None
    lookahead: int | None
    priority: int
    timeout_s: float | None


def read_request(
    inputs: Mapping[str, NDArray[Any]], parameters: str, tokenizer: Tokenizer, max_model_len: int
) -> Request:
    """Raises ConfigError naming the field, its limit and what was given. `parameters`: the request's, JSON."""
    check_parameters(parameters)
    fields = Fields(SSD.inputs, inputs)
    for name, (only, reason) in _FIXED.items():
        if fields.has(name) and fields.number(name) != only:
            raise ConfigError(f"{name} must be {only} or left out, got {fields.number(name)}: {reason}")
    for name in ("input_ids", "max_tokens"):
        if not fields.has(name):
            raise ConfigError(f"{name} is missing: it is required")
    length = inputs["input_ids"].size
    if length >= max_model_len:  # before it is copied and sent: it may be far too long for that
        raise ConfigError(
            f"the prompt has {length} tokens and the context holds {max_model_len}, of which at least one is for the "
            "answer: shorten the prompt or raise max_model_len in the target's recipe"
        )
    prompt = inputs["input_ids"].reshape(-1).tolist()
    if prompt and min(prompt) < 0:
        raise ConfigError(f"input_ids must be token ids of 0 or more, got {min(prompt)}")
    mode = fields.text("speculation_mode") if fields.has("speculation_mode") else None
    if mode is not None and mode not in get_args(Mode):
        raise ConfigError(f"speculation_mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    try:
        params = SamplingParams(**_sampling(fields, tokenizer))
    except ConfigError as error:
        raise in_tensor_names(error) from error
    stream = fields.flag("stream")
    return Request(
        prompt=prompt,
        params=params,
        stream=stream,
        echo=not stream and not fields.flag("exclude_input_in_output"),
        mode=mode,  # type: ignore[arg-type]
        lookahead=fields.number("speculation_lookahead") if fields.has("speculation_lookahead") else None,
        priority=fields.number("priority") if fields.has("priority") else 0,
        timeout_s=fields.number("timeout_s") if fields.has("timeout_s") else None,
    )


def in_tensor_names(error: ConfigError) -> ConfigError:
    """The same error about the tensor that the field came in."""
    field, space, rest = str(error).partition(" ")
    return ConfigError(_TENSOR_NAMES.get(field, field) + space + rest)


def code_of(error: Exception) -> str:
    """The name of Triton's error code for an error."""
    return _kind(error)[0]


def message_of(error: Exception) -> str:
    """What a client is told; of an error nobody foresaw, its type.

    Triton's streams lose the code of an error: what is not the request's fault says so by how it begins.
    """
    begin = _kind(error)[1]
    text = f"{begin}{error}" if isinstance(error, SaguaroError) else f"{begin}{type(error).__name__}: {error}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} …"


def _kind(error: Exception) -> tuple[str, str]:
    return _KINDS.get(type(error).__name__, ("INTERNAL", "internal error: "))


def _sampling(fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of SamplingParams."""
    same = (
        "max_tokens min_tokens top_k min_p temperature repetition_penalty presence_penalty frequency_penalty logprobs"
    )
    values = {name: fields.number(name) for name in same.split() if fields.has(name)}
    if not any(fields.has(name) for name in ("temperature", "top_k", "top_p", "min_p")):
        values["temperature"] = 0.0  # as TensorRT-LLM does where nothing asks for sampling
    values |= {name: fields.flag(name) for name in ("ignore_eos", "include_stop_str_in_output")}
    values |= {"bad_words": tuple(fields.texts("bad_words")), "stop": tuple(fields.texts("stop_words"))}
    values["stop_token_ids"] = tuple(fields.numbers("stop_token_ids")) if fields.has("stop_token_ids") else ()
    values["logit_bias"] = _logit_bias(fields, tokenizer)
    if fields.has("num_return_sequences"):
        values["n"] = fields.number("num_return_sequences")
    if fields.flag("return_log_probs"):
        values.setdefault("logprobs", 0)
    if fields.has("seed") and fields.has("random_seed"):
        raise ConfigError("seed and random_seed were given together: they are one field, and its name is seed")
    for name in ("seed", "random_seed"):
        if fields.has(name):
            values["seed"] = fields.number(name)
    return values | _top_p(fields) | _end(fields, values["stop_token_ids"]) | _guide(fields)


def _top_p(fields: Fields) -> dict[str, Any]:
    """TensorRT-LLM's 0: off beside a top_k, else greedy."""
    if not fields.has("top_p"):
        return {}
    top_p = fields.number("top_p")
    if top_p == 0:
        return {} if fields.has("top_k") and fields.number("top_k") > 0 else {"temperature": 0.0}
    return {"top_p": top_p}


def _end(fields: Fields, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """An end_id takes the place of the model's own ends; -1 is none at all. Nothing is padded, so pad_id has no use."""
    for name in ("end_id", "pad_id"):
        if fields.has(name) and fields.number(name) < -1:
            raise ConfigError(f"{name} must be a token id, or -1 for none, got {fields.number(name)}")
    if not fields.has("end_id"):
        return {}
    end = fields.number("end_id")
    if fields.flag("ignore_eos"):
        raise ConfigError("end_id and ignore_eos were given together: leave one out")
    return {"ignore_eos": True, "stop_token_ids": stop_token_ids + ((end,) if end >= 0 else ())}


def _guide(fields: Fields) -> dict[str, Any]:
    given = [name for name in ("guided_decoding_guide_type", "guided_decoding_guide") if fields.has(name)]
    if not given:
        return {}
    if len(given) == 1:
        raise ConfigError(
            f"{given[0]} was given alone: guided_decoding_guide_type and guided_decoding_guide go together"
        )
    kind = fields.text("guided_decoding_guide_type")
    if kind not in GUIDES:
        raise ConfigError(f"guided_decoding_guide_type must be one of {', '.join(GUIDES)}, got {kind!r}")
    return {kind: fields.text("guided_decoding_guide")}


def _logit_bias(fields: Fields, tokenizer: Tokenizer) -> dict[int, float]:
    """Of `logit_bias`, and of the words of `embedding_bias_words`: a word's weight goes to each of its tokens."""
    bias: dict[int, float] = {}
    if fields.has("logit_bias"):
        try:
            bias = msgspec.json.decode(fields.text("logit_bias"), type=dict[int, float])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"logit_bias must be a JSON object of token id to number: {error}") from error
        if len(bias) > MAX_LIST:
            raise ConfigError(f"logit_bias must have at most {MAX_LIST} entries, got {len(bias)}")
    words = [fields.has(name) for name in ("embedding_bias_words", "embedding_bias_weights")]
    if not any(words):
        return bias
    texts = fields.texts("embedding_bias_words")
    weights = fields.numbers("embedding_bias_weights") if words[1] else []
    if len(texts) != len(weights):
        raise ConfigError(
            f"embedding_bias_words and embedding_bias_weights must be equally many, got {len(texts)} words that are "
            f"not empty and {len(weights)} weights"
        )
    for text, weight in zip(texts, weights, strict=True):
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            bias[token] = bias.get(token, 0.0) + weight
    return bias
