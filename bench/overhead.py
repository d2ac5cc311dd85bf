"""What Triton adds to the latency of a request: the ensemble over gRPC beside the service's own client.

python -m saguaro.bench.overhead [NAME] --out FILE        (of a served deployment; needs nothing else to be running)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from rich.console import Console

from saguaro.bench.load import shipped_prompts
from saguaro.errors import LinkError
from saguaro.llm import build_engines
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import read_deployment
from saguaro.orchestrator.plan import service_socket
from saguaro.orchestrator.prompts import encode_prompt, load_tokenizer
from saguaro.orchestrator.types import SamplingParams
from saguaro.supervisor.control import status
from saguaro.supervisor.state import RunState

_PATIENCE = 600.0  # seconds for a response


def through_client(socket: Path, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Seconds from sending a request to its last token, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    async def run() -> tuple[float, list[int]]:
        client = Client(socket)
        await client.status()  # connected, as the server's is
        start = time.perf_counter()
        async with aclosing(client.stream(prompt, params)) as events:
            tokens = [token async for event in events for token in event.tokens]
        seconds = time.perf_counter() - start
        await client.close()
        return seconds, tokens

    return asyncio.run(run())


def through_triton(address: str, text: str, max_tokens: int) -> tuple[float, list[int]]:
    """The same through the ensemble, as a stream."""
    chat = json.dumps([{"role": "user", "content": text}])
    fields: dict[str, tuple[Any, type, str]] = {
        "text_input": ("", object, "BYTES"),
        "messages": (chat, object, "BYTES"),
        "max_tokens": (max_tokens, np.int32, "INT32"),
        "stream": (True, bool, "BOOL"),
        "ignore_eos": (True, bool, "BOOL"),
    }
    inputs = []
    for name, (value, kind, dtype) in fields.items():
        inputs.append(grpc.InferInput(name, [1, 1], dtype))
        inputs[-1].set_data_from_numpy(np.array([[value]], dtype=kind))
    arrived: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: arrived.put(error or result))
        start = time.perf_counter()
        client.async_stream_infer("ensemble", inputs)
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            result = arrived.get(timeout=_PATIENCE)
            if isinstance(result, Exception):
                raise LinkError(f"Triton refused the request: {result}")
            tokens += result.as_numpy("output_ids").reshape(-1).tolist()
        return time.perf_counter() - start, tokens


def measure(state: RunState, store: Path, max_tokens: int, prompts: int) -> list[dict[str, Any]]:
    """Both ways one after the other for each prompt, in turns, after one answer that puts it into the prefix cache."""
    path = Path(state.deployment)
    target, _ = build_engines(read_deployment(path), path, store)
    tokenizer = load_tokenizer(target)
    (runtime,) = Path(state.folder).glob("saguaro-*")  # the launcher's
    runs = []
    for number, text in enumerate(shipped_prompts()[:prompts]):
        ids = encode_prompt(tokenizer, [{"role": "user", "content": text}])
        ways = {
            "client": partial(through_client, service_socket(runtime), ids, max_tokens),
            "triton": partial(through_triton, state.addresses["grpc"], text, max_tokens),
        }
        ways["client"]()
        order = list(ways) if number % 2 else list(reversed(ways))
        results = {way: ways[way]() for way in order}
        if results["client"][1] != results["triton"][1]:
            raise LinkError(f"the two ways gave different tokens for {text!r}")
        runs.append({"prompt": text} | {way: round(seconds, 4) for way, (seconds, _) in results.items()})
    return runs


def main() -> None:
    from saguaro.cache import cache_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    state = status(arguments.name)
    runs = measure(state, cache_folder(), arguments.max_tokens, arguments.prompts)
    ratio = statistics.median(run["triton"] / run["client"] for run in runs)
    result = {
        "deployment": state.name,
        "max_tokens": arguments.max_tokens,
        "median_ratio": round(ratio, 4),  # of the latencies: above 1 where Triton takes longer
        "tokens_per_second": {
            way: round(arguments.max_tokens / statistics.median(run[way] for run in runs), 2)
            for way in ("client", "triton")
        },
        "runs": runs,
    }
    Console().print_json(data=result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
