"""The pytorch engine on the CPU, in int8 and bfloat16, beside Hugging Face: `python -m saguaro.bench.cpu_engine`.

Speed: one token after another from the same prompt, by Hugging Face's eager `generate` in bfloat16 and by the engine in
bfloat16 and int8; and, in turns with the int8 steps, a plain pass of the int8 kernel over the same weights: what no
engine on this kernel can be faster than. Accuracy: both texts of `accuracy.yaml` in one forward, int8 against bfloat16.

Times are processor time, so that waiting for a busy machine does not count. One model is in memory at a time. What is
measured in runs of its own, speed, accuracy or one model of several, comes together in one JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LogitsProcessorList

from saguaro.build.driver import build
from saguaro.build.recipe import find_recipe
from saguaro.cache import cache_folder
from saguaro.engines.base import causal_batch
from saguaro.engines.checkpoint import load_config, load_model, weights_file
from saguaro.engines.int8 import Int8Linear
from saguaro.engines.kv_pool import require_memory
from saguaro.engines.manifest import TOKENIZER, Dtype, Manifest
from saguaro.engines.pytorch import PytorchEngine, convert, memory_needed

COMMAND = "python -m saguaro.bench.cpu_engine"
BLOCK_SIZE = 16
TABLE = tuple(range(128))
PROMPT = 16  # tokens before the first that is timed: emulated bfloat16 takes seconds for each
ROWS = (4, 8)  # of the forwards beside those of one row: verifications


@dataclass(frozen=True)
class Speed:
    """Medians in milliseconds: of a token, and of forwards and passes by their number of rows."""

    weights: int  # of the linear layers, output head included
    hugging_face: float
    bfloat16: dict[int, float]
    int8: dict[int, float]
    plain: dict[int, float]


@dataclass(frozen=True)
class Accuracy:
    """Of int8 on one text, each token after those before it."""

    tokens: int
    agreement: float  # share of places where int8 and bfloat16 have the same best token
    perplexity_bfloat16: float
    perplexity_int8: float


Timed = dict[int, list[float]]  # milliseconds by number of rows


class Subject:
    """An engine directory's model, computed with the layers of a dtype."""

    def __init__(self, directory: Path, dtype: Dtype) -> None:
        manifest = replace(Manifest.load(directory), dtype=dtype)
        needed = memory_needed(directory, manifest, block_size=BLOCK_SIZE, num_blocks=len(TABLE))
        require_memory(needed, f"the model in {dtype}", torch.device("cpu"))
        self.model = stored_model(directory)
        convert(self.model, dtype)
        self._engine = PytorchEngine(
            self.model,
            vocab_size=manifest.vocab_size,
            max_model_len=manifest.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=len(TABLE),
        )

    def logits(self, ids: Sequence[int], start: int = 0, wanted: int = 1) -> Tensor:
        """[wanted, vocab_size] of the last of these tokens, the first of which is at position `start`."""
        return self._engine.forward(causal_batch([ids], [start], [TABLE], [wanted], BLOCK_SIZE)).logits

    def time(
        self, prompt: Sequence[int], steps: int, plain: Callable[[int], None] | None = None
    ) -> tuple[Timed, Timed]:
        """Times of greedy steps, then of forwards of ROWS; and of a plain pass of as many rows after each of them."""
        own: Timed = {rows: [] for rows in (1, *ROWS)}
        beside: Timed = {rows: [] for rows in (1, *ROWS)}
        ids = [int(self.logits(prompt).argmax())]
        for rows in own:
            for _ in range(steps if rows == 1 else max(1, steps // 4)):
                start = time.process_time()
                best = self.logits((ids * rows)[-rows:], len(prompt) + len(ids) - 1, rows).argmax(-1)
                own[rows].append(1000 * (time.process_time() - start))
                ids.append(int(best[0]))
                if plain:
                    start = time.process_time()
                    plain(rows)
                    beside[rows].append(1000 * (time.process_time() - start))
        return own, beside


def stored_model(directory: Path) -> Any:
    config = load_config(directory, Manifest.load(directory).max_model_len)
    return load_model(directory / weights_file(0, 1), config, torch.bfloat16)


def time_hugging_face(directory: Path, prompt: Sequence[int], steps: int) -> list[float]:
    """Of each token but the first."""
    model = stored_model(directory)
    model.set_attn_implementation("eager")
    ends = []

    def clock(ids: Tensor, scores: Tensor) -> Tensor:
        ends.append(time.process_time())
        return scores

    ids = torch.tensor([prompt])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=steps + 1,
        max_new_tokens=steps + 1,
        logits_processor=LogitsProcessorList([clock]),
        pad_token_id=0,
    )
    return [1000 * (end - start) for start, end in zip(ends, ends[1:])]


def plain_pass(linears: Sequence[Int8Linear]) -> Callable[[int], None]:
    """The int8 kernel over all weights, one layer after another, on given rows."""
    inputs = {rows: [torch.rand(rows, linear.in_features) * 2 - 1 for linear in linears] for rows in (1, *ROWS)}

    def run(rows: int) -> None:
        for linear, x in zip(linears, inputs[rows], strict=True):
            linear.product(x)

    return run


def compare(ids: Sequence[int], bfloat16: Tensor, int8: Tensor) -> Accuracy:
    """Logits [N, vocab_size] of all rows of the text in either dtype."""
    targets = torch.tensor(ids[1:])
    perplexities = [math.exp(cross_entropy(logits[:-1], targets)) for logits in (bfloat16, int8)]
    agreement = (bfloat16.argmax(-1) == int8.argmax(-1)).double().mean()
    return Accuracy(len(ids), float(agreement), *perplexities)


def measure_speed(directory: Path, texts: Mapping[str, Sequence[int]], steps: int) -> Speed:
    prompt = texts["prose"][:PROMPT]
    hugging_face = time_hugging_face(directory, prompt, max(2, steps // 4))
    bfloat16, _ = Subject(directory, "bfloat16").time(prompt, steps)
    gc.collect()
    subject = Subject(directory, "int8")
    linears = [module for module in subject.model.modules() if isinstance(module, Int8Linear)]
    int8, plain = subject.time(prompt, steps, plain_pass(linears))
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    return Speed(weights, statistics.median(hugging_face), medians(bfloat16), medians(int8), medians(plain))


def measure_accuracy(directory: Path, texts: Mapping[str, Sequence[int]]) -> dict[str, Accuracy]:
    def logits(dtype: Dtype) -> dict[str, Tensor]:
        subject = Subject(directory, dtype)
        return {kind: subject.logits(ids, wanted=len(ids)) for kind, ids in texts.items()}

    expected = logits("bfloat16")
    gc.collect()
    found = logits("int8")
    return {kind: compare(ids, expected[kind], found[kind]) for kind, ids in texts.items()}


def medians(times: Timed) -> dict[int, float]:
    return {rows: statistics.median(values) for rows, values in times.items()}


def read_texts() -> dict[str, str]:
    """The texts that accuracy is measured on, by kind."""
    texts: dict[str, str] = yaml.safe_load(files("saguaro.bench").joinpath("accuracy.yaml").read_text())
    return texts


def speed_table(recipe: str, speed: Speed) -> str:
    lines = [
        "| model | rows | Hugging Face bf16 | bf16 | int8 | plain int8 pass | Hugging Face / int8 | int8 / plain |",
        "|---|" + "--:|" * 7,
    ]
    for rows, int8 in speed.int8.items():
        first = rows == 1
        cells = [recipe if first else "", str(rows), f"{speed.hugging_face:.1f}" if first else ""]
        cells += [f"{times[rows]:.1f}" for times in (speed.bfloat16, speed.int8, speed.plain)]
        cells += [f"{speed.hugging_face / int8:.2f}" if first else "", f"{int8 / speed.plain[rows]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def accuracy_table(recipe: str, accuracy: Mapping[str, Accuracy]) -> str:
    lines = [
        "| model | text | tokens | same best token | perplexity bf16 | perplexity int8 |",
        "|---|---|" + "--:|" * 4,
    ]
    for kind, a in accuracy.items():
        perplexities = f"{a.perplexity_bfloat16:.2f} | {a.perplexity_int8:.2f}"
        lines.append(f"| {recipe} | {kind} | {a.tokens} | {a.agreement:.1%} | {perplexities} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="The pytorch engine in int8 beside bfloat16, on one thread.")
    parser.add_argument("what", choices=("speed", "accuracy"))
    parser.add_argument("--out", type=Path, required=True, help="folder for cpu_engine.json")
    parser.add_argument("--recipes", nargs="+", default=["qwen2.5-coder-1.5b-int8-cpu", "qwen2.5-coder-0.5b-cpu"])
    parser.add_argument("--steps", type=int, default=24, help="tokens that are timed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cpu_engine.json"
    for name in options.recipes:
        recipe = find_recipe(name)
        directory = build(recipe, cache_folder())
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
        texts = {kind: tokenizer.encode(text, add_special_tokens=False).ids for kind, text in read_texts().items()}
        result: dict[str, Any] = {
            "command": f"{COMMAND} {' '.join(arguments)}",
            "where": f"PyTorch {torch.__version__}, 1 thread, {torch.backends.cpu.get_cpu_capability()}, "
            f"VNNI {torch.cpu._is_vnni_supported()}, {platform.machine()}",
        }
        if options.what == "speed":
            speed = measure_speed(directory, texts, options.steps)
            result |= asdict(speed)
            page = speed_table(recipe.name, speed)
        else:
            accuracy = measure_accuracy(directory, texts)
            result |= {kind: asdict(of_text) for kind, of_text in accuracy.items()}
            page = accuracy_table(recipe.name, accuracy)
        record = json.loads(path.read_text()) if path.exists() else {}
        record.setdefault(options.what, {})[recipe.name] = result
        path.write_text(json.dumps(record, indent=1) + "\n")
        sys.stdout.write(page + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
