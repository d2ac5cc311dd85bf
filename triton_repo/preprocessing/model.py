"""Triton model: text_input or messages in, input_ids out."""

import json
from pathlib import Path

import triton_python_backend_utils as pb

from saguaro.errors import ConfigError
from saguaro.triton_repo.prompt import PromptReader
from saguaro.triton_repo.request import code_of, message_of


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        engine, max_model_len = (parameters[name]["string_value"] for name in ("engine", "max_model_len"))
        self.reader = PromptReader(Path(engine), int(max_model_len))

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            ids = self.reader.read(inputs, request.parameters())
        except ConfigError as error:
            return pb.InferenceResponse(
                error=pb.TritonError(message_of(error), getattr(pb.TritonError, code_of(error)))
            )
        return pb.InferenceResponse([pb.Tensor("input_ids", ids)])
