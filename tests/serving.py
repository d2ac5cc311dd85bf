"""A tiny deployment behind the real tritonserver, and clients of it. One of it serves all tests of a session."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from saguaro.llm import LLM
from saguaro.orchestrator.loop_thread import LoopThread
from saguaro.orchestrator.plan import service_socket
from saguaro.orchestrator.service_protocol import Status
from saguaro.triton_repo.repository import write_repository
from saguaro.triton_repo.server import TritonServer
from saguaro.triton_repo.tensors import ENSEMBLE, SSD, TensorSpec

MAX_QUEUE = 16
DEPLOYMENT = f"""
name: served
target: {{recipe: tiny-target, kv_tokens: 4096}}
draft: {{recipe: tiny-draft, kv_tokens: 16384}}
speculation: {{mode: ssd, lookahead: 3, fan_out: {{budget: 8}}}}
serving: {{max_sequences: 4, max_queue: {MAX_QUEUE}}}
"""
_SPECS = {spec.name: spec for model in (ENSEMBLE, SSD) for spec in model.inputs}
_TYPES = {"STRING": "BYTES"}
_ARRAYS: dict[str, Any] = {"STRING": object, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": bool}
PATIENCE = 60.0  # seconds a client waits for anything


@dataclass(frozen=True)
class Served:
    """`llm` is the deployment itself, `server` the Triton in front of it."""

    llm: LLM
    server: TritonServer
    loop: LoopThread

    def post(self, kind: str, body: Mapping[str, Any] | bytes, model: str = "ensemble") -> tuple[int, Any]:
        """Status and JSON of `generate`, or the list of events of `generate_stream`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.server.http_port}/v2/models/{model}/{kind}"
        try:
            with urllib.request.urlopen(url, data, timeout=PATIENCE) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        if kind == "generate":
            return status, json.loads(text)
        return status, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]

    def infer(self, fields: Mapping[str, Any], model: str = "ensemble", request_id: str = "") -> list[dict[str, Any]]:
        """All responses of one gRPC request; raises its InferenceServerException."""
        with self.stream(fields, model, request_id) as responses:
            return list(responses)

    @contextmanager
    def stream(
        self, fields: Mapping[str, Any], model: str = "ensemble", request_id: str = ""
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Responses of one gRPC request as they come; leaving early cancels it, as far as Triton does."""
        arrived: queue.Queue[Any] = queue.Queue()
        with grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}") as client:
            client.start_stream(
                callback=lambda result, error: arrived.put(error or result),
                stream_timeout=2 * PATIENCE,  # closing waits for the server's end of the stream
            )
            inputs = [tensor(name, value) for name, value in fields.items()]
            client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
            try:
                yield _responses(arrived)
            finally:
                client.stop_stream(cancel_requests=True)

    def stop(self, request_id: str) -> None:
        """Cancel a request by its id."""
        assert self.infer({"stop": True}, "ssd", request_id) == []

    def until_idle(self) -> Status:
        """Nothing runs and every block is free again, at the latest a few seconds from now."""
        deadline = time.monotonic() + 20
        while (status := self.llm.status()).running + status.waiting and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (status.running, status.waiting) == (0, 0)
        assert (status.free_target_blocks, status.free_draft_blocks) == (status.target_blocks, status.draft_blocks)
        return status


def array(spec: TensorSpec, value: Any) -> np.ndarray:
    """A field's tensor with its batch dimension."""
    many = value if isinstance(value, list) else [value]
    return np.array([many], dtype=_ARRAYS[spec.dtype])


def tensor(name: str, value: Any) -> grpc.InferInput:
    """A field as a gRPC input; an array is sent as it is, whatever the field should be."""
    spec = _SPECS[name]
    data = value if isinstance(value, np.ndarray) else array(spec, value)
    kinds = {"i": "INT32", "u": "UINT64", "f": "FP32", "b": "BOOL", "O": "BYTES"}
    dtype = kinds[data.dtype.kind] if data.dtype.itemsize != 8 or data.dtype.kind in "uO" else f"{data.dtype}".upper()
    made = grpc.InferInput(name, list(data.shape), {"FLOAT64": "FP64"}.get(dtype, dtype))
    made.set_data_from_numpy(data)
    return made


def text_of(responses: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one answer from the responses of its stream."""
    return "".join(
        part["text_output"][0].decode() for part in responses if part["sequence_index"].reshape(-1)[0] == index
    )


def _responses(arrived: queue.Queue[Any]) -> Iterator[dict[str, Any]]:
    while True:
        item = arrived.get(timeout=PATIENCE)
        if isinstance(item, InferenceServerException):
            raise item
        response = item.get_response()
        if response.outputs:
            yield {output.name: item.as_numpy(output.name) for output in response.outputs}
        if response.parameters["triton_final_response"].bool_param:
            return


@contextmanager
def serve_tiny(folder: Path, llm: LLM) -> Iterator[Served]:
    """A Triton in front of a deployment, up and ready. Raises LaunchError where tritonserver cannot run."""
    launcher = llm._launcher
    engine = Path(launcher._plans["target"].engine)
    write_repository(folder / "models", config=launcher._config, engine=engine, socket=service_socket(launcher.runtime))
    server = TritonServer(
        folder / "models", host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, folder=folder / "triton"
    )
    loop = LoopThread()
    try:
        loop.run(server.start())
        loop.run(server.until_ready(120))
        yield Served(llm, server, loop)
    finally:
        loop.run(server.stop())
        loop.close()


def at_once(work: list[Any]) -> list[Any]:
    """Results of calls made at the same time, each by a thread of its own; an exception is its result."""
    results: list[Any] = [None] * len(work)

    def one(index: int) -> None:
        try:
            results[index] = work[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    return results
