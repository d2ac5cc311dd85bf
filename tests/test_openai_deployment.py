"""The official client, the front end's own process, the real Triton server and the tiny pair: the same text as LLM."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from saguaro import LLM, SamplingParams
from saguaro.orchestrator.plan import service_socket
from serving import MAX_QUEUE, Served

KEY = "a-key-of-a-test"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do owls live? 🌵"}]
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24)


@dataclass
class Stack:
    llm: LLM
    url: str
    process: subprocess.Popen[bytes]

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def command(
    log: Path, triton: str, socket: Path, engine: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process of the front end, and the address it says it is ready at."""
    arguments = ["--triton", triton, "--socket", str(socket), "--engine", str(engine), "--model", "tiny", "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "saguaro.frontend.openai", *arguments, *options], stderr=file)
    try:
        while "ready: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, log.read_text().split("ready: ")[1].split()[0]
    finally:
        process.kill()
        process.wait(20)
        logging.getLogger(__name__).warning("the front end said: %s", log.read_text())


@pytest.fixture(scope="module")
def stack(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("openai")
    keys = folder / "keys"
    keys.write_text(f"# of the test\n{KEY}\n\nanother\n")
    launcher = served.llm._launcher
    engine = Path(launcher._plans["target"].engine)
    triton = f"127.0.0.1:{served.server.grpc_port}"
    options = ("--api-key-file", str(keys), "--grace", "10")
    with command(folder / "log", triton, service_socket(launcher.runtime), engine, *options) as (process, url):
        yield Stack(served.llm, url, process)
        assert served.loop.run(served.server.trouble()) is None


def test_chat_says_what_llm_says(stack: Stack) -> None:
    expected = stack.llm.generate(CHAT, SEEDED)[0]
    options = {"model": "tiny", "messages": CHAT, "seed": 7, "max_completion_tokens": 24}
    with stack.client() as client:
        whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == expected.text
        assert whole.choices[0].finish_reason == expected.finish_reason
        assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert whole.usage.completion_tokens == len(expected.token_ids)
        logprobs = stack.llm.generate(CHAT, replace(SEEDED, logprobs=2))[0].logprobs
        content = whole.choices[0].logprobs.content
        assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in logprobs])
        assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
        assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace").startswith(expected.text)

        with client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}) as stream:
            events = list(stream)
        assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == expected.text
        assert events[-2].choices[0].finish_reason == expected.finish_reason
        assert events[-1].usage == whole.usage
        assert len(events) > 4


def test_completions_say_what_llm_says(stack: Stack) -> None:
    params = replace(SEEDED, n=2, stop=("e",), max_tokens=40)
    prompts = ["def fib(n):", "Rain"]
    expected = stack.llm.generate(prompts, params)
    with stack.client("another") as client:
        options = {"model": "tiny", "prompt": prompts, "n": 2, "seed": 7, "max_tokens": 40, "stop": "e"}
        whole = client.completions.create(**options)
        assert [(c.text, c.finish_reason) for c in whole.choices] == [(r.text, r.finish_reason) for r in expected]
        with client.completions.create(**options, echo=True, stream=True) as stream:
            texts = [""] * 4
            for event in stream:
                texts[event.choices[0].index] += event.choices[0].text
        assert texts == [prompt + result.text for prompt, result in zip([p for p in prompts for _ in "ab"], expected)]
        ids = stack.llm.encode("Rain")
        assert client.completions.create(model="tiny", prompt=ids, temperature=0).choices[0].text == (
            stack.llm.generate("Rain", SamplingParams(temperature=0, max_tokens=16))[0].text
        )


def test_other_parameters_and_formats(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={40: 2.5},
        seed=3,
        max_tokens=20,
        min_tokens=4,
        bad_words=("the",),
    )
    with stack.client() as client:
        answer = client.completions.create(
            model="tiny",
            prompt="The fruit",
            temperature=0.7,
            top_p=0.9,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={"40": 2.5},
            seed=3,
            max_tokens=20,
            extra_body={
                "top_k": 20,
                "min_p": 0.01,
                "repetition_penalty": 1.1,
                "min_tokens": 4,
                "bad_words": ["the"],
                "speculation": {"mode": "sd", "lookahead": 2},
            },
        )
        assert answer.choices[0].text == stack.llm.generate("The fruit", params)[0].text
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        text = client.chat.completions.create(model="tiny", messages=CHAT, seed=1, response_format=form)
        assert json.loads(text.choices[0].message.content) in ({"a": 1}, {"a": 2})
        chosen = client.completions.create(
            model="tiny", prompt="a", extra_body={"structured_outputs": {"choice": ["yes (a)", "no."]}}
        )
        assert chosen.choices[0].text in ("yes (a)", "no.")


