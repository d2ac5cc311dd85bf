"""Whatever is sent, the OpenAI front end answers with a status below 500, and it answers the next request as ever.

`SAGUARO_FUZZ` has the number of inputs of each test under the marker soak.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from fuzzing import AMOUNTS
from openai_server import MODEL, RunningServer, engine_folder, front_end
from saguaro.frontend.openai.schema import ChatRequest, CompletionRequest
from scripted_triton import Inputs, ScriptedTriton, chunk, scripted_triton

OPTIONS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


async def answer(triton: ScriptedTriton, name: str, inputs: Inputs) -> AsyncIterator[dict]:
    for index in range(inputs["num_return_sequences"][0]):
        yield chunk("text", answer=index, end="stop")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """In a loop and thread of its own; schemathesis is not asynchronous."""
    engine = engine_folder(tmp_path_factory.mktemp("engine"))
    started, stop = threading.Event(), threading.Event()
    found: list[RunningServer] = []

    async def run() -> None:
        async with (
            scripted_triton(answer) as triton,
            front_end(triton.address, engine, max_body_bytes=100_000) as running,
        ):
            found.append(running)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(20)
    yield found[0]
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def open_descriptors() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(f"{descriptor.name} {descriptor.readlink()}")
    return found


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    """Afterwards the server answers as ever, and keeps nothing of what it was sent."""
    httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "a"})  # opens the way to Triton
    before = open_descriptors()
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
        well = client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert well.json()["choices"][0]["text"] == "text"
        assert "saguaro_openai_active_requests 0.0" in client.get("/metrics").text.splitlines()
    deadline = time.monotonic() + 20
    while (left := server.app.state.endpoints.triton._tasks) or len(open_descriptors()) > len(before):
        assert time.monotonic() < deadline, (left, before, open_descriptors())
        time.sleep(0.05)


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "Traceback" not in error["message"]
        assert len(error["message"]) < 2000
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("amount", AMOUNTS)
def test_bodies_made_from_the_schema(server: RunningServer, client: httpx.Client, amount: int) -> None:
    schema = schemathesis.openapi.from_dict(server.app.openapi()).include(method="POST")
    schema.config.update(base_url=server.url)
    statuses: set[int] = set()
    with requests.Session() as session:
        for operation, mode in itertools.product(schema.get_all_operations(), GenerationMode):

            @settings(OPTIONS, max_examples=amount // 4)  # of four
            @given(case=operation.ok().as_strategy(generation_mode=mode))
            def run(case: Any) -> None:
                if isinstance(case.body, dict):
                    case.body["model"] = MODEL
                response = case.call_and_validate(checks=[not_a_server_error], session=session)
                statuses.add(response.status_code)

            run()
    assert statuses == {200, 400}


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400, 0.1, 1e308, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
)


def bodies(model: type) -> st.SearchStrategy[dict]:
    """Right bodies with a few fields of anything, known names and unknown ones."""
    names = st.sampled_from([*model.model_fields, *model.refused]) | st.text(max_size=9)
    right: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    right = {name: value for name, value in right.items() if name in model.model_fields}
    return st.dictionaries(names, values, min_size=1, max_size=3).map(lambda wrong: right | wrong)


@pytest.mark.parametrize(("path", "model"), [("chat/completions", ChatRequest), ("completions", CompletionRequest)])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_fields_of_anything(client: httpx.Client, path: str, model: type, amount: int) -> None:
    @settings(OPTIONS, max_examples=amount)
    @given(body=bodies(model))
    def run(body: dict) -> None:
        check(client.post(f"/v1/{path}", json=body))

    run()


@pytest.mark.parametrize("amount", AMOUNTS)
def test_bytes_of_anything(client: httpx.Client, amount: int) -> None:
    start = json.dumps({"model": MODEL, "prompt": "a"}).encode()

    @settings(OPTIONS, max_examples=amount)
    @given(data=st.binary(max_size=200), cut=st.integers(0, len(start)), kind=st.sampled_from(["json", "x-other"]))
    def run(data: bytes, cut: int, kind: str) -> None:
        body = start[:cut] + data + start[cut:]
        check(client.post("/v1/completions", content=body, headers={"content-type": f"application/{kind}"}))

    run()


def test_large_things(client: httpx.Client) -> None:
    for size in (50_000, 1_000_000, 10_000_000):
        check(client.post("/v1/completions", json={"model": MODEL, "prompt": "a" * size}))
        check(client.post("/v1/completions", json={"model": MODEL, "prompt": [1] * (size // 4)}))
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    check(client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "structured_outputs": {"json": deep}}))
    check(client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "x" * 50_000: 1}))
