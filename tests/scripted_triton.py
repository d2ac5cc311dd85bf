"""A Triton server that does as a test's script says: real gRPC, no model. For what a healthy deployment never does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

Inputs = dict[str, list]
Script = Callable[["ScriptedTriton", str, Inputs], AsyncIterator[dict[str, object]]]


@dataclass
class Refusal(Exception):
    """What a script raises to end a stream as Triton would: an error among the responses, or a gRPC status."""

    details: str
    status: grpc.StatusCode | None = None


def chunk(text: str = "", *, answer: int = 0, tokens: int = 1, end: str = "", logprobs: list | None = None) -> dict:
    """The outputs of a streamed response, as the ensemble has them."""
    return {
        "text_output": [text.encode()],
        "finish_reason": [end.encode()],
        "sequence_index": np.array([answer], np.int32),
        "num_input_tokens": np.array([5], np.int32),
        "output_ids": np.arange(tokens, dtype=np.int32),
        "token_logprobs": [json.dumps(logprobs or []).encode()],
    }


@dataclass
class ScriptedTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`requests` are the ensemble's so far, by request id; a script may wait for `stops[id]`."""

    script: Script
    requests: dict[str, Inputs] = field(default_factory=dict)
    stops: dict[str, asyncio.Event] = field(default_factory=dict)
    dead: bool = False  # requests stay without an answer, as those of a model whose process is gone
    address: str = "127.0.0.1:0"
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Once more after a stop: at the same address."""
        self.server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(self.address)}"
        await self.server.start()

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        assert "triton_grpc_error" not in dict(context.invocation_metadata()), "makes the real one crash"
        async for request in request_iterator:
            stop = self.stops.setdefault(request.id, asyncio.Event())
            if self.dead:
                await asyncio.Event().wait()
            if request.model_name == "ssd":
                stop.set()
                yield _response(request, {})
                continue
            inputs = self.requests[request.id] = _inputs(request)
            try:
                async for outputs in self.script(self, request.id, inputs):
                    yield _response(request, outputs)
            except Refusal as refusal:
                if refusal.status:
                    await context.abort(refusal.status, refusal.details)
                yield service_pb2.ModelStreamInferResponse(error_message=refusal.details)


@asynccontextmanager
async def scripted_triton(script: Script) -> AsyncIterator[ScriptedTriton]:
    triton = ScriptedTriton(script)
    await triton.start()
    try:
        yield triton
    finally:
        await triton.server.stop(None)


def _inputs(request: service_pb2.ModelInferRequest) -> Inputs:
    kinds = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    found: Inputs = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert list(tensor.shape)[0] == 1
        if tensor.datatype == "BYTES":
            texts = []
            while raw:
                size = int.from_bytes(raw[:4], "little")
                texts.append(raw[4 : 4 + size].decode())
                raw = raw[4 + size :]
            found[tensor.name] = texts
        else:
            found[tensor.name] = np.frombuffer(raw, kinds[tensor.datatype]).tolist()
        assert len(found[tensor.name]) == tensor.shape[1]
    return found


def _response(
    request: service_pb2.ModelInferRequest, outputs: dict[str, object]
) -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, values in outputs.items():
        array = np.array(values, dtype=object)[None] if isinstance(values, list) else values[None]
        kind = np_to_triton_dtype(array.dtype)
        response.outputs.add(name=name, datatype=kind, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if kind == "BYTES" else array.tobytes()
        response.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=response)
