"""The OpenAI front end against a scripted Triton: what a healthy deployment does, and what only a sick one does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from conftest import in_loop
from openai_server import CONTEXT, MODEL, RunningServer, engine_folder, front_end
from scripted_triton import Inputs, Refusal, ScriptedTriton, chunk, scripted_triton

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_folder(tmp_path_factory.mktemp("engine"))


async def two_words(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
    """An answer of two chunks for each of the n asked for, mixed."""
    n = inputs["num_return_sequences"][0]
    for answer in range(n):
        yield chunk(f"Säg{answer}", answer=answer, tokens=2)
    for answer in reversed(range(n)):
        yield chunk(" uaro", answer=answer, tokens=1, end="stop" if answer == 0 else "length")


async def endless(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
    while not triton.stops[name].is_set():
        yield chunk("x")
        await asyncio.sleep(0.01)
    yield chunk(end="cancelled")


@in_loop
async def test_a_chat_whole_and_streamed(engine: Path) -> None:
    async with scripted_triton(two_words) as triton, front_end(triton.address, engine) as server:
        client = server.client()
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2)
        assert [choice.message.content for choice in whole.choices] == ["Säg0 uaro", "Säg1 uaro"]
        assert [choice.finish_reason for choice in whole.choices] == ["stop", "length"]
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 6, 11)
        assert whole.system_fingerprint == "fp_000000000000"

        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, roles, reasons, usage = ["", ""], [], {}, None
        async for event in stream:
            usage = event.usage
            for choice in event.choices:
                assert usage is None
                texts[choice.index] += choice.delta.content or ""
                roles.append(choice.delta.role)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == ["Säg0 uaro", "Säg1 uaro"]
        assert reasons == {0: "stop", 1: "length"}
        assert roles.count("assistant") == 2
        assert usage is not None
        assert usage.total_tokens == 11
        assert not any(stop.is_set() for name, stop in triton.stops.items() if name in triton.requests)


@in_loop
async def test_several_prompts_and_their_echo(engine: Path) -> None:
    async with scripted_triton(two_words) as triton, front_end(triton.address, engine) as server:
        answer = await server.client().completions.create(model=MODEL, prompt=["one ", "two "], n=2, echo=True)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [
            f"{prompt} Säg{i} uaro".replace("  ", " ") for prompt in ("one ", "two ") for i in (0, 1)
        ]
        assert answer.usage.prompt_tokens == 10
        assert {inputs["text_input"][0] for inputs in triton.requests.values()} == {"one ", "two "}
        # Token ids are taken where a text has them, and refused where none has.
        ids = json.loads((engine / "tokenizer.json").read_text())["model"]["vocab"]
        answer = await server.client().completions.create(model=MODEL, prompt=[ids["A"], ids["B"]], echo=True)
        assert answer.choices[0].text == "ABSäg0 uaro"
        merged = next(token for token in ids if len(token) == 2 and token.isascii())
        with pytest.raises(openai.BadRequestError, match="send the prompt as text") as refused:
            await server.client().completions.create(model=MODEL, prompt=[ids[letter] for letter in merged])
        assert refused.value.param == "prompt"


@in_loop
async def test_every_parameter_reaches_the_ensemble(engine: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with scripted_triton(two_words) as triton, front_end(triton.address, engine) as server:
        await server.client().chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [TEXT_PART] * 2}],
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.25,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"3": -100},
            seed=2**64 - 1,
            stop=["a", "b"],
            logprobs=True,
            top_logprobs=3,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            user="somebody",
            store=False,
            metadata={"a": "b"},
            extra_body={
                "top_k": 4,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [8, 9],
                "include_stop_str_in_output": True,
                "bad_words": ["bad"],
                "priority": -1,
                "speculation": {"mode": "sd", "lookahead": 2},
                "timeout_s": 60,
                "tools": [],  # as good as none
            },
        )
        (inputs,) = triton.requests.values()
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi!hi!"}]
        assert json.loads(inputs.pop("messages")[0]) == messages
        assert json.loads(inputs.pop("logit_bias")[0]) == {"3": -100}
        assert json.loads(inputs.pop("guided_decoding_guide")[0]) == schema
        assert inputs == {
            "text_input": [""],
            "max_tokens": [7],
            "min_tokens": [2],
            "temperature": [0.5],
            "top_k": [4],
            "top_p": [0.25],
            "min_p": [0.125],
            "repetition_penalty": [1.5],
            "presence_penalty": [1.0],
            "frequency_penalty": [-1.0],
            "ignore_eos": [True],
            "include_stop_str_in_output": [True],
            "num_return_sequences": [1],
            "timeout_s": [60.0],
            "stream": [True],
            "exclude_input_in_output": [True],
            "return_num_input_tokens": [True],
            "return_num_output_tokens": [True],
            "seed": [2**64 - 1],
            "logprobs": [3],
            "return_log_probs": [True],
            "stop_words": ["a", "b"],
            "bad_words": ["bad"],
            "stop_token_ids": [8, 9],
            "guided_decoding_guide_type": ["json_schema"],
            "priority": [-1],
            "speculation_mode": ["sd"],
            "speculation_lookahead": [2],
        }


TEXT_PART = {"type": "text", "text": "hi!"}
CHAT, TEXT = {"model": MODEL, "messages": HELLO}, {"model": MODEL, "prompt": "hello"}


@in_loop
async def test_defaults_and_other_forms(engine: Path) -> None:
    async with scripted_triton(two_words) as triton, front_end(triton.address, engine) as server:

        async def sent(path: str, body: dict) -> Inputs:
            triton.requests.clear()
            async with httpx.AsyncClient(base_url=server.url) as client:
                answer = await client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            (inputs,) = triton.requests.values()
            return inputs

        assert (await sent("chat/completions", CHAT))["max_tokens"] == [CONTEXT]
        inputs = await sent("completions", TEXT)
        assert inputs["max_tokens"] == [16]
        assert inputs["text_input"] == ["hello"]
        assert not {"seed", "messages", "logprobs"} & set(inputs)
        inputs = await sent("chat/completions", CHAT | {"response_format": {"type": "json_object"}, "top_k": -1})
        assert json.loads(inputs["guided_decoding_guide"][0]) == {"type": "object"}
        assert inputs["top_k"] == [0]
        inputs = await sent("completions", TEXT | {"structured_outputs": {"choice": ["a.b", "c"]}, "stop": "x"})
        assert inputs["guided_decoding_guide_type"] == ["regex"]
        assert inputs["guided_decoding_guide"] == [r"a\.b|c"]
        assert inputs["stop_words"] == ["x"]
        inputs = await sent("completions", TEXT | {"structured_outputs": {"choice": [""]}})
        assert inputs["guided_decoding_guide"] == [""]
        nulls = dict.fromkeys(("temperature", "stop", "seed", "n", "max_tokens", "stream", "suffix", "tools"))
        assert (await sent("completions", TEXT | nulls))["temperature"] == [1.0]


ENTRY = {
    "token": "\\xc3",
    "logprob": -0.5,
    "bytes": [195],
    "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": []}],
}
OTHER = {"token": "\\xa4", "logprob": -0.25, "bytes": [164], "top_logprobs": []}
THIRD = {"token": "b", "logprob": -0.125, "bytes": [98], "top_logprobs": []}


@in_loop
async def test_logprobs_in_both_forms(engine: Path) -> None:
    async def script(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
        yield chunk("", logprobs=[ENTRY])  # half a character: no text yet
        yield chunk("äb", tokens=2, logprobs=[OTHER, THIRD], end="length")

    async with scripted_triton(script) as triton, front_end(triton.address, engine) as server:
        client = server.client()
        chat = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1)
        content = chat.choices[0].logprobs.content
        assert [entry.model_dump() for entry in content] == [ENTRY, OTHER, THIRD]
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1, stream=True
        )
        parts = [choice.logprobs async for event in stream for choice in event.choices]
        assert [e.token for part in parts if part for e in part.content] == ["\\xc3", "\\xa4", "b"]
        legacy = (await client.completions.create(model=MODEL, prompt="a", logprobs=1)).choices[0].logprobs
        assert legacy.tokens == ["\\xc3", "\\xa4", "b"]
        assert legacy.token_logprobs == [-0.5, -0.25, -0.125]
        assert legacy.top_logprobs == [{"a": -0.5}, {}, {}]
        assert legacy.text_offset == [0, 0, 1]


REFUSED = [
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "calling tools is not offered"),
    ("chat/completions", {"temprature": 1}, "temprature", r"unknown field \(did you mean temperature\?\)"),
    ("chat/completions", {"temperature": -1}, "temperature", "between 0"),
    ("chat/completions", {"temperature": "1"}, "temperature", "valid number"),
    ("chat/completions", {"n": 0}, "n", "greater than or equal to 1"),
    ("chat/completions", {"n": True}, "n", "valid integer"),
    ("chat/completions", {"stop": 1}, "stop", "valid string; or Input should be a valid list"),
    ("chat/completions", {"stop": [""]}, "stop", "1 to 1024 characters"),
    ("chat/completions", {"max_tokens": CONTEXT + 1}, "max_tokens", f"at most the {CONTEXT} tokens"),
    ("chat/completions", {"max_tokens": 10**30}, "max_tokens", "less than"),
    ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ("chat/completions", {"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ("chat/completions", {"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ("chat/completions", {"store": True}, "store", "should be False"),
    ("chat/completions", {"messages": []}, "messages", "at least 1"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ("chat/completions", {"messages": [HELLO[0] | {"name": "x"}]}, "messages[0].name", "no place for it"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
        "text only",
    ),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format", "must have json_schema"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    ("chat/completions", {"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
    ("completions", {"suffix": "x"}, "suffix", "not offered"),
    ("completions", {"best_of": 2}, "best_of", "answers are not ranked"),
    ("completions", {"echo": True, "logprobs": 1}, "logprobs", "echoed prompt"),
    ("completions", {"prompt": []}, "prompt", "at least 1"),
    ("completions", {"prompt": [-1]}, "prompt", "token ids"),
    ("completions", {"seed": -1}, "seed", "greater than or equal to 0"),
]


@in_loop
async def test_what_cannot_be_honoured_is_refused_by_name(engine: Path) -> None:
    async with (
        scripted_triton(two_words) as triton,
        front_end(triton.address, engine) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        for path, fields, param, message in REFUSED:
            answer = await client.post(f"/v1/{path}", json=(CHAT if path[1] == "h" else TEXT) | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), fields
            assert error["param"] == param, (fields, error)
            assert re.search(message, error["message"]), error
        for body in ('{"model": NaN}', '"\\ud800"', "[" * 10_000, "", "[]", b"\xff", '{"model": "tiny"'):
            answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, body
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await client.post("/v1/completions", json=TEXT | {"model": "x"})).json()["error"] == {
            "message": "the model 'x' does not exist; this server has 'tiny'",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert (await client.get("/v1/models/x")).status_code == 404
        for method, path, status in (("GET", "/v1/none", 404), ("GET", "/v1/completions", 405)):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        assert triton.requests == {}


@in_loop
async def test_key_size_and_number_of_requests(engine: Path, tmp_path: Path) -> None:
    settings = {"keys": ("first", "second"), "max_body_bytes": 1000, "max_concurrent": 1}
    async with scripted_triton(endless) as triton, front_end(triton.address, engine, **settings) as server:
        with pytest.raises(openai.AuthenticationError, match="not valid") as refused:
            await server.client("third").completions.create(model=MODEL, prompt="a")
        assert refused.value.code == "invalid_api_key"
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/metrics")).status_code == 200
        client = server.client("second")
        for size in (1000, 100_000):
            with pytest.raises(openai.APIStatusError, match="limit of 1000 bytes") as large:
                await client.completions.create(model=MODEL, prompt="a" * size)
            assert (large.value.status_code, large.value.code) == (413, "request_too_large")
        async with await client.completions.create(model=MODEL, prompt="a", stream=True) as stream:
            await anext(stream)
            with pytest.raises(openai.RateLimitError, match="the limit") as busy:
                await client.completions.create(model=MODEL, prompt="a")
            assert busy.value.response.headers["retry-after"] == "1"
            assert busy.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("refusal", "status", "code", "message"),
    [
        (Refusal("stop_words must be short"), 400, "invalid_value", "stop must be short"),
        (
            Refusal("text_input has 9 tokens and the context holds 8"),
            400,
            "context_length_exceeded",
            "messages has 9 tokens",
        ),
        (Refusal("overloaded: the queue is full"), 429, "rate_limit_exceeded", "the queue is full"),
        (Refusal("unavailable: shutting down"), 503, "service_unavailable", "shutting down"),
        (Refusal("internal error: oh"), 500, "internal_error", "the engine failed: oh"),
        (Refusal("", grpc.StatusCode.DEADLINE_EXCEEDED), 504, "deadline_exceeded", "deadline"),
    ],
)
def test_errors_of_the_ensemble(engine: Path, refusal: Refusal, status: int, code: str, message: str) -> None:
    """Before the first chunk with a status of their own, whole or streamed; afterwards as the stream's last event."""
    first = True

    async def script(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
        if not first:
            yield chunk("some")
        raise Refusal(f"in ensemble 'ensemble', {refusal.details}", refusal.status)

    async def run() -> None:
        nonlocal first
        async with scripted_triton(script) as triton, front_end(triton.address, engine) as server:
            client = server.client()
            for streaming in (False, True):
                with pytest.raises(openai.APIStatusError, match=message) as failed:
                    await client.chat.completions.create(model=MODEL, messages=HELLO, stream=streaming)
                assert (failed.value.status_code, failed.value.code) == (status, code)
            assert ("retry-after" in failed.value.response.headers) == (status in (429, 503))
            first = False
            events = await raw_events(server, CHAT | {"stream": True})
            assert json.loads(events[-1])["error"]["code"] == code
            assert "[DONE]" not in events
            with pytest.raises(openai.APIError, match=message):
                async for _ in await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
                    pass

    asyncio.run(run())


async def raw_events(server: RunningServer, body: dict) -> list[str]:
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_client_that_leaves_cancels_its_request(engine: Path, streaming: bool, prompt: object) -> None:
    async def run() -> None:
        async with scripted_triton(endless) as triton, front_end(triton.address, engine) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
                body = TEXT | {"stream": streaming, "prompt": prompt}
                leaving = asyncio.create_task(client.post("/v1/completions", json=body))
                while len(triton.requests) < len(prompt):  # type: ignore[arg-type]
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.05)
                leaving.cancel()
                await asyncio.wait([leaving])
            for name in triton.requests:
                await asyncio.wait_for(triton.stops[name].wait(), 10)
            while 'outcome="cancelled"' not in (metrics := await exposition(server)):
                await asyncio.sleep(0.01)
            assert "saguaro_openai_active_requests 0.0" in metrics

    asyncio.run(run())


async def exposition(server: RunningServer) -> str:
    async with httpx.AsyncClient(base_url=server.url) as client:
        return (await client.get("/metrics")).text


@in_loop
async def test_a_request_cancelled_on_its_way_is_stopped_when_it_arrives(engine: Path) -> None:
    """The engine knows nothing of a request that is still being tokenised: the word to stop comes again."""
    arrived = asyncio.Event()

    async def script(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
        await asyncio.wait_for(triton.stops[name].wait(), 10)
        triton.stops[name].clear()  # came too early
        arrived.set()
        async for outputs in endless(triton, name, inputs):
            yield outputs

    async with scripted_triton(script) as triton, front_end(triton.address, engine) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            leaving = asyncio.create_task(client.post("/v1/completions", json=TEXT))
            while not triton.requests:
                await asyncio.sleep(0.005)
            leaving.cancel()
            await asyncio.wait([leaving])
        await asyncio.wait_for(arrived.wait(), 10)
        (name,) = triton.requests
        await asyncio.wait_for(triton.stops[name].wait(), 10)


@in_loop
async def test_triton_dies_in_the_middle_of_a_stream_and_comes_back(engine: Path) -> None:
    async with scripted_triton(endless) as triton, front_end(triton.address, engine) as server:
        reading = asyncio.create_task(raw_events(server, CHAT | {"stream": True}))
        while not triton.requests:
            await asyncio.sleep(0.005)
        await triton.server.stop(None)
        error = json.loads((await reading)[-1])["error"]
        assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
        with pytest.raises(openai.InternalServerError, match="being restarted") as failed:
            await server.client().completions.create(model=MODEL, prompt="a")
        assert failed.value.status_code == 503
        assert failed.value.response.headers["retry-after"] == "5"
        triton.script = two_words
        await triton.start()
        async with asyncio.timeout(20):
            while True:
                try:
                    answer = await server.client().completions.create(model=MODEL, prompt="a")
                    break
                except openai.InternalServerError:
                    await asyncio.sleep(0.05)
        assert answer.choices[0].text


@in_loop
async def test_a_silent_model_is_asked_whether_it_lives(engine: Path) -> None:
    async def script(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
        yield chunk("some")
        triton.dead = True
        await asyncio.Event().wait()

    async with scripted_triton(script) as triton, front_end(triton.address, engine, silence_s=0.1) as server:
        error = json.loads((await raw_events(server, CHAT | {"stream": True}))[-1])["error"]
        assert error["code"] == "service_unavailable"


@in_loop
async def test_an_answer_that_ends_without_a_reason_is_an_error(engine: Path) -> None:
    async def script(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
        yield chunk("some", answer=1, end="stop")

    async with scripted_triton(script) as triton, front_end(triton.address, engine) as server:
        with pytest.raises(openai.InternalServerError, match="without a reason"):
            await server.client().completions.create(model=MODEL, prompt="a", n=2)


@in_loop
async def test_shutting_down_finishes_what_it_can_and_says_what_it_cannot(engine: Path) -> None:
    release = asyncio.Event()

    async def script(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
        yield chunk("some")
        if inputs["text_input"] == ["quick"]:
            await release.wait()
            yield chunk(" more", end="stop")
        else:
            async for outputs in endless(triton, name, inputs):
                yield outputs

    async with scripted_triton(script) as triton:
        async with front_end(triton.address, engine, grace=1) as server:
            quick = asyncio.create_task(server.client().completions.create(model=MODEL, prompt="quick"))
            slow = asyncio.create_task(raw_events(server, CHAT | {"stream": True}))
            while len(triton.requests) < 2:
                await asyncio.sleep(0.005)
            server.server.should_exit = True
            release.set()
            assert (await quick).choices[0].text == "some more"
            error = json.loads((await slow)[-1])["error"]
            assert "shutting down" in error["message"]
        assert all(stop.is_set() for name, stop in triton.stops.items() if triton.requests[name]["text_input"] == [""])


@in_loop
async def test_metrics_count_tokens_and_outcomes(engine: Path) -> None:
    async with scripted_triton(two_words) as triton, front_end(triton.address, engine) as server:
        await server.client().completions.create(model=MODEL, prompt="a", n=2)
        async for _ in await server.client().completions.create(model=MODEL, prompt="a", stream=True):
            pass
        with pytest.raises(openai.NotFoundError):
            await server.client().completions.create(model="none", prompt="a")
        lines = (await exposition(server)).splitlines()
        for line in (
            'saguaro_openai_requests_total{endpoint="/v1/completions",outcome="ok"} 2.0',
            'saguaro_openai_requests_total{endpoint="/v1/completions",outcome="not_found"} 1.0',
            'saguaro_openai_tokens_total{kind="completion"} 9.0',
            'saguaro_openai_tokens_total{kind="prompt"} 10.0',
            "saguaro_openai_time_to_first_token_seconds_count 2.0",
            "saguaro_openai_inter_chunk_seconds_count 4.0",
        ):
            assert line in lines, line
