"""What the routes do: a body in, an answer or a stream of events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send
from tokenizers import Tokenizer

from saguaro.engines.manifest import TOKENIZER, Manifest
from saguaro.frontend.openai import mapping
from saguaro.frontend.openai.answers import Answer
from saguaro.frontend.openai.errors import ApiError
from saguaro.frontend.openai.health import HealthCheck
from saguaro.frontend.openai.merge import merge
from saguaro.frontend.openai.metrics import Metrics
from saguaro.frontend.openai.schema import CompletionRequest, Generation
from saguaro.frontend.openai.settings import Settings
from saguaro.frontend.openai.triton import Chunk, Triton

T = TypeVar("T")


class EventStream(StreamingResponse):
    """Server-sent events, whose source is closed at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


class Endpoints:
    """What the routes do. To be made within the event loop."""

    def __init__(self, settings: Settings, manifest: Manifest, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._context = manifest.max_model_len
        self._fingerprint = f"fp_{manifest.recipe_hash[:12]}"
        self._tokenizer = Tokenizer.from_file(str(settings.engine / TOKENIZER))
        self._created = int(time.time())
        self.triton = Triton(settings.triton, deadline_s=settings.deadline_s, silence_s=settings.silence_s)
        self.health = HealthCheck(self.triton, settings.socket)

    async def generate(self, request: Request, body: Generation) -> Response:
        arrived = time.monotonic()
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
        params = mapping.sampling(body, self._context)
        prompts = mapping.prompts(body, self._tokenizer)
        deadline = min(body.timeout_s or self.triton.deadline_s, self.triton.deadline_s)
        names = mapping.field_names(body)
        streams = [
            self.triton.stream(mapping.tensors(prompt, params, body, deadline), params.n, deadline, names)
            for prompt in prompts
        ]
        chunks = self._metrics.timed(merge(streams, params.n), arrived)
        echo = isinstance(body, CompletionRequest) and body.echo
        answer = Answer(body, self._fingerprint, [prompt.text for prompt in prompts] if echo else None)
        if not body.stream:
            whole = await _unless_gone(request, answer.whole(chunks))
            self._metrics.tokens.labels("prompt").inc(answer.prompt_tokens)
            return JSONResponse(whole)
        # An error before the first token still gets a status of its own.
        first = await _unless_gone(request, anext(chunks))
        return EventStream(self._events(request, answer, _resumed(first, chunks)))

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self._settings.model)]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        health = await self.health.get()
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "saguaro",
            "max_model_len": self._context,
            "mode": health.mode,
            "mode_reason": health.mode_reason,
            "health": health.status,
        }

    async def close(self) -> None:
        await self.triton.close()
        await self.health.close()

    def _check_model(self, name: str) -> None:
        if name != self._settings.model:
            message = f"the model {name[:100]!r} does not exist; this server has {self._settings.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _events(
        self, request: Request, answer: Answer, chunks: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[str, None]:
        request.scope["state"]["outcome"] = "cancelled"  # unless it comes to its end
        async with aclosing(chunks):
            async for event in answer.events(chunks):
                yield event
        self._metrics.tokens.labels("prompt").inc(answer.prompt_tokens)
        request.scope["state"]["outcome"] = "failed" if answer.failure else "ok"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            request.scope["state"]["outcome"] = "cancelled"
            raise ApiError(499, "the client went away")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def _resumed(first: Chunk, rest: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk
