"""The draft's TensorRT engine on a GPU: compared, then timed: `python tests/gpu/tensorrt_draft.py --out FILE`.

Small models in float32 are built as `saguaro build` does, and compared with the pytorch engine. Then a model of the
shape of Llama-3.2-1B with random weights in bfloat16 is compiled, and its graphs are timed beside the time that reading
the weights takes. Prints one table, writes one JSON, takes less than 4 minutes: what the time does not allow is named
as skipped. Exits with 1 when something is wrong. `--cpu` compares on the tests' stand-ins for TensorRT and CUDA.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM

from gpu_timing import copy_ceiling, device_ms, host_ms, llama_1b, seconds_left
from saguaro.build.recipe import Recipe, TensorrtOptions, Tiny
from saguaro.build.tiny import TinyWeights
from saguaro.engines import load_engine
from saguaro.engines.base import Engine, ForwardBatch, causal_batch, fan_out_batch
from saguaro.errors import SaguaroError
from saguaro.plugins.fan_out import FanOut

TOLERANCE = 2e-3  # of float32 logits that a GPU's kernels sum in another order
FAMILIES = ("llama", "qwen3")
LOOKAHEAD = 7
VOCABULARY, KEPT = 128256, 32768


# Right ----------------------------------------------------------------------------------------------------------------


def rounds(seed: int, vocab_size: int) -> Iterator[ForwardBatch]:
    """Prompts, one of one token, trunks and branches at three depths: in graphs and without, in one part and more."""
    draw = random.Random(seed)
    blocks = draw.sample(range(120), 60)
    tables, lengths, lookahead = [blocks[:40], blocks[40:]], [40, 3], 3
    fan_outs = [FanOut((3, 0, 2, 4)), FanOut((1, 2, 0, 1))]

    def tokens(count: int) -> list[int]:
        return draw.choices(range(vocab_size), k=count)

    yield causal_batch([tokens(n) for n in lengths], [0, 0], tables, [1, 0], 4)
    yield causal_batch([tokens(1)], [lengths[1]], tables[1:], [1], 4)
    yield causal_batch([tokens(lookahead + 1) for _ in lengths], lengths, tables, [lookahead + 1] * 2, 4)
    for depth in range(3):
        ids = torch.tensor(tokens(sum(fan_out.branches for fan_out in fan_outs)))
        yield fan_out_batch(ids, fan_outs, lengths, tables, depth, 4)


def built(tiny: Tiny, engine: str, folder: Path) -> Engine:
    """The engine of a recipe, through its directory."""
    from saguaro.build.pytorch import PytorchBuild
    from saguaro.build.tensorrt import TensorrtBuild

    options = TensorrtOptions(
        2, max_rows=32, usual_rows=8, block_size=4, max_kv_tokens=480, branch_columns=96, splits=2
    )
    recipe = Recipe(engine, engine, tiny=tiny, dtype="float32", tensorrt=options if engine == "tensorrt" else None)
    directory = folder / engine
    directory.mkdir(parents=True)
    weights = TinyWeights(tiny)
    if engine == "tensorrt":
        TensorrtBuild(recipe, weights).write(directory, "0" * 64, lambda size: None)
    else:
        PytorchBuild(recipe, weights).write(directory, "0" * 64, lambda size: None)
    return load_engine(directory, block_size=4, num_blocks=120)


def wrong_logits(family: Any) -> list[str]:
    """Forwards whose logits are not the pytorch engine's."""
    tiny = Tiny(family, layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=400, max_model_len=128)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        found, reference = (built(tiny, engine, Path(folder)) for engine in ("tensorrt", "pytorch"))
        for repetition in range(2):  # the second replays over what the first left
            for step, batch in enumerate(rounds(repetition, tiny.vocab_size)):
                logits, expected = found.forward(batch).logits.cpu(), reference.forward(batch).logits
                difference = float((logits - expected).abs().max()) if logits.numel() else 0.0
                if not difference <= TOLERANCE:
                    wrong.append(f"{family}, round {repetition}, forward {step}: logits differ by {difference:.1e}")
    return wrong


@contextmanager
def stand_ins() -> Iterator[None]:
    """TensorRT and CUDA as the tests have them."""
    from tensorrt_stub import load_tensorrt

    trt = load_tensorrt()
    from saguaro.build import tensorrt as build
    from saguaro.engines.tensorrt import engine
    from tensorrt_network import Builder
    from tensorrt_runtime import Runtime, Stream

    with ExitStack() as stack:
        for module, name, stand_in in (
            (trt, "Builder", Builder),
            (trt, "Runtime", Runtime),
            (engine, "Cuda", lambda device: Stream()),
            (build, "Cuda", Stream),
            (torch.cuda, "is_available", lambda: True),
        ):
            stack.enter_context(patch.object(module, name, stand_in))
        yield


# Fast -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Medians in microseconds."""

    head: int  # token ids the head computes
    batch: int
    branches: int  # of each sequence
    prefix: int
    replay: float  # the graph alone
    forward: float  # with everything the host does, until the logits are there
    floor: float  # weights and KV once, at the speed of a large copy


def large_model() -> Any:
    """Llama-3.2-1B's shape, random weights in bfloat16 on the host."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(llama_1b(8192), dtype=torch.bfloat16)
    return model.cpu().eval().requires_grad_(False)


def large_engine(model: Any, kept: list[int] | None) -> tuple[Any, dict[str, float]]:
    """The engine, and the seconds it took to build and to load."""
    import tensorrt as trt

    from saguaro.build.tensorrt import compile_network
    from saguaro.engines.cuda import Cuda
    from saguaro.engines.tensorrt.engine import TensorrtEngine
    from saguaro.engines.tensorrt.log import Log
    from saguaro.engines.tensorrt.network import DraftNetwork, Limits

    cuda, log = Cuda(), Log()
    started = time.monotonic()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    draft = DraftNetwork(
        network,
        model,
        vocab_size=VOCABULARY,
        max_model_len=8192,
        block_size=16,
        capability=int(cuda.capability.replace(".", "")),
        usual_rows=32,
        splits=8,
        kept=kept,
    )
    limits = Limits(max_sequences=8, max_rows=256, usual_rows=32, max_blocks=4096, table_width=576)
    plan = compile_network(builder, network, draft, limits)
    seconds = {"build": time.monotonic() - started}
    started = time.monotonic()
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        raise SaguaroError("TensorRT cannot read what it has built; its log says why")
    made = TensorrtEngine(engine, vocab_size=VOCABULARY, max_model_len=8192, num_blocks=4096, cuda=cuda)
    return made, seconds | {"load": time.monotonic() - started}


def measure(engine: Any, head: int, batch: int, branches: int, prefix: int, ceiling: float) -> Result:
    width = -(-(prefix + LOOKAHEAD + 1 + branches * LOOKAHEAD) // 16)
    tables = [list(range(s * width, (s + 1) * width)) for s in range(batch)]
    fan_out = FanOut((branches // (LOOKAHEAD + 1),) * (LOOKAHEAD + 1))
    step = fan_out_batch(torch.ones(batch * branches).long(), [fan_out] * batch, [prefix] * batch, tables, 3, 16)

    def forward() -> None:
        engine.forward(step)
        torch.cuda.synchronize()

    bucket = next(bucket for bucket in engine._buckets if bucket.rows >= batch * branches)
    layers = 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192
    read = 2 * (16 * layers + 2048 * head) + 2 * 2 * 16 * 8 * 64 * batch * prefix
    with engine._cuda.on_stream():
        replay = device_ms(bucket._replay, 30)
    return Result(head, batch, branches, prefix, 1e3 * replay, 1e3 * host_ms(forward, 30), 1e6 * read / ceiling)


def table(results: list[Result]) -> str:
    """The results as a table in markdown."""
    lines = [
        "Llama-3.2-1B's shape, bfloat16, one branch-decoding step. Medians in microseconds; floor: weights and KV read",
        "once at the speed of a large copy.",
        "",
        "| head | B | ΣF | prefix | graph | forward | floor | graph / floor |",
        "|" + "--:|" * 8,
    ]
    for r in results:
        cells = [r.head, r.batch, r.branches, r.prefix, f"{r.replay:.0f}", f"{r.forward:.0f}", f"{r.floor:.0f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{r.replay / r.floor:.2f}"])) + " |")
    return "\n".join(lines) + "\n"


def timed() -> dict[str, Any]:
    ceiling = copy_ceiling()
    model = large_model()
    results: list[Result] = []
    report: dict[str, Any] = {"copy_ceiling_bytes_per_s": ceiling, "seconds": {}, "skipped": []}
    for head in (VOCABULARY, KEPT):
        if head != VOCABULARY and seconds_left() < 1.5 * report["seconds"][str(VOCABULARY)]["build"] + 20:
            report["skipped"].append(f"a head of {head} tokens, for lack of time")
            continue
        engine, report["seconds"][str(head)] = large_engine(model, None if head == VOCABULARY else list(range(head)))
        for batch, branches, prefix in ((1, 8, 1024), (1, 16, 4096), (1, 32, 4096), (4, 16, 1024), (8, 32, 1024)):
            results.append(measure(engine, head, batch, branches, prefix, ceiling))
        del engine
        torch.cuda.empty_cache()
    sys.stdout.write(table(results))
    return report | {"results": [asdict(result) for result in results]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The draft's TensorRT engine: checked, then timed.")
    parser.add_argument("--cpu", action="store_true", help="only check, on stand-ins for TensorRT and CUDA")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of what was found")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device; --cpu checks the engine's loop on stand-ins for TensorRT and CUDA")
    report: dict[str, Any] = {"device": "cpu" if options.cpu else torch.cuda.get_device_name()}
    wrong: list[str] = []
    for family in FAMILIES:
        if options.cpu:
            with stand_ins():
                wrong += wrong_logits(family)
        else:
            wrong += wrong_logits(family)
    report["wrong"] = wrong
    if not options.cpu:
        report |= timed()
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"{', '.join(FAMILIES)} on {report['device']}: {len(wrong)} forwards wrong\n")
    sys.stdout.writelines(f"  {line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
