"""What the front end measures of itself. Times are those a client of this process sees, without the network to it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from saguaro.frontend.openai.triton import Chunk

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OUTCOMES = {
    401: "unauthorized",
    404: "not_found",
    405: "not_found",
    408: "timeout",
    413: "too_large",
    429: "overloaded",
    503: "unavailable",
    504: "timeout",
}


class Metrics:
    """A registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "saguaro_openai_requests", "Finished requests.", ["endpoint", "outcome"], registry=self._registry
        )
        self.active = Gauge("saguaro_openai_active_requests", "Requests being answered.", registry=self._registry)
        self.ttft = Histogram(
            "saguaro_openai_time_to_first_token_seconds",
            "From a request's arrival to its first chunk.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.inter_chunk = Histogram(
            "saguaro_openai_inter_chunk_seconds",
            "Between two chunks of a request; a chunk is what one round emits.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter("saguaro_openai_tokens", "Tokens served.", ["kind"], registry=self._registry)

    def text(self) -> bytes:
        """In Prometheus' exposition format."""
        return generate_latest(self._registry)

    async def timed(self, chunks: AsyncGenerator[Chunk, None], arrived: float) -> AsyncGenerator[Chunk, None]:
        """The same chunks; `arrived` is on the monotonic clock."""
        last: float | None = None
        async with aclosing(chunks):
            async for chunk in chunks:
                now = time.monotonic()
                if last is None:
                    self.ttft.observe(now - arrived)
                else:
                    self.inter_chunk.observe(now - last)
                last = now
                self.tokens.labels("completion").inc(chunk.tokens)
                yield chunk


def outcome(status: int) -> str:
    """How a request ended, by the status it got."""
    return _OUTCOMES.get(status, "ok" if status < 400 else "invalid" if status < 500 else "error")
