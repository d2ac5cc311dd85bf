"""Streams one answer from Triton over gRPC: python examples/triton_stream.py "Write a haiku." --url localhost:8001"""

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as grpc


def tensor(name: str, value: object, dtype: str) -> grpc.InferInput:
    data = np.array([[value]], dtype=object if dtype == "BYTES" else {"INT32": np.int32, "BOOL": bool}[dtype])
    made = grpc.InferInput(name, [1, 1], dtype)
    made.set_data_from_numpy(data)
    return made


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt")
parser.add_argument("--url", default="localhost:8001")
parser.add_argument("--max-tokens", type=int, default=64)
arguments = parser.parse_args()

responses: queue.Queue = queue.Queue()
chat = json.dumps([{"role": "user", "content": arguments.prompt}])
with grpc.InferenceServerClient(arguments.url) as client:
    client.start_stream(callback=lambda result, error: responses.put(error or result))
    client.async_stream_infer(
        "ensemble",
        [
            tensor("text_input", "", "BYTES"),
            tensor("messages", chat, "BYTES"),
            tensor("max_tokens", arguments.max_tokens, "INT32"),
            tensor("stream", True, "BOOL"),
        ],
        enable_empty_final_response=True,
    )
    while True:
        response = responses.get(timeout=600)
        if isinstance(response, Exception):
            raise response
        if response.as_numpy("text_output") is not None:
            print(response.as_numpy("text_output")[0].decode(), end="", flush=True)
        if response.get_response().parameters["triton_final_response"].bool_param:
            break
print()
