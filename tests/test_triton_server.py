"""The real tritonserver in front of a tiny deployment: what clients get, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import time
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from fuzzing import AMOUNTS
from saguaro.errors import LaunchError
from saguaro.orchestrator.types import SamplingParams
from saguaro.triton_repo.server import TritonServer, _installation
from saguaro.triton_repo.tensors import ENSEMBLE, SSD
from serving import MAX_QUEUE, Served, at_once, text_of
from test_triton_request import fuzzed_fields

PROMPT = "A saguaro grows"
LONG = {"input_ids": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "seed": 3}  # takes seconds to the end


def fields(**more: Any) -> dict[str, Any]:
    return {
        "text_input": PROMPT,
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 7,
        "exclude_input_in_output": True,
    } | more


def expected(served: Served, prompt: Any = PROMPT, **more: Any) -> list[Any]:
    params = {"max_tokens": 12, "temperature": 0.8, "seed": 7} | more
    return served.llm.generate(prompt, SamplingParams(**params))


def test_all_ways_to_ask_give_the_text_of_the_library(served: Served) -> None:
    (result,) = expected(served)
    status, whole = served.post("generate", fields())
    assert (status, whole["text_output"], whole["finish_reason"]) == (200, result.text, result.finish_reason)
    assert whole["output_ids"] == result.token_ids
    assert (whole["num_input_tokens"], whole["num_output_tokens"]) == (len(result.prompt_token_ids), 12)
    assert served.post("generate", fields(exclude_input_in_output=False))[1]["text_output"] == PROMPT + result.text

    status, events = served.post("generate_stream", fields(stream=True))
    assert status == 200
    assert "".join(event["text_output"] for event in events) == result.text
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + [result.finish_reason]

    responses = served.infer(fields(stream=True, exclude_input_in_output=False))
    assert text_of(responses) == result.text, "a stream has the new text only"
    assert [token for part in responses for token in part["output_ids"][0]] == result.token_ids
    stats = json.loads(responses[-1]["stats"][0, 0])
    assert len(responses) == stats["rounds"], "one chunk per round"
    assert 0 < stats["accepted_draft_tokens"] == responses[-1]["total_accepted_draft_tokens"][0, 0]
    rate = stats["accepted_draft_tokens"] / stats["draft_tokens"]
    assert responses[-1]["acceptance_rate"][0, 0] == pytest.approx(rate)
    assert sum(len(part["output_ids"][0]) - 1 for part in responses[:-1]) <= stats["accepted_draft_tokens"]

    (once,) = served.infer(fields())
    assert once["text_output"][0].decode() == result.text, "one response unless streaming is asked for"
    assert set(once) == {spec.name for spec in ENSEMBLE.outputs}


def test_several_answers_and_a_chat(served: Served) -> None:
    results = expected(served, n=3)
    (whole,) = served.infer(fields(num_return_sequences=3))
    assert [text.decode() for text in whole["text_output"]] == [result.text for result in results]
    assert whole["sequence_index"].tolist() == [[0, 1, 2]]
    lengths = whole["num_output_tokens"][0].cumsum()[:-1]
    parts = [part.tolist() for part in np.split(whole["output_ids"][0], lengths)]
    assert parts == [result.token_ids for result in results]
    responses = served.infer(fields(num_return_sequences=3, stream=True))
    for index, result in enumerate(results):
        assert text_of(responses, index) == result.text
        reasons = [part["finish_reason"][0, 0] for part in responses if part["sequence_index"][0, 0] == index]
        assert reasons[-1] == result.finish_reason.encode()
        assert set(reasons[:-1]) <= {b""}
    messages = [{"role": "user", "content": "Where do owls live?"}]
    status, chat = served.post("generate", fields(text_input="", messages=json.dumps(messages)))
    assert (status, chat["text_output"]) == (200, expected(served, messages)[0].text)


def test_log_probabilities(served: Served) -> None:
    (result,) = expected(served, logprobs=2)
    responses = served.infer(fields(stream=True, logprobs=2))
    entries = [entry for part in responses for entry in json.loads(part["token_logprobs"][0, 0])]
    values = np.concatenate([part["output_log_probs"][0, 0] for part in responses])
    assert [entry["logprob"] for entry in entries] == pytest.approx([one.logprob for one in result.logprobs], abs=1e-5)
    assert values.tolist() == pytest.approx([one.logprob for one in result.logprobs], abs=1e-5)
    assert responses[-1]["cum_log_probs"][0, 0] == pytest.approx(sum(values), abs=1e-4)
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == result.text
    (alone,) = served.infer(fields(return_log_probs=True))
    assert alone["output_log_probs"].shape == (1, 1, len(entries))
    assert all(entry["top_logprobs"] == [] for entry in json.loads(alone["token_logprobs"][0, 0]))


def test_stop_strings_across_chunks_and_structured_output(served: Served) -> None:
    (result,) = expected(served, max_tokens=40)
    stop = next(result.text[i : i + 4] for i in range(5, 30) if "\ufffd" not in result.text[i : i + 4])
    for include in (False, True):
        (ended,) = expected(served, max_tokens=40, stop=(stop,), include_stop_str_in_output=include)
        assert ended.text == result.text[: result.text.index(stop) + len(stop) * include]
        request = fields(max_tokens=40, stop_words=[stop, ""], stream=True, include_stop_str_in_output=include)
        responses = served.infer(request)
        assert (text_of(responses), responses[-1]["finish_reason"][0, 0]) == (ended.text, b"stop")
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}é"}
    (whole,) = served.infer(fields(**guide))
    text = whole["text_output"][0].decode()
    assert text[:3].isdigit()
    assert (text[3:], whole["finish_reason"][0, 0]) == ("é", b"stop")
    pieces = [part["text_output"][0].decode() for part in served.infer(fields(**guide, stream=True))]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces), "é is two tokens"


def test_sixteen_streams_at_once(served: Served) -> None:
    requests = [fields(stream=index % 2 == 0, text_input=f"{PROMPT} {index}") for index in range(16)]
    answers = at_once([lambda request=request: served.infer(request) for request in requests])
    results = expected(served, [request["text_input"] for request in requests])
    for result, responses in zip(results, answers, strict=True):
        assert not isinstance(responses, Exception), responses
        assert text_of(responses) == result.text
    served.until_idle()


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    with served.stream(LONG | {"stream": True}, SSD.name) as responses:
        next(responses)
    served.until_idle()
    body = json.dumps({"input_ids": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.server.http_port), timeout=30) as connection:
        connection.sendall(
            b"POST /v2/models/ssd/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert b"data: " in connection.recv(65536) + connection.recv(65536)
        assert served.llm.status().running == 1
    served.until_idle()


def test_stop_cancels_by_request_id_through_the_ensemble(served: Served) -> None:
    """Through an ensemble Triton does not tell that a client has left."""
    names = [uuid.uuid4().hex for _ in range(2)]
    long = fields(max_tokens=400, ignore_eos=True)
    with (
        served.stream(long | {"stream": True}, request_id=names[0]) as streamed,
        served.stream(long, request_id=names[1]) as whole,
        served.stream(LONG | {"stream": True}, SSD.name) as nameless,
    ):
        next(streamed)
        next(nameless)
        while served.llm.status().running < 3:
            time.sleep(0.01)
        served.stop("")
        served.stop("nobody has this id")
        for name, responses in zip(names, (streamed, whole)):
            served.stop(name)
            last = list(responses)[-1]
            assert last["finish_reason"][0, 0] == b"cancelled"
            assert 0 < last["num_output_tokens"][0, 0] < 400
        deadline = time.monotonic() + 20
        while served.llm.status().running > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        next(nameless)
        assert served.llm.status().running == 1, "a request without an id is nobody's to cancel"
    served.until_idle()

    def stop() -> None:
        while not served.llm.status().running:
            time.sleep(0.01)
        assert served.post("generate_stream", {"id": names[0], "stop": True}, SSD.name) == (200, [])

    ask = long | {"stream": True, "id": names[0]}
    (status, events), _ = at_once([lambda: served.post("generate_stream", ask), stop])
    assert (status, events[-1]["finish_reason"]) == (200, "cancelled")
    served.until_idle()


def as_nvidias_client_asks(served: Served, values: dict[str, Any], outputs: list[str]) -> list[Any]:
    """All results of one request over a stream of its own, which is closed as soon as it is sent."""
    inputs = []
    for name, value in values.items():
        inputs.append(grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    results, errors = [], []
    with grpc.InferenceServerClient(f"127.0.0.1:{served.server.grpc_port}") as client:
        client.start_stream(callback=lambda result, error: errors.append(error) if error else results.append(result))
        wanted = [grpc.InferRequestedOutput(name) for name in outputs]
        client.async_stream_infer("ensemble", inputs, outputs=wanted, request_id="1")
        client.stop_stream()
    assert errors == []
    return results


def test_a_client_for_nvidias_ensemble(served: Served) -> None:
    """Tensors as the clients in NVIDIA's TensorRT-LLM backend make them: [1, 1], words as [1, n]; text read at [0]."""
    values = {
        "text_input": np.array([[PROMPT]]).astype(object),
        "max_tokens": np.ones((1, 1), np.int32) * 12,
        "stream": np.array([[True]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[0.8]], np.float32),
        "num_return_sequences": np.array([[1]], np.int32),
        "bad_words": np.array([["owl", ""]], object),
        "stop_words": np.array([[""]], object),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "return_log_probs": np.array([[True]]),
        "return_context_logits": np.array([[False]]),
        "embedding_bias_words": np.array([["sun"]], object),
        "embedding_bias_weights": np.array([[0.5]], np.float32),
        "end_id": np.array([[499]], np.int32),
        "pad_id": np.array([[0]], np.int32),
        "seed": np.array([[7]], np.uint64),
        "exclude_input_in_output": np.array([[False]]),
    }
    asked = ["text_output", "cum_log_probs", "output_log_probs"]
    results = as_nvidias_client_asks(served, values, asked)
    assert len(results) > 1
    assert "".join(result.as_numpy("text_output")[0].decode("utf-8") for result in results)
    assert all(result.as_numpy("output_log_probs").ndim == 3 for result in results)
    # Several answers, which it tells apart by [0][0] of these two.
    several = values | {"num_return_sequences": np.array([[2]], np.int32), "temperature": np.array([[1.0]], np.float32)}
    texts = ["", ""]
    for result in as_nvidias_client_asks(served, several, [*asked, "sequence_index", "batch_index"]):
        assert result.as_numpy("batch_index")[0][0] == 0
        texts[result.as_numpy("sequence_index")[0][0]] += result.as_numpy("text_output")[0].decode("utf-8")
    assert all(texts)
    assert texts[0] != texts[1]
    # The same from the command line, in the words of NVIDIA's guide.
    body = {"text_input": PROMPT, "max_tokens": 5, "bad_words": "", "stop_words": "", "top_k": 1}
    status, answer = served.post("generate", body)
    assert (status, answer["text_output"][: len(PROMPT)]) == (200, PROMPT)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 3}, "missing required input.*text_input"),
        ({"text_input": "a"}, "missing required input.*max_tokens"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"text_input": "a", "max_tokens": 3, "temperatur": 1}, "temperatur is not a field"),
        ({"text_input": "a", "max_tokens": 3, "parameters": {"x": 1}}, "x is not a field"),
        ({"text_input": "a", "max_tokens": 3, "temperature": -1}, "temperature must be between 0"),
        ({"text_input": "a", "max_tokens": 3, "beam_width": 4}, "beam_width must be 1"),
        ({"text_input": "a", "max_tokens": 3, "stop_token_ids": [99999]}, "stop_token_ids names token id 99999"),
        ({"text_input": "a", "max_tokens": 3, "speculation_lookahead": 9}, "speculation_lookahead must be between 1"),
        ({"text_input": "a", "max_tokens": 3, "timeout_s": 0.0}, "timeout_s must be above 0"),
        (
            {
                "text_input": "a",
                "max_tokens": 3,
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": "{",
            },
            "guided_decoding_guide cannot be used",
        ),
        ({"text_input": "a b " * 600, "max_tokens": 3}, "text_input has .* tokens and the context holds 512"),
        ({"text_input": "x" * 10_000_000, "max_tokens": 3}, "text_input must be at most 8192 bytes long, got 10000000"),
        (
            {"text_input": "a", "max_tokens": 3, "stop_words": ["x" * 900] * 65},
            "stop_words must be a list of at most 64",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_fields_are_refused_by_name_and_the_next_request_is_served(
    served: Served, body: dict[str, Any], message: str
) -> None:
    status, answer = served.post("generate", body)
    assert (status, bool(re.search(message, answer.get("error", "")))) == (400, True), answer
    assert len(answer["error"]) < 1200
    assert served.post("generate", {"text_input": "a", "max_tokens": 1})[0] == 200


def test_generate_is_not_for_streams(served: Served) -> None:
    _, answer = served.post("generate", fields(ignore_eos=True, stream=True))
    assert "exactly 1 response, use generate stream" in answer["error"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("text_input", np.array([[b"\xff\xfe"]], object), "text_input must be UTF-8"),
        ("max_tokens", np.array([[3]], np.int64), "'max_tokens' data-type is 'INT64'"),
        ("temperature", np.array([[np.nan]], np.float32), "temperature must be .* got nan"),
        ("temperature", np.array([[1.0, 2.0]], np.float32), "temperature"),
        ("temperature", np.array([[1.0], [2.0]], np.float32), "batch"),
        ("seed", np.array([7], np.uint64), "seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tensors_are_refused_by_name(served: Served, name: str, data: Any, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        served.infer(fields(**{name: data}))


def test_a_full_queue_is_unavailable_and_passes(served: Served) -> None:
    request = fields(max_tokens=16, ignore_eos=True)
    over = [lambda: served.infer(request), lambda: served.post("generate", request)] * (MAX_QUEUE // 2 + 8)
    answers = at_once(over)
    refused = [answer for answer in answers[::2] if isinstance(answer, InferenceServerException)]
    # Triton 24.10 answers any failed `generate` with 400, and a gRPC stream with a message, whatever the error's code.
    refusals = [answer["error"] for status, answer in answers[1::2] if status == 400]
    assert all("the queue is full" in text for text in [*map(str, refused), *refusals])
    assert MAX_QUEUE <= len(over) - len(refused) - len(refusals) < len(over)
    served.until_idle()
    assert served.post("generate", fields())[0] == 200


def check_fuzzed(served: Served, some: dict[str, Any]) -> None:
    """Whatever is asked of `ssd` is answered or refused by name, never with an internal error."""
    some = {name: value for name, value in some.items() if name != "stop"}
    some["max_tokens"] = min(some["max_tokens"], 2)
    try:
        responses = served.infer(some, SSD.name)
    except InferenceServerException as error:
        refusal = str(error)
    else:
        assert responses[-1]["finish_reason"][0, 0] in (b"length", b"stop", b"timeout")
        return
    assert "internal error" not in refusal
    assert "not healthy" not in refusal
    assert any(name in refusal for name in (*(spec.name for spec in SSD.inputs), "prompt", "the queue is full")), (
        refusal
    )


@pytest.mark.parametrize("amount", AMOUNTS)
def test_any_tensors_are_answered_or_refused(served: Served, amount: int) -> None:
    @settings(max_examples=amount, deadline=None)
    @given(fuzzed_fields)
    def fuzz(some: dict[str, Any]) -> None:
        check_fuzzed(served, some)

    fuzz()
    served.until_idle()
    assert served.loop.run(served.server.trouble()) is None


# What Triton 24.10 says of JSON that it cannot make tensors of, always with status 500. All else is the models' to say.
_TRITONS_JSON = re.compile(
    "failed to parse the request JSON buffer: |Unable to parse |Expected JSON object for keyword: |"
    "parameter key .* was not found in the JSON"
)


def check_http(served: Served, body: Mapping[str, Any] | bytes) -> None:
    """Answered, or refused with 400; with 500 only by Triton itself, before any model has seen the request."""
    status, answer = served.post("generate", body)
    if status == 200:
        assert answer["finish_reason"] in ("length", "stop", "timeout")
        return
    assert set(answer) == {"error"}
    if status == 500:
        assert _TRITONS_JSON.match(answer["error"]), answer
    else:
        assert status == 400
        assert "internal error" not in answer["error"]
        assert "not healthy" not in answer["error"]


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=6,
)
_names = st.sampled_from([*(spec.name for spec in ENSEMBLE.inputs), "id", "parameters"]) | st.text(max_size=9)
_SMALL = {"text_input": "a", "max_tokens": 1}


@pytest.mark.parametrize("amount", AMOUNTS)
def test_any_json_is_answered_or_refused(served: Served, amount: int) -> None:
    """Right bodies with a few fields of anything, then bytes of anything in the middle of a right one."""
    start = json.dumps(_SMALL).encode()

    @settings(max_examples=amount // 2, deadline=None)
    @given(st.dictionaries(_names, _json, min_size=1, max_size=3))
    def fields_of_anything(some: dict[str, Any]) -> None:
        few = some["max_tokens"] if isinstance(some.get("max_tokens"), int) else 1
        check_http(served, _SMALL | some | ({"max_tokens": 2} if few > 2 else {}))

    @settings(max_examples=amount - amount // 2, deadline=None)
    @given(st.binary(max_size=100), st.integers(0, len(start)))
    def bytes_of_anything(data: bytes, cut: int) -> None:
        check_http(served, start[:cut] + data + start[cut:])

    fields_of_anything()
    bytes_of_anything()
    served.until_idle()
    assert served.loop.run(served.server.trouble()) is None


# --- the launcher ---------------------------------------------------------------------------------------------------

_MODEL = """
import triton_python_backend_utils as pb
class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    def execute(self, requests):
        return [pb.InferenceResponse([]) for _ in requests]
"""


def _repository(folder: Path, initialize: str) -> Path:
    (folder / "models" / "toy" / "1").mkdir(parents=True)
    (folder / "models" / "toy" / "1" / "model.py").write_text(_MODEL.format(initialize=initialize))
    (folder / "models" / "toy" / "config.pbtxt").write_text(
        'name: "toy" backend: "python" max_batch_size: 0 instance_group [ { kind: KIND_CPU } ]'
    )
    return folder / "models"


def _server(repository: Path) -> TritonServer:
    folder = repository.parent / "triton"
    return TritonServer(repository, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, folder=folder)


def _remains(server: TritonServer) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(server._prefix)]


@pytest.mark.usefixtures("served")
def test_a_model_that_cannot_load_is_reported_with_its_reason(tmp_path: Path) -> None:
    async def run() -> None:
        server = _server(_repository(tmp_path, "raise ValueError('no such engine')"))
        await server.start()
        with pytest.raises(LaunchError, match="tritonserver ended with status 1: .*no such engine"):
            await server.until_ready(60)
        await server.stop()
        await server.stop()
        assert _remains(server) == []

    asyncio.run(run())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tritonserver on PATH, as containers have it; a file that it has been started."""
    executable, options, environment = _installation(tmp_path / "wheel")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tritonserver"
    started = tmp_path / "started"
    libraries = environment.get("LD_LIBRARY_PATH", "")
    command.write_text(
        f'#!/bin/sh\ntouch {started}\nLD_LIBRARY_PATH={libraries} exec {executable} {" ".join(options)} "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return started


@pytest.mark.usefixtures("served")
def test_a_dead_stub_is_noticed_and_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, installed: Path
) -> None:
    async def run() -> None:
        server = _server(_repository(tmp_path, "pass"))
        with pytest.raises(LaunchError, match="has not been started"):
            await server.trouble()
        await server.start()
        while "Started Metrics Service" not in str(server._tail):
            await asyncio.sleep(0.05)
        assert "HTTP Error 404" in (await server.trouble() or ""), "its models are not those of a deployment"
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        while "has died" not in (await server.trouble() or ""):
            await asyncio.sleep(0.05)
        assert not await server.healthy()
        os.kill(server.pid, signal.SIGKILL)
        while "ended with status -9" not in (await server.trouble() or ""):
            await asyncio.sleep(0.05)
        await server.stop()
        assert _remains(server) == []
        assert installed.exists(), "the server on PATH goes before the wheel's"

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_the_server_is_well_and_shows_metrics(served: Served) -> None:
    assert served.loop.run(served.server.trouble()) is None
    assert served.loop.run(served.server.healthy())
    with urllib.request.urlopen(f"http://127.0.0.1:{served.server.metrics_port}/metrics", timeout=30) as answer:
        assert 'nv_inference_request_success{model="ensemble"' in answer.read().decode()


def test_a_shell_that_has_ended_is_no_dead_model(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts some while models load; one of them, not yet waited for, ended a deployment's start."""
    children = [("sh", "Z"), ("triton_python_b", "S")]
    monkeypatch.setattr("saguaro.triton_repo.server._children", lambda pid: iter(children))
    assert served.loop.run(served.server.death()) is None
    children.append(("triton_python_b", "Z"))
    assert "has died" in (served.loop.run(served.server.death()) or "")


def test_a_machine_without_triton_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("saguaro.triton_repo.server.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"no Triton server was found .*saguaro-serving\[serve\]"):
        asyncio.run(_server(tmp_path / "models").start())
