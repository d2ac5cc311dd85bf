"""The bodies of OpenAI's generation endpoints. Every field is honoured, accepted as metadata, or refused by name.

Types are strict, as OpenAI's are: "12" is no number. Ranges of sampling parameters are `SamplingParams`' own.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from saguaro.engines.schema import nearest
from saguaro.orchestrator.types import MAX_LOGPROBS, MAX_N, MAX_SEED, Mode

MAX_PROMPTS = 128  # in one request
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]

_NO_TOOLS = "calling tools is not offered: describe the form of the answer with response_format"
_ONLY_TEXT = "this model takes and gives text only"
_STRUCTURED = "write it as structured_outputs: {json | regex | grammar | choice: …}"


class Body(BaseModel):
    """A JSON object in which a name that is not known is an error that says the nearest one.

    Names in `refused` belong to OpenAI's or vLLM's interface and cannot be honoured; null or empty is as if not given.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    refused: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _know_every_name(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if name in names or (name in cls.refused and value in (None, "", [], {})):
                continue
            unknown = f"unknown field{nearest(name[:100], names)}; valid fields: {', '.join(sorted(names))}"
            reason, code = cls.refused.get(name), "unsupported_parameter"
            if reason is None:
                reason, code = unknown, "unknown_parameter"
            raise PydanticCustomError("field", "{reason}", {"field": name[:100], "reason": reason, "code": code})
        return {name: value for name, value in data.items() if name in names}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's: exactly one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = Field(None, min_length=1)


class Speculation(Body):
    """May lower what the deployment allows, never raise it."""

    mode: Mode | None = None
    lookahead: Int32 | None = None


class Generation(Body):
    """What both endpoints share. None is the default everywhere, so that an explicit null is allowed."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int32 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int32] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int32 | None = None
    # Saguaro's
    speculation: Speculation | None = None
    timeout_s: float | None = Field(None, gt=0)
    # Accepted, and without effect on the answer: about the caller, or choices of which there is one here
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    refused: ClassVar[dict[str, str]] = {
        "tools": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _ONLY_TEXT,
        "guided_json": _STRUCTURED,
        "guided_regex": _STRUCTURED,
        "guided_grammar": _STRUCTURED,
        "guided_choice": _STRUCTURED,
        "use_beam_search": "beam search is not offered",
        "length_penalty": "belongs to beam search, which is not offered",
        "prompt_logprobs": "log probabilities of the prompt are not offered",
        "logits_processors": "no code is taken from requests",
        "prediction": "predicted output is not offered; speculation is the server's own",
        "web_search_options": "the model cannot search",
        "reasoning_effort": "the model has no setting for it",
        "verbosity": "the model has no setting for it",
    }

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Body):
    type: Literal["text"]
    text: str
    refused: ClassVar[dict[str, str]] = dict.fromkeys(("image_url", "input_audio", "file", "video_url"), _ONLY_TEXT)


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refused: ClassVar[dict[str, str]] = {
        "name": "chat templates have no place for it: put the name into the content",
        "tool_calls": _NO_TOOLS,
        "tool_call_id": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _ONLY_TEXT,
        # Empty in every message of an answer, which clients send back as it is
        "refusal": "chat templates have no place for it",
        "annotations": "chat templates have no place for it",
    }

    def plain(self) -> dict[str, str]:
        """As chat templates want it; they know `developer` by its older name."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Generation):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Int32], Field(min_length=1)]
        | Annotated[list[list[Int32]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Int32 | None = None
    refused: ClassVar[dict[str, str]] = Generation.refused | {
        "suffix": "inserting text before a suffix is not offered: give everything in the prompt",
    }


FIELDS = frozenset({*ChatRequest.model_fields, *CompletionRequest.model_fields})
