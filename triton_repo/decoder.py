"""What the `ssd` model does: many requests at once through one Client, each answered through its own sink.

All of it happens in one event loop in a thread of its own, so that Triton's thread is never held up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray
from tokenizers import Tokenizer

from saguaro.errors import ConfigError, LinkError, SaguaroError
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.loop_thread import LoopThread
from saguaro.orchestrator.service_protocol import Tokens
from saguaro.orchestrator.types import SamplingParams
from saguaro.triton_repo.answers import Answer, Part, to_tensors
from saguaro.triton_repo.fields import Fields, id_of
from saguaro.triton_repo.request import Request, in_tensor_names, read_request
from saguaro.triton_repo.tensors import SSD

_log = logging.getLogger(__name__)
_LOOK = 0.05  # seconds between two looks at whether a client has gone


class Sink(Protocol):
    """Where the responses of one request go. A request is over with the `final` one, or the failure."""

    def send(self, outputs: Mapping[str, NDArray[Any]], final: bool) -> None: ...

    def finish(self) -> None:
        """An empty final response."""

    def fail(self, error: Exception) -> None: ...

    def is_cancelled(self) -> bool: ...


class _Cancel:
    """In a request's queue: give it up."""


@dataclass(eq=False)
class _Running:
    id: str
    request: Request
    sink: Sink
    # What the rounds emit, by the number of the answer, and whatever ends the request before its time.
    queue: asyncio.Queue[tuple[int, Tokens] | Exception | _Cancel] = field(default_factory=asyncio.Queue)
    over: bool = False  # its final response is out; to ask its sender anything after that crashes Triton

    def send(self, parts: Sequence[Part], final: bool) -> None:
        self.over = final
        self.sink.send(to_tensors(parts, len(self.request.prompt)), final)

    def fail(self, error: Exception) -> None:
        if not isinstance(error, SaguaroError):
            _log.error("a request failed in a way that nobody foresaw", exc_info=error)
        if not self.over:
            self.over = True
            self.sink.fail(in_tensor_names(error) if isinstance(error, ConfigError) else error)


class Decoder:
    """Requests in, responses out. Methods return at once and may be called from any one thread."""

    def __init__(self, tokenizer: Path, socket: Path, max_model_len: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._socket = socket
        self._max_model_len = max_model_len
        self._client: Client | None = None
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._loop = LoopThread()
        self._tasks: list[asyncio.Task[None]] = []
        self.run(self._look_after())

    def submit(self, request_id: str, inputs: Mapping[str, NDArray[Any]], parameters: str, sink: Sink) -> None:
        """Start a request, or with the input `stop` cancel the one of this id. `inputs` are not kept."""
        try:
            request_id = id_of(request_id, parameters)
            if Fields(SSD.inputs, inputs).flag("stop"):
                self._loop.post(self._stop, request_id, sink)
            else:
                request = read_request(inputs, parameters, self._tokenizer, self._max_model_len)
                self._loop.post(self._start, _Running(request_id, request, sink))
        except Exception as error:  # whatever it is, a request without a final response would wait for ever
            if not isinstance(error, SaguaroError):
                _log.exception("a request could not be read")
            sink.fail(error)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the loop do this beside the requests until `close`."""
        self._loop.post(lambda: self._tasks.append(asyncio.get_running_loop().create_task(work)))

    def close(self) -> None:
        """Give everything up: what is running ends as cancelled."""
        self._loop.run(self._end_all())
        self._loop.close()

    def _live(self) -> list[_Running]:
        return [running for running in self._running.values() if not running.over]

    def _start(self, running: _Running) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(running))
        self._running[task] = running
        task.add_done_callback(self._running.pop)

    def _stop(self, request_id: str, sink: Sink) -> None:
        """Cancel by id, which Triton does not keep unique: no id names no request, and a shared one is refused."""
        named = [running for running in self._live() if request_id and running.id == request_id]
        if len(named) > 1:
            sink.fail(ConfigError(f"stop: {len(named)} running requests have the id {request_id!r}; give each its own"))
            return
        for running in named:
            running.queue.put_nowait(_Cancel())
        sink.finish()

    async def _serve(self, running: _Running) -> None:
        request = running.request
        pumps: list[asyncio.Task[None]] = []
        try:  # whatever happens, the request gets an answer: nobody else would give it one
            prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=True) if request.echo else ""
            samples = request.params.samples()
            answers = [Answer(index, params, self._tokenizer, prompt) for index, params in enumerate(samples)]
            pumps += [asyncio.create_task(self._pump(running, index, params)) for index, params in enumerate(samples)]
            while left := [answer for answer in answers if answer.finish_reason is None]:
                item = await running.queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, _Cancel):
                    await _end(pumps)  # the service is told before the client is
                    parts = [answer.cancel() for answer in left]
                else:
                    parts = [answers[item[0]].push(item[1])]
                for part in parts if request.stream else ():
                    final = part is parts[-1] and all(answer.finish_reason for answer in answers)
                    running.send([part], final)
            if not request.stream:
                running.send([answer.whole() for answer in answers], final=True)
        except Exception as error:
            running.fail(error)
        finally:
            await _end(pumps)

    async def _pump(self, running: _Running, index: int, params: SamplingParams) -> None:
        request = running.request
        if self._client is None:
            self._client = Client(self._socket)
        client = self._client
        try:
            async with aclosing(
                client.stream(
                    request.prompt,
                    params,
                    mode=request.mode,
                    lookahead=request.lookahead,
                    priority=request.priority,
                    timeout_s=request.timeout_s,
                )
            ) as events:
                async for event in events:
                    running.queue.put_nowait((index, event))
        except Exception as error:
            running.queue.put_nowait(error)
            if isinstance(error, LinkError) and self._client is client:  # it has given the service up: have another
                self._client = None
                await client.close()

    async def _look_after(self) -> None:
        """Give up what its client no longer waits for. Through an ensemble Triton never says so: hence `stop`."""
        while True:
            await asyncio.sleep(_LOOK)
            for running in self._live():
                if running.sink.is_cancelled():
                    running.queue.put_nowait(_Cancel())

    async def _end_all(self) -> None:
        for running in self._live():
            running.queue.put_nowait(_Cancel())
        if self._running:
            await asyncio.wait(self._running)
        if self._client:
            await self._client.close()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
