"""Triton model: what ssd answers in, the same with the log probabilities' tokens as text out."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb

from saguaro.triton_repo.token_text import TokenText


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.text = TokenText(Path(parameters["engine"]["string_value"]) / "tokenizer.json")

    def execute(self, requests):
        return [self.answer({tensor.name(): tensor.as_numpy() for tensor in request.inputs()}) for request in requests]

    def answer(self, inputs):
        raw = inputs.pop("raw_logprobs")
        inputs["token_logprobs"] = np.array([[self.text.to_json(one) for one in raw[0]]], dtype=object)
        inputs["text_output"] = inputs["text_output"].reshape(-1)  # as NVIDIA's: clients read the text at [0]
        return pb.InferenceResponse([pb.Tensor(name, array) for name, array in inputs.items()])
