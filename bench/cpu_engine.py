"""The pytorch engine on the CPU, quantised and in bfloat16, beside Hugging Face: `python -m saguaro.bench.cpu_engine`.

Speed: one token after another from the same prompt, by Hugging Face's eager `generate` in bfloat16 and by the engine in
bfloat16, int8 and int4; and after each quantised step a plain pass of its kernel over the same weights: what no engine
on this kernel can be faster than. Accuracy: both texts of `accuracy.yaml` in one forward, beside bfloat16.

Times are processor time, so that waiting for a busy machine does not count. Quantised models take turns; else one is in
memory at a time. What is measured in runs of its own, speed, accuracy or one model of several, comes together in one
JSON.
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
from functools import partial
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
from saguaro.engines.kv_pool import require_memory
from saguaro.engines.manifest import QUANTISED, TOKENIZER, Dtype, Manifest
from saguaro.engines.pytorch import PytorchEngine, convert, memory_needed
from saguaro.engines.quantised import QuantisedLinear

COMMAND = "python -m saguaro.bench.cpu_engine"
BLOCK_SIZE = 16
TABLE = tuple(range(128))
PROMPT = 16  # tokens before the first that is timed: emulated bfloat16 takes seconds for each
ROWS = (4, 8)  # of the forwards beside those of one row: verifications


Times = dict[Dtype, dict[int, float]]  # medians in milliseconds by dtype and number of rows


@dataclass(frozen=True)
class Speed:
    """Of a token, and of forwards and passes by their number of rows."""

    weights: int  # of the linear layers, output head included
    hugging_face: float  # milliseconds, median
    engine: Times
    plain: Times


@dataclass(frozen=True)
class Accuracy:
    """On one text, each token after those before it, by dtype."""

    tokens: int
    agreement: dict[Dtype, float]  # share of places where it has the best token of bfloat16
    perplexity: dict[Dtype, float]


class Subject:
    """An engine directory's model, computed with the layers of a dtype."""

    def __init__(self, directory: Path, dtype: Dtype) -> None:
        manifest = replace(Manifest.load(directory), dtype=dtype)
        needed = memory_needed(directory, manifest, block_size=BLOCK_SIZE, num_blocks=len(TABLE))
        require_memory(needed, f"the model in {dtype}", torch.device("cpu"))
        model = stored_model(directory)
        convert(model, dtype)
        self.linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
        self._inputs = {
            rows: [torch.rand(rows, linear.in_features) * 2 - 1 for linear in self.linears] for rows in (1, *ROWS)
        }
        self._engine = PytorchEngine(
            model,
            vocab_size=manifest.vocab_size,
            max_model_len=manifest.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=len(TABLE),
        )

    def logits(self, ids: Sequence[int], start: int = 0, wanted: int = 1) -> Tensor:
        """[wanted, vocab_size] of the last of these tokens, the first of which is at position `start`."""
        return self._engine.forward(causal_batch([ids], [start], [TABLE], [wanted], BLOCK_SIZE)).logits

    def step(self, ids: list[int], rows: int) -> None:
        """Append the best token after `ids`, by a forward of the last of them, `rows` times."""
        ids.append(int(self.logits(ids[-1:] * rows, len(ids) - 1, rows)[0].argmax()))

    def plain(self, rows: int) -> None:
        """The kernel over all weights, one layer after another."""
        for linear, x in zip(self.linears, self._inputs[rows], strict=True):
            linear.product(x)


def milliseconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def time_in_turns(subjects: Mapping[Dtype, Subject], prompt: Sequence[int], steps: int) -> tuple[Times, Times]:
    """Of greedy steps, then of forwards of ROWS; and of a plain pass of as many rows after each of them."""
    own: Times = {dtype: {} for dtype in subjects}
    plain: Times = {dtype: {} for dtype in subjects}
    texts = {dtype: [*prompt, int(subject.logits(prompt).argmax())] for dtype, subject in subjects.items()}
    for rows in (1, *ROWS):
        times: dict[Dtype, list[tuple[float, float]]] = {dtype: [] for dtype in subjects}
        for _ in range(steps if rows == 1 else max(1, steps // 4)):
            for dtype, subject in subjects.items():
                step = milliseconds(partial(subject.step, texts[dtype], rows))
                times[dtype].append((step, milliseconds(partial(subject.plain, rows))))
        for dtype, both in times.items():
            own[dtype][rows], plain[dtype][rows] = (statistics.median(values) for values in zip(*both, strict=True))
    return own, plain


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


def compare(ids: Sequence[int], logits: Mapping[Dtype, Tensor]) -> Accuracy:
    """Logits [N, vocab_size] of all rows of the text in every dtype, bfloat16 among them."""
    targets = torch.tensor(ids[1:])
    best = {dtype: rows.argmax(-1) for dtype, rows in logits.items()}
    return Accuracy(
        len(ids),
        {dtype: float((found == best["bfloat16"]).double().mean()) for dtype, found in best.items()},
        {dtype: math.exp(cross_entropy(rows[:-1], targets)) for dtype, rows in logits.items()},
    )


def measure_speed(directory: Path, texts: Mapping[str, Sequence[int]], steps: int, dtypes: Sequence[Dtype]) -> Speed:
    prompt = texts["prose"][:PROMPT]
    hugging_face = time_hugging_face(directory, prompt, max(2, steps // 4))
    bfloat16, _ = time_in_turns({"bfloat16": Subject(directory, "bfloat16")}, prompt, steps)
    gc.collect()
    subjects = {dtype: Subject(directory, dtype) for dtype in dtypes}
    quantised, plain = time_in_turns(subjects, prompt, steps)
    weights = sum(linear.in_features * linear.out_features for linear in subjects[dtypes[0]].linears)
    return Speed(weights, statistics.median(hugging_face), bfloat16 | quantised, plain)


def measure_accuracy(
    directory: Path, texts: Mapping[str, Sequence[int]], dtypes: Sequence[Dtype]
) -> dict[str, Accuracy]:
    logits: dict[str, dict[Dtype, Tensor]] = {kind: {} for kind in texts}
    for dtype in ("bfloat16", *dtypes):
        subject = Subject(directory, dtype)
        for kind, ids in texts.items():
            logits[kind][dtype] = subject.logits(ids, wanted=len(ids))
        del subject
        gc.collect()
    return {kind: compare(ids, logits[kind]) for kind, ids in texts.items()}


def read_texts() -> dict[str, str]:
    """The texts that accuracy is measured on, by kind."""
    texts: dict[str, str] = yaml.safe_load(files("saguaro.bench").joinpath("accuracy.yaml").read_text())
    return texts


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * 2 + ["--:"] * (len(headers) - 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speed_table(recipe: str, speed: Speed) -> str:
    headers = ["model", "rows", "Hugging Face bf16", "bf16"]
    for dtype in speed.plain:
        headers += [dtype, f"plain {dtype} pass", f"Hugging Face / {dtype}", f"{dtype} / plain"]
    lines = []
    for rows, bfloat16 in speed.engine["bfloat16"].items():
        first = rows == 1
        cells = [recipe if first else "", str(rows), f"{speed.hugging_face:.1f}" if first else "", f"{bfloat16:.1f}"]
        for dtype, plain in speed.plain.items():
            own = speed.engine[dtype][rows]
            cells += [f"{own:.1f}", f"{plain[rows]:.1f}", f"{speed.hugging_face / own:.2f}" if first else ""]
            cells.append(f"{own / plain[rows]:.2f}")
        lines.append(cells)
    return table(headers, lines)


def accuracy_table(recipe: str, accuracy: Mapping[str, Accuracy]) -> str:
    lines = [
        [recipe, kind, dtype, str(a.tokens), f"{a.agreement[dtype]:.1%}", f"{perplexity:.2f}"]
        for kind, a in accuracy.items()
        for dtype, perplexity in a.perplexity.items()
    ]
    return table(["model", "text", "dtype", "tokens", "same best token", "perplexity"], lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="The pytorch engine, quantised, beside bfloat16, on one thread.")
    parser.add_argument("what", choices=("speed", "accuracy"))
    parser.add_argument("--out", type=Path, required=True, help="folder for cpu_engine.json")
    parser.add_argument("--recipes", nargs="+", default=["qwen2.5-coder-1.5b-int8-cpu", "qwen2.5-coder-0.5b-cpu"])
    parser.add_argument("--dtypes", nargs="+", choices=QUANTISED, default=list(QUANTISED))
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
            speed = measure_speed(directory, texts, options.steps, options.dtypes)
            result |= asdict(speed)
            page = speed_table(recipe.name, speed)
        else:
            accuracy = measure_accuracy(directory, texts, options.dtypes)
            result |= {kind: asdict(of_text) for kind, of_text in accuracy.items()}
            page = accuracy_table(recipe.name, accuracy)
        record = json.loads(path.read_text()) if path.exists() else {}
        record.setdefault(options.what, {})[recipe.name] = result
        path.write_text(json.dumps(record, indent=1) + "\n")
        sys.stdout.write(page + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
