"""Triton model, decoupled: requests in, what the deployment's service emits out."""

import json
import logging
from pathlib import Path

import triton_python_backend_utils as pb

from saguaro.triton_repo.decoder import Decoder
from saguaro.triton_repo.metrics import MetricsMirror
from saguaro.triton_repo.request import code_of, message_of

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Sink:
    """The sender of one request's responses."""

    def __init__(self, sender):
        self.sender = sender

    def send(self, outputs, final):
        tensors = [pb.Tensor(name, array) for name, array in outputs.items()]
        self.sender.send(pb.InferenceResponse(tensors), flags=_FINAL if final else 0)

    def finish(self):
        self.sender.send(flags=_FINAL)

    def fail(self, error):
        failure = pb.TritonError(message_of(error), getattr(pb.TritonError, code_of(error)))
        self.sender.send(pb.InferenceResponse(error=failure), flags=_FINAL)

    def is_cancelled(self):
        return self.sender.is_cancelled()


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(format="%(levelname)s saguaro: %(message)s")
        parameters = json.loads(args["model_config"])["parameters"]
        engine, socket, max_model_len = (
            parameters[name]["string_value"] for name in ("engine", "socket", "max_model_len")
        )
        self.decoder = Decoder(Path(engine) / "tokenizer.json", Path(socket), int(max_model_len))
        self.metrics = MetricsMirror(pb)
        self.decoder.run(self.metrics.follow(Path(socket)))

    def execute(self, requests):
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            sink = Sink(request.get_response_sender())
            self.decoder.submit(request.request_id(), inputs, request.parameters(), sink)

    def finalize(self):
        self.decoder.close()
        self.metrics.close()
