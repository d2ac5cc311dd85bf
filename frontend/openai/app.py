"""The HTTP application: OpenAI's endpoints over Triton, health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException

import saguaro
from saguaro.engines.manifest import Manifest
from saguaro.frontend.openai.endpoints import Endpoints
from saguaro.frontend.openai.errors import ApiError, from_validation, internal
from saguaro.frontend.openai.gate import Gate
from saguaro.frontend.openai.health import ANSWERING
from saguaro.frontend.openai.metrics import Metrics
from saguaro.frontend.openai.schema import FIELDS, ChatRequest, CompletionRequest
from saguaro.frontend.openai.settings import Settings


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
        return JSONResponse(asdict(found), 200 if found.status in ANSWERING else 503)

    @router.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _endpoints(request: Request) -> Endpoints:
    endpoints = request.app.state.endpoints
    if not isinstance(endpoints, Endpoints):
        raise TypeError("the application has not been started")
    return endpoints


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
