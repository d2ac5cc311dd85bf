"""Chunks as OpenAI's answers: one JSON object, or a server-sent event for each."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from saguaro.frontend.openai.errors import ApiError, down
from saguaro.frontend.openai.schema import ChatRequest, CompletionRequest, Generation
from saguaro.frontend.openai.triton import Chunk

_FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length"}  # the latter were cut short by a limit, too


@dataclass
class _Choice:
    """One of a request's answers, as far as it has come."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    started: bool = False
    offset: int = 0  # characters of the tokens so far
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )


class Answer:
    """The object or the events of one request. `echoes` are the prompts' texts where they are to be repeated.

    Choices are numbered by prompt first, then by answer to it, which the chunks' `answer` has to be already.
    """

    def __init__(self, body: Generation, fingerprint: str, echoes: list[str] | None = None) -> None:
        self._body = body
        self._chat = isinstance(body, ChatRequest)
        self._wants_logprobs = bool(body.logprobs) if isinstance(body, ChatRequest) else _legacy_logprobs(body)
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": fingerprint,
        }
        self._choices: dict[int, _Choice] = {}
        self._echoes = echoes
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self.completion_tokens = 0
        self.failure: ApiError | None = None  # what the events ended with

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens.values())

    async def whole(self, chunks: AsyncGenerator[Chunk, None]) -> dict[str, Any]:
        async with aclosing(chunks):
            async for chunk in chunks:
                choice = self._add(chunk)
                choice.text += self._new_text(choice, chunk)
                choice.logprobs += chunk.logprobs
                choice.finish_reason = chunk.finish_reason and _FINISH_REASONS[chunk.finish_reason]
                choice.started = True
        choices = [self._finished(index, choice) for index, choice in sorted(self._choices.items())]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    async def events(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[str, None]:
        """Text of the events. An error ends them with an event of its own, and without the word that all went well."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    for event in self._events_of(chunk):
                        yield event
        except ApiError as error:
            self.failure = error
            yield _data(error.body())
            return
        if self._body.include_usage:
            yield _data({**self._head, "object": self._chunk_kind, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _events_of(self, chunk: Chunk) -> Iterator[str]:
        """None for a chunk whose text is still held back."""
        choice = self._add(chunk)
        if self._chat and not choice.started:
            yield self._event(chunk.answer, {"role": "assistant", "content": ""}, None, None)
        text = self._new_text(choice, chunk)
        choice.started = True
        if text or chunk.finish_reason or chunk.logprobs:
            reason = chunk.finish_reason and _FINISH_REASONS[chunk.finish_reason]
            delta = {"content": text} if text or not reason else {}
            yield self._event(chunk.answer, delta if self._chat else text, reason, self._logprobs(choice, chunk))

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _add(self, chunk: Chunk) -> _Choice:
        """Count it, and find the choice it belongs to. Raises ApiError for an answer the engine gave up."""
        if chunk.finish_reason and chunk.finish_reason not in _FINISH_REASONS:
            raise down(f"the engine ended the answer early ({chunk.finish_reason}): try again")
        self.completion_tokens += chunk.tokens
        self._prompt_tokens.setdefault(chunk.answer // self._body.answers, chunk.prompt_tokens)
        return self._choices.setdefault(chunk.answer, _Choice())

    def _new_text(self, choice: _Choice, chunk: Chunk) -> str:
        if choice.started or self._echoes is None:
            return chunk.text
        return self._echoes[chunk.answer // self._body.answers] + chunk.text

    def _finished(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice, Chunk(index, "", 0, 0, None, choice.logprobs))
        text: dict[str, Any] = {"text": choice.text}
        if self._chat:
            text = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _event(self, index: int, piece: Any, reason: str | None, logprobs: dict[str, Any] | None) -> str:
        choice = {
            "index": index,
            "delta" if self._chat else "text": piece,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        usage = {"usage": None} if self._body.include_usage else {}
        return _data({**self._head, "object": self._chunk_kind, "choices": [choice], **usage})

    def _logprobs(self, choice: _Choice, chunk: Chunk) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        if self._chat:
            return {"content": chunk.logprobs, "refusal": None}
        offsets = []
        for entry in chunk.logprobs:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(bytes(entry["bytes"] or ())))
        best = [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in chunk.logprobs]
        return {
            "tokens": [entry["token"] for entry in chunk.logprobs],
            "token_logprobs": [entry["logprob"] for entry in chunk.logprobs],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def _legacy_logprobs(body: Generation) -> bool:
    return isinstance(body, CompletionRequest) and body.logprobs is not None


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