def test_errors_name_the_field(stack: Stack) -> None:
    with stack.client() as client:
        for fields, param, message in (
            ({"messages": [{"role": "user", "content": "a " * 2000}]}, "messages", "the context holds"),
            ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
            ({"response_format": FORM_WITHOUT_END}, "response_format", "cannot be used"),
            ({"extra_body": {"speculation": {"lookahead": 99}}}, "speculation", "between 1 and"),
        ):
            with pytest.raises(openai.BadRequestError, match=message) as refused:
                client.chat.completions.create(**{"model": "tiny", "messages": CHAT} | fields)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="a " * 5000)
        assert refused.value.code == "context_length_exceeded"
    with stack.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


FORM_WITHOUT_END = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


def test_a_full_queue_is_429_and_passes(stack: Stack, served: Served) -> None:
    more = MAX_QUEUE + 16  # each prompt is a request of its own to the engine
    with stack.client() as client:
        with pytest.raises(openai.RateLimitError, match="the queue is full") as refused:
            client.completions.create(
                model="tiny", prompt=[f"a {i}" for i in range(more)], max_tokens=200, extra_body={"ignore_eos": True}
            )
        assert refused.value.code == "rate_limit_exceeded"
        assert refused.value.response.headers["retry-after"] == "1"
        served.until_idle()
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1


def test_models_health_and_metrics(stack: Stack) -> None:
    with stack.client() as client:
        (model,) = client.models.list().data
        assert (model.id, model.owned_by) == ("tiny", "saguaro")
        told = dict(client.models.retrieve("tiny").model_extra or {})
        assert told.pop("mode_reason")  # depends on what this deployment has gone through
        assert told == {"max_model_len": model.model_extra["max_model_len"], "mode": "ssd", "health": "ok"}
    health = httpx.get(f"{stack.url}/health")
    said = health.json()
    assert said.pop("mode_reason")
    assert (health.status_code, said) == (200, {"status": "ok", "triton": "ok", "service": "ok", "mode": "ssd"})
    assert 'endpoint="/v1/models",outcome="ok"' in httpx.get(f"{stack.url}/metrics").text


def test_sixteen_at_once_and_some_that_leave(stack: Stack, served: Served) -> None:
    expected = stack.llm.generate(CHAT, replace(SEEDED, n=16))

    def ask(index: int) -> str:
        with (
            stack.client() as client,
            client.chat.completions.create(
                model="tiny", messages=CHAT, seed=7 + index, max_tokens=24 if index % 4 else 100, stream=True
            ) as stream,
        ):
            text = ""
            for event in stream:
                text += event.choices[0].delta.content or ""
                if not index % 4 and text:
                    break
            return text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(16)))
    for index, (text, result) in enumerate(zip(texts, expected, strict=True)):
        assert text == result.text if index % 4 else result.text.startswith(text), index
    served.until_idle()


def test_a_term_signal_lets_answers_finish(stack: Stack, served: Served) -> None:
    """The last test of this front end: it is gone afterwards."""
    expected = stack.llm.generate(CHAT, SEEDED)[0].text
    with stack.client() as client:
        stream = client.chat.completions.create(model="tiny", messages=CHAT, seed=7, max_tokens=24, stream=True)
        text = next(iter(stream)).choices[0].delta.content or ""
        stack.process.send_signal(signal.SIGTERM)
        text += "".join(event.choices[0].delta.content or "" for event in stream)
        assert text == expected
    assert stack.process.wait(20) == 0
    served.until_idle()


def test_what_keeps_the_command_from_starting(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    common = [sys.executable, "-m", "saguaro.frontend.openai", "--triton", "127.0.0.1:1", "--socket", "s"]
    for options, message in (
        (["--engine", str(tmp_path), "--api-key-file", str(tmp_path / "keys")], "has no API key"),
        (["--engine", str(tmp_path)], "manifest.json is missing"),
    ):
        done = subprocess.run([*common, *options, "--model", "tiny"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
