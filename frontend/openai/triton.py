"""The ensemble behind Triton's gRPC, as streams of chunks: every one has a deadline, and none is left running alone."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput, InferResult
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from saguaro.frontend.openai.errors import ApiError, down, from_triton, internal

_log = logging.getLogger(__name__)
_MARGIN = 10.0  # seconds the engine gets beyond a request's time to hand over what it has
_CANARY_S = 5.0  # at most, within which a living model answers a request that asks for nothing
_AGAIN_S = 0.5  # between two requests to stop what may not have reached the engine yet
_GIVE_UP_S = 30.0  # after which a stream that should have stopped is left to its deadline
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A server that was restarted is found again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# How the messages of errors begin that are not the request's fault. In a stream they come without a code: the header
# that asks for one (triton_grpc_error) makes Triton 24.10 crash.
_CODES = {
    "overloaded: ": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable: ": grpc.StatusCode.UNAVAILABLE,
    "internal error: ": grpc.StatusCode.INTERNAL,
}


_ENSEMBLE_PREFIX = re.compile(r"^in ensemble '[^']*', ")


@dataclass(frozen=True)
class Chunk:
    """What a round added to one of a request's answers."""

    answer: int
    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: str | None  # on the last one
    logprobs: list[dict[str, Any]]  # one per token, in the form of OpenAI's chat endpoint, if asked for


class Triton:
    """Streams of the models `ensemble` and `ssd` of the server at `address` (HOST:PORT).

    `deadline_s` bounds a whole stream. After `silence_s` without a chunk the engine is asked whether it lives: a stream
    whose process has died would otherwise wait for its deadline. To be made within the event loop.
    """

    def __init__(self, address: str, *, deadline_s: float = 3600.0, silence_s: float = 10.0) -> None:
        self.deadline_s = deadline_s
        self._silence_s = silence_s
        self._canary_s = min(_CANARY_S, silence_s)
        self._client = InferenceServerClient(address, channel_args=_OPTIONS)
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def stream(
        self, inputs: list[InferInput], answers: int, deadline_s: float, names: Mapping[str, str]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of all answers, mixed. Closing the iterator early cancels the request.

        Raises ApiError, in which `names` has the request's field for a tensor's name.
        """
        name = uuid.uuid4().hex
        responses = self._send("ensemble", name, inputs, deadline_s + _MARGIN)
        closing = asyncio.ensure_future(self._closing.wait())
        reading: asyncio.Task[InferResult | None] | None = None
        open_answers = set(range(answers))
        ended = False
        try:
            while True:
                reading = asyncio.ensure_future(anext(responses, None))
                await self._until_read(reading, closing)
                result = reading.result()
                if result is None:
                    break
                chunk = _chunk(result)
                if chunk is None:
                    continue
                if chunk.finish_reason:
                    open_answers.discard(chunk.answer)
                yield chunk
            ended = True
            if open_answers:
                raise internal("the engine ended an answer without a reason")
        except (grpc.RpcError, InferenceServerException) as error:
            ended = True
            raise await self._explain(error, names) from error
        finally:
            closing.cancel()
            if not ended:
                self._in_background(self._wind_down(name, responses, reading))

    async def alive(self) -> bool:
        """Whether a request reaches the model and comes back."""
        return await self._stop(uuid.uuid4().hex)

    def end_streams(self) -> None:
        """Every stream ends with an error that says so: the time for finishing them is over."""
        self._closing.set()

    async def close(self) -> None:
        """After what is being cancelled has ended."""
        self.end_streams()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def _until_read(self, reading: asyncio.Task[Any], closing: asyncio.Future[Any]) -> None:
        """Returns with `reading` done; it is never cancelled, because that would end the call unseen by the engine."""
        while not reading.done():
            await asyncio.wait({reading, closing}, timeout=self._silence_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return
            if self._closing.is_set():
                raise down("the server is shutting down and could not finish this answer in time")
            if not await self.alive() and not reading.done():
                raise down("the model does not answer any more; it is being restarted: try again")

    async def _explain(self, error: grpc.RpcError | InferenceServerException, names: Mapping[str, str]) -> ApiError:
        code, details = _code(error)
        if code is not grpc.StatusCode.INVALID_ARGUMENT:
            _log.warning("a request failed: %s: %s", code.name, details)
        alive = code is grpc.StatusCode.DEADLINE_EXCEEDED or await self.alive()
        return from_triton(code, details, alive=alive, names=names)

    async def _wind_down(
        self, name: str, responses: AsyncIterator[InferResult], reading: asyncio.Task[InferResult | None] | None
    ) -> None:
        """Cancel a request that nobody reads any more: again and again until its stream ends, because what is still on
        its way to the engine cannot be stopped there."""
        give_up = time.monotonic() + _GIVE_UP_S
        try:
            while time.monotonic() < give_up and await self._stop(name):
                again = time.monotonic() + _AGAIN_S
                while (left := again - time.monotonic()) > 0:
                    reading = reading or asyncio.ensure_future(anext(responses, None))
                    if not (await asyncio.wait({reading}, timeout=left))[0]:
                        break
                    if reading.result() is None:
                        return
                    reading = None
            _log.warning("a request that was cancelled does not end; its stream is given up")
            if reading is not None:
                reading.cancel()
                await reading
        except (grpc.RpcError, InferenceServerException, asyncio.CancelledError):
            pass  # the stream has ended, as it should

    async def _stop(self, name: str) -> bool:
        """Ask the engine to cancel a request; it answers also where there is none of that name."""
        stop = InferInput("stop", [1, 1], "BOOL").set_data_from_numpy(np.array([[True]]))
        try:
            async for _ in self._send("ssd", name, [stop], self._canary_s):
                pass
        except (grpc.RpcError, InferenceServerException) as error:
            _log.warning("the model does not answer: %s: %s", *_code(error))
            return False
        return True

    async def _send(
        self, model: str, name: str, inputs: list[InferInput], timeout_s: float
    ) -> AsyncGenerator[InferResult, None]:
        """One request; the call ends by itself after the last response."""

        async def once() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs, "request_id": name}

        call = self._client.stream_infer(once(), stream_timeout=timeout_s)
        async for result, error in call:
            if error is not None:
                raise error
            yield result

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _code(error: grpc.RpcError | InferenceServerException) -> tuple[grpc.StatusCode, str]:
    """Of a broken call, gRPC's; of an error within a stream, what its message says."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code(), error.details() or ""
    message = _ENSEMBLE_PREFIX.sub("", error.message()).strip()
    for start, code in _CODES.items():
        if message.startswith(start):
            return code, message.removeprefix(start)
    return grpc.StatusCode.INVALID_ARGUMENT, message


def _chunk(result: InferResult) -> Chunk | None:
    """None for the empty response that only says the end."""
    texts = _values(result, "text_output")
    if not texts:
        return None
    reason = _first(result, "finish_reason", b"").decode()
    return Chunk(
        answer=int(_first(result, "sequence_index", 0)),
        text=b"".join(texts).decode(errors="replace"),
        tokens=len(_values(result, "output_ids")),
        prompt_tokens=int(_first(result, "num_input_tokens", 0)),
        finish_reason=reason or None,
        logprobs=json.loads(_first(result, "token_logprobs", b"[]")),
    )


def _values(result: InferResult, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else list(array.reshape(-1).tolist())


def _first(result: InferResult, name: str, default: Any) -> Any:
    return next(iter(_values(result, name)), default)
