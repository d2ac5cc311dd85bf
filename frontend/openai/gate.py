"""What every request passes before anything of it is parsed: key, number of requests, size; and how it ended."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saguaro.frontend.openai.errors import ApiError, overloaded
from saguaro.frontend.openai.metrics import Metrics, outcome

_BODY_S = 60.0  # within which a body has to arrive
_CLOSE = {"connection": "close"}
_DISCARD = 16  # times the limit that is read of a body that is too large, so that its sender gets to read why


class Gate:
    """An ASGI middleware. `/v1/` needs one of `keys`, if there are any; health and metrics are open.

    A handler may set `scope["state"]["outcome"]`, for what the status of its response cannot say any more.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], max_body_bytes: int, max_concurrent: int, metrics: Metrics
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body_bytes = max_body_bytes
        self._max_concurrent = max_concurrent
        self._metrics = metrics
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        status = 500
        state = scope.setdefault("state", {})

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._active += 1
        self._metrics.active.set(self._active)
        try:
            self._authorize(scope)
            if scope["method"] == "POST":
                receive = _replay(await self._read(scope, receive), receive)
            await self._app(scope, receive, watch)
        except ApiError as error:
            await JSONResponse(error.body(), error.status_code, error.headers)(scope, receive, watch)
        except asyncio.CancelledError:
            state.setdefault("outcome", "cancelled")
            raise
        finally:
            self._active -= 1
            self._metrics.active.set(self._active)
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, state.get("outcome", outcome(status))).inc()

    def _authorize(self, scope: Scope) -> None:
        """Raises ApiError. Every key is compared, each in constant time, so that the time says nothing of any."""
        if not self._keys:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "the API key is not valid" if given else "an API key is needed"
            raise ApiError(
                401,
                f"{what}: send one from the server's key file as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body. Raises ApiError for one that is too large or does not come, and when too many are under way."""
        body = bytearray()
        size = 0
        busy = self._active > self._max_concurrent
        try:
            async with asyncio.timeout(_BODY_S):
                more = True
                while more and size <= _DISCARD * self._max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        scope["state"]["outcome"] = "cancelled"
                        raise ApiError(400, "the client went away")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= self._max_body_bytes and not busy:
                        body += part
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {_BODY_S:g} s", code="request_timeout", headers=_CLOSE
            ) from None
        if size > self._max_body_bytes:
            raise ApiError(
                413,
                f"the body is larger than the limit of {self._max_body_bytes} bytes: shorten the prompt",
                code="request_too_large",
                headers=_CLOSE,
            )
        if busy:
            raise overloaded(f"{self._max_concurrent} requests are under way, which is the limit: try again")
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hands out the body, then whatever follows it, which is the news that the client has left."""
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read
