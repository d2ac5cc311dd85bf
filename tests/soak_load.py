"""Mixed load on a served deployment: every way to ask, clients that leave, and requests that cannot be served.

Whole answers of a seed are the same by every way, so each of them is compared with the first of its seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import aiohttp
import openai
import pytest
from tritonclient.grpc.aio import InferenceServerClient

from serving import tensor

SEEDS = 8
PATIENCE = 60.0  # seconds within which every request has to end


class Load:
    """Clients that ask one request after the other. `latencies` are those of whole answers, in seconds, by start."""

    def __init__(self, addresses: dict[str, str], model: str) -> None:
        self._http = addresses["http"].removesuffix("/ensemble/generate")
        self._addresses = addresses
        self._model = model
        self._texts: dict[int, str] = {}
        self._kinds: dict[Callable[[random.Random], Awaitable[None]], int] = {
            self._grpc_stream: 3,
            self._generate: 2,
            self._generate_stream: 2,
            self._openai_stream: 3,
            self._openai: 1,
            self._cancel_grpc: 1,
            self._cancel_http: 1,
            self._cancel_ensemble: 1,
            self._cancel_openai: 1,
            self._bad_http: 1,
            self._bad_grpc: 1,
            self._bad_openai: 1,
        }
        self.latencies: list[float] = []
        self.ended: Counter[str] = Counter()

    async def run(self, clients: int, seconds: float, seed: int) -> None:
        """Raises whatever goes other than it should; all connections are closed afterwards."""
        async with AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            self._grpc = await stack.enter_async_context(InferenceServerClient(self._addresses["grpc"]))
            self._client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=self._addresses["openai"], api_key="none", max_retries=0, timeout=PATIENCE)
            )
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._work(random.Random(seed * clients + number), until))

    async def _work(self, draw: random.Random, until: float) -> None:
        while time.monotonic() < until:
            (kind,) = draw.choices(list(self._kinds), list(self._kinds.values()))
            async with asyncio.timeout(PATIENCE):
                await kind(draw)
            self.ended[kind.__name__.strip("_")] += 1

    # --- whole answers -----------------------------------------------------------------------------------------------

    def _fields(self, draw: random.Random) -> dict[str, Any]:
        seed = draw.randrange(SEEDS)
        return {
            "text_input": f"soak {seed}",
            "max_tokens": 8 * (seed + 1),
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "exclude_input_in_output": True,
        }

    def _check(self, fields: dict[str, Any], text: str, begin: float) -> None:
        self.latencies.append(time.monotonic() - begin)
        assert self._texts.setdefault(fields["seed"], text) == text

    async def _grpc_stream(self, draw: random.Random) -> None:
        fields, begin, text = self._fields(draw), time.monotonic(), b""
        async for result, error in self._infer("ensemble", fields | {"stream": True}):
            assert error is None, error
            text += result.as_numpy("text_output")[0]
        self._check(fields, text.decode(), begin)

    async def _generate(self, draw: random.Random) -> None:
        fields, begin = self._fields(draw), time.monotonic()
        async with self._session.post(f"{self._http}/ensemble/generate", json=fields) as answer:
            body = await answer.json()
        assert answer.status == 200, body
        self._check(fields, body["text_output"], begin)

    async def _generate_stream(self, draw: random.Random) -> None:
        fields, begin = self._fields(draw), time.monotonic()
        text = ""
        async with aclosing(self._events("ensemble", fields | {"stream": True})) as events:
            async for event in events:
                text += event["text_output"]
        self._check(fields, text, begin)

    def _completion(self, draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same request for the ensemble, and as the OpenAI interface has it."""
        fields = self._fields(draw)
        same = {name: fields[name] for name in ("max_tokens", "temperature", "seed")}
        body = {"model": self._model, "prompt": fields["text_input"], "extra_body": {"ignore_eos": True}}
        return fields, body | same

    async def _openai_stream(self, draw: random.Random) -> None:
        (fields, body), begin = self._completion(draw), time.monotonic()
        async with await self._client.completions.create(**body, stream=True) as stream:
            text = "".join([event.choices[0].text async for event in stream])
        self._check(fields, text, begin)

    async def _openai(self, draw: random.Random) -> None:
        (fields, body), begin = self._completion(draw), time.monotonic()
        answer = await self._client.completions.create(**body)
        self._check(fields, answer.choices[0].text, begin)

    # --- clients that leave ------------------------------------------------------------------------------------------

    async def _cancel_grpc(self, draw: random.Random) -> None:
        long = {"input_ids": [5, 6, draw.randrange(400)], "max_tokens": 400, "ignore_eos": True, "stream": True}
        call = self._infer("ssd", long)
        _, error = await anext(call)
        assert error is None, error
        call.cancel()

    async def _cancel_http(self, draw: random.Random) -> None:
        long = {"input_ids": [5, 6, draw.randrange(400)], "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with aclosing(self._events("ssd", long)) as events:
            await anext(events)

    async def _cancel_ensemble(self, draw: random.Random) -> None:
        name = uuid.uuid4().hex
        long = self._fields(draw) | {"max_tokens": 400, "stream": True, "id": name}
        async with aclosing(self._events("ensemble", long)) as events:
            last = await anext(events)
            async with self._session.post(
                f"{self._http}/ssd/generate_stream", json={"id": name, "stop": True}
            ) as stopped:
                await stopped.read()
            async for event in events:
                last = event
        assert last["finish_reason"] == "cancelled", last

    async def _cancel_openai(self, draw: random.Random) -> None:
        _, body = self._completion(draw)
        async with await self._client.completions.create(**body | {"max_tokens": 400}, stream=True) as stream:
            await anext(aiter(stream))

    # --- requests that cannot be served ------------------------------------------------------------------------------

    async def _bad_http(self, draw: random.Random) -> None:
        name, value = draw.choice(
            [
                ("temperature", -1.0),
                ("max_tokens", 0),
                ("beam_width", 4),
                ("nonsense", 1),
                ("text_input", "x" * 100_000),
            ]
        )
        async with self._session.post(
            f"{self._http}/ensemble/generate", json=self._fields(draw) | {name: value}
        ) as answer:
            body = await answer.json()
        assert answer.status == 400, body
        assert name in body["error"], body

    async def _bad_grpc(self, draw: random.Random) -> None:
        name, value = draw.choice([("text_input", b"\xff"), ("top_p", float("nan")), ("stop_words", ["x" * 900] * 65)])
        fields = self._fields(draw) | {"stream": True, name: value}
        errors = [str(error) async for _, error in self._infer("ensemble", fields) if error]
        assert len(errors) == 1
        assert name in errors[0]

    async def _bad_openai(self, draw: random.Random) -> None:
        name, value = draw.choice([("temperature", "hot"), ("max_tokens", 10**6), ("n", 0), ("logit_bias", {"x": 1})])
        _, body = self._completion(draw)
        with pytest.raises(openai.BadRequestError) as refused:
            await self._client.completions.create(**body | {name: value})
        assert refused.value.param == name, refused.value

    # --- the wire ----------------------------------------------------------------------------------------------------

    def _infer(self, model: str, fields: dict[str, Any]) -> Any:
        async def once() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": [tensor(name, value) for name, value in fields.items()]}

        return self._grpc.stream_infer(once(), stream_timeout=PATIENCE)

    async def _events(self, model: str, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._session.post(f"{self._http}/{model}/generate_stream", json=fields) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    assert "error" not in event, event
                    yield event
