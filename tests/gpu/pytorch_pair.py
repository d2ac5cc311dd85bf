"""The pytorch engine with target and draft on one GPU: compared, then timed: `python tests/gpu/pytorch_pair.py`.

Tiny random models in float32 and bfloat16: logits of the GPU, by single launches and by graphs, against the CPU's; a
pair of them with equal tokens in the modes ar, sd and ssd; all of it while torch makes every hidden wait for the device
an error. Then the forward of a model of the shape of Llama-3.2-1B, with and without graphs.

Prints one JSON, takes less than 4 minutes: what the time does not allow is named as skipped. Exits with 1 when
something is wrong. `--device cpu` compares on the tests' stand-in for CUDA and times nothing.

NCCL, which tensor-parallel ranks use, is not in it: it refuses two ranks on one GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import LlamaForCausalLM

from cuda_stand_in import Stream, engine_on
from gpu_timing import LIMIT_S, host_ms, llama_1b, seconds_left
from harness import Pair
from saguaro.engines.base import ForwardBatch, causal_batch
from saguaro.engines.cuda import Cuda
from saguaro.engines.pytorch import PytorchEngine
from saguaro.orchestrator.types import Mode, SamplingParams
from saguaro.plugins.transfers import to_host
from shrinking_batches import shrinking_batches
from tiny_models import tiny_model

SIZES = {"vocab_size": 500, "max_model_len": 128, "block_size": 4, "num_blocks": 512}
# Of the largest logit: what a GPU's kernels may differ by from the CPU's float32, and graphs from single launches.
TOLERANCES = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.1, 0.05)}
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")


def engine(model: Any, device: str, *, graphs: bool, **sizes: int) -> PytorchEngine:
    if device == "cpu":
        return engine_on(Stream(), model, graphs=graphs, **sizes)
    cuda = Cuda(torch.device("cuda", 0))
    return PytorchEngine(model.to(cuda.device), cuda=cuda, graphs=graphs, **sizes)


@contextmanager
def no_hidden_waits(device: str) -> Iterator[None]:
    """`to_host` waits for an event, which is allowed."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Right ----------------------------------------------------------------------------------------------------------------


def logits_differ_by(dtype: torch.dtype, device: str, seeds: int) -> dict[str, float]:
    """Greatest differences, in parts of the greatest logit: launches from the CPU, and graphs from launches."""
    model = tiny_model("qwen3", dtype)
    reference = PytorchEngine(copy.deepcopy(model).float(), **SIZES)
    launched, graphs = (engine(copy.deepcopy(model), device, graphs=on, **SIZES) for on in (False, True))
    blocks = random.Random(1).sample(range(SIZES["num_blocks"]), 64)
    tables = [blocks[i * 16 : (i + 1) * 16] for i in range(4)]
    found = {"launches from the CPU": 0.0, "graphs from launches": 0.0}
    for seed in range(seeds):
        for batch in shrinking_batches(seed, tables, SIZES["vocab_size"], SIZES["block_size"]):
            expected = reference.forward(batch).logits
            with no_hidden_waits(device):
                one, other = (to_host(each.forward(batch).logits)[0] for each in (launched, graphs))
            scale = float(expected.abs().max())
            for name, difference in (("launches from the CPU", one - expected), ("graphs from launches", other - one)):
                # Not `max` alone, which drops what is not a number.
                largest = float(difference.abs().max()) / scale
                found[name] = largest if not largest <= found[name] else found[name]
    return found


def noisy(model: Any) -> Any:
    """A draft that is often right."""
    generator = torch.Generator().manual_seed(9)
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std()
        parameter.data = (parameter.float() + 0.03 * noise).to(parameter.dtype)
    return draft


def tokens_by_mode(dtype: torch.dtype, device: str, temperature: float, length: int) -> dict[Mode, list[list[int]]]:
    """What three requests in one batch get, of different lengths, so that the batch shrinks."""
    model = tiny_model("qwen3", dtype)
    target, draft = (engine(each, device, graphs=True, **SIZES) for each in (copy.deepcopy(model), noisy(model)))
    texts: dict[Mode, list[list[int]]] = {}
    with no_hidden_waits(device):
        for mode in MODES:
            pair = Pair(target, draft)
            requests = [
                pair.sequence(
                    [3 + n, 1, 4], SamplingParams(max_tokens=length - 5 * n, temperature=temperature, seed=n), mode
                )
                for n in range(3)
            ]
            texts[mode] = pair.finish(requests)
    return texts


def check(device: str, seeds: int, length: int) -> tuple[dict[str, Any], list[str]]:
    """What was found, and what of it is wrong."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for dtype, allowed in TOLERANCES.items():
        name = str(dtype).removeprefix("torch.")
        found[name] = differences = logits_differ_by(dtype, device, seeds)
        wrong += [
            f"{name}: {what} differ by {value:.1e}, {limit:.0e} is allowed"
            for (what, value), limit in zip(differences.items(), allowed, strict=True)
            if not value <= limit
        ]
        for temperature in (0.0, 1.0):
            texts = tokens_by_mode(dtype, device, temperature, length)
            others = [mode for mode in MODES if texts[mode] != texts["ar"]]
            found[name][f"modes unlike ar at temperature {temperature:g}"] = others
            # In bfloat16 two tokens may be closer than what the shape of a forward changes.
            if others and dtype == torch.float32:
                wrong.append(f"{name}: at temperature {temperature:g} {' and '.join(others)} gave other tokens than ar")
    return found, wrong


# Fast -----------------------------------------------------------------------------------------------------------------


def run_to_its_end(engine: PytorchEngine, batch: ForwardBatch) -> None:
    engine.forward(batch)
    torch.cuda.synchronize()


def measure() -> list[dict[str, float | str]]:
    """Forwards of 1 to 64 rows behind 1,000 tokens, by launches and by graphs; and what reading the logits takes."""
    with torch.device("cuda"):
        model = LlamaForCausalLM(llama_1b(4096)).to(torch.bfloat16).eval()
    sizes = {"vocab_size": 128256, "max_model_len": 4096, "block_size": 16, "num_blocks": 1024}
    engines = {name: engine(model, "cuda", graphs=name == "graphs", **sizes) for name in ("launches", "graphs")}
    results: list[dict[str, float | str]] = []
    for rows in (1, 4, 8, 16, 64):
        if seconds_left() < 20:
            results.append({"rows": rows, "skipped": "time"})
            continue
        batch = causal_batch([range(rows)], [1000], [range(80)], [rows], 16)
        result: dict[str, float | str] = {"rows": rows}
        for name, each in engines.items():
            result[f"{name}_ms"] = host_ms(lambda each=each, batch=batch: run_to_its_end(each, batch))
        logits = engines["graphs"].forward(batch).logits
        result["read_ms"] = host_ms(lambda logits=logits: to_host(logits))
        results.append(result)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The pytorch engine on one GPU: checked, then timed.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only check, on a stand-in")
    parser.add_argument("--seeds", type=int, default=20, help="random batches to compare")
    parser.add_argument("--tokens", type=int, default=40, help="of the longest text of the pair")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu checks on the tests' stand-in for one")
    found, wrong = check(options.device, options.seeds, options.tokens)
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "found": found,
        "wrong": wrong,
        "times": measure() if on_gpu else [],
        "seconds": round(LIMIT_S - seconds_left(), 1),
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
