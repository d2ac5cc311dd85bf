"""The HTTP application: OpenAI's endpoints over Triton, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import Send
from tokenizers import Tokenizer

import saguaro
from saguaro.engines.manifest import TOKENIZER, Manifest
from saguaro.frontend import openai_mapping as mapping
from saguaro.frontend.openai_answers import Answer
from saguaro.frontend.openai_errors import ApiError, from_validation, internal
from saguaro.frontend.openai_gate import Gate
from saguaro.frontend.openai_health import HealthCheck
from saguaro.frontend.openai_merge import merge
from saguaro.frontend.openai_metrics import Metrics
from saguaro.frontend.openai_schema import FIELDS, ChatRequest, CompletionRequest, Generation
from saguaro.frontend.openai_triton import Chunk, Triton

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """`triton` is HOST:PORT of its gRPC, `socket` the service's, `engine` the target's directory."""

    triton: str
    socket: Path
    engine: Path
    model: str
    keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_concurrent: int = 256
    deadline_s: float = 3600.0
    silence_s: float = 10.0


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject


class _StrictRequest(Request):
    async def json(self) -> Any:
        """JSON as the standard has it: no NaN, no lone surrogates, no bottomless nesting."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


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


def create_app(settings: Settings) -> FastAPI:
    """Raises EngineError when the engine directory is not complete."""
    manifest = Manifest.load(settings.engine)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.endpoints = Endpoints(settings, manifest, metrics)
        yield
        await app.state.endpoints.close()

    app = FastAPI(title="Saguaro", version=saguaro.__version__, lifespan=lifespan, redoc_url=None, docs_url=None)
    app.add_middleware(
        Gate,
        keys=settings.keys,
        max_body_bytes=settings.max_body_bytes,
        max_concurrent=settings.max_concurrent,
        metrics=metrics,
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    app.include_router(_routes(metrics))
    return app


def _routes(metrics: Metrics) -> APIRouter:
    router = APIRouter(route_class=_Route, responses={"default": {"model": ErrorBody}})

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await _endpoints(request).generate(request, body)

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await _endpoints(request).generate(request, body)

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        return await _endpoints(request).models()

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        return await _endpoints(request).model(name)

    @router.get("/health")
    async def health(request: Request) -> JSONResponse:
        found = await _endpoints(request).health.get()
        return JSONResponse(asdict(found), 503 if found.status == "down" else 200)

    @router.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _endpoints(request: Request) -> Endpoints:
    endpoints = request.app.state.endpoints
    if not isinstance(endpoints, Endpoints):
        raise TypeError("the application has not been started")
    return endpoints


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


async def _http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        known = error
    elif isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        known = ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    else:
        raise error
    return JSONResponse(known.body(), known.status_code, known.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return await _http_error(request, from_validation(error.errors(), FIELDS))


async def _bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, by way of the server, which gets the exception as well."""
    return await _http_error(request, internal("this is an error of the server; its log has the details"))
