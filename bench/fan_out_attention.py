"""Fan-out attention on the CPU beside what it replaces: `python -m saguaro.bench.fan_out_attention`.

First one layer, then all layers of a forward of few rows, each with a pool of its own, so that keys and values come
from memory as they do behind megabytes of weights. Times are processor time, so that waiting for a busy machine does
not count, and include what has to be made before the first layer can run: the plan, or the mask. In every repetition
each method runs once; medians and ratios of medians are reported. Memory is the most that a method holds at once beside
its inputs, as the allocator saw it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from saguaro.bench.speed_command import about
from saguaro.engines.base import fan_out_batch
from saguaro.plugins.attention import Plan, fan_out_attention, plan_attention
from saguaro.plugins.cpp_attention import plan_cpp
from saguaro.plugins.fan_out import FanOut
from saguaro.plugins.fan_out_mask import FanOutMask


@dataclass(frozen=True)
class Model:
    """What of a model its attention depends on."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def pool(self, blocks: int, generator: torch.Generator) -> Tensor:
        return torch.randn(blocks, BLOCK_SIZE, self.kv_heads, self.head_dim, generator=generator)


# The embedded default, which computes in float32 on the CPU.
DRAFT = Model("Qwen2.5-Coder 0.5B", 24, 14, 2, 64)
TARGET = Model("Qwen2.5-Coder 1.5B", 28, 12, 2, 128)
HEADS, KV_HEADS, HEAD_DIM, SCALE = DRAFT.heads, DRAFT.kv_heads, DRAFT.head_dim, DRAFT.scale
PLANS: dict[str, Callable[..., Plan]] = {"torch": plan_attention, "cpp": plan_cpp}
BLOCK_SIZE = 16
LOOKAHEAD, DEPTH = 7, 3
COMMAND = "python -m saguaro.bench.fan_out_attention"


@dataclass(frozen=True)
class Step:
    """One branch-decoding step of a batch of equal sequences."""

    mask: FanOutMask
    rows: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    query: Tensor  # [N, H, D]
    keys: Tensor  # [blocks, BLOCK_SIZE, KV heads, D]
    values: Tensor

    @staticmethod
    def of(batch: int, branches: int, prefix: int, scattered: bool = False, model: Model = DRAFT) -> Step:
        counts = [branches // (LOOKAHEAD + 1)] * (LOOKAHEAD + 1)
        for k in range(branches % (LOOKAHEAD + 1)):
            counts[k] += 1
        fan_out = FanOut(tuple(counts))
        width = -(-(prefix + LOOKAHEAD + 1 + branches * (DEPTH + 1)) // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(batch * width, generator=generator) if scattered else torch.arange(batch * width)
        tables = [table.tolist() for table in order.view(batch, width)]
        tokens = torch.zeros(batch * branches, dtype=torch.int64)
        made = fan_out_batch(tokens, [fan_out] * batch, [prefix] * batch, tables, DEPTH, BLOCK_SIZE)
        if made.fan_out is None:
            raise ValueError("a branch-decoding step has a fan-out")
        keys, values = (model.pool(batch * width, generator) for _ in range(2))
        query = torch.randn(batch * branches, model.heads, model.head_dim, generator=generator)
        return Step(made.fan_out, made.rows, made.block_tables, query, keys, values)

    def fan_out(self) -> Tensor:
        """The plugin's path through PyTorch's kernels."""
        plan = plan_attention(self.rows, self.tables, BLOCK_SIZE, len(self.keys), self.mask)
        return fan_out_attention(self.query, self.keys, self.values, plan, SCALE)

    def cpp(self) -> Tensor:
        """The kernel in C++."""
        plan = plan_cpp(self.rows, self.tables, BLOCK_SIZE, len(self.keys), self.mask)
        return plan.attend(self.query, self.keys, self.values, SCALE)

    def dense(self) -> Tensor:
        """PyTorch's fused attention under a stored mask. Blocks lie in order: it reads the pool in place."""
        batch = len(self.rows)
        columns = len(self.tables[0]) * BLOCK_SIZE
        mask = self.mask.dense(columns).view(batch, 1, -1, columns)
        query = self.query.view(batch, -1, HEADS, HEAD_DIM).transpose(1, 2)
        keys, values = (p.view(batch, columns, KV_HEADS, HEAD_DIM).transpose(1, 2) for p in (self.keys, self.values))
        output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True)
        return output.transpose(1, 2).reshape(self.query.shape)

    def per_branch(self) -> Tensor:
        """Branches as sequences of their own under PyTorch's fused attention: what an engine without a fan-out does.

        They share the prefix in place. Costs as much as in such an engine, but reads other columns: only its time
        is looked at.
        """
        batch = len(self.rows)
        keys, values = (p.view(batch, -1, KV_HEADS, HEAD_DIM).transpose(1, 2) for p in (self.keys, self.values))
        outputs = []
        rows = zip(self.query, self.mask.sequence.tolist(), (self.mask.positions + 1).tolist(), strict=True)
        for query, s, length in rows:
            own = keys[s : s + 1, :, :length], values[s : s + 1, :, :length]
            outputs.append(scaled_dot_product_attention(query[None, :, None], *own, scale=SCALE, enable_gqa=True))
        return torch.cat(outputs)

    def per_branch_paged(self) -> Tensor:
        """The same in the plugin's own causal path, over block tables."""
        tables = [table for table, count in zip(self.tables, self.rows, strict=True) for _ in range(count)]
        rows = [1] * len(self.query)
        plan = plan_attention(rows, tables, BLOCK_SIZE, len(self.keys), self.mask.positions)
        return fan_out_attention(self.query, self.keys, self.values, plan, SCALE)


@dataclass(frozen=True)
class Result:
    """Times in milliseconds, memory in KiB."""

    batch: int
    branches: int
    prefix: int
    times: dict[str, float]
    memory: dict[str, float]

    def slower(self, method: str) -> float:
        """Time of another method over that of the fan-out."""
        return self.times[method] / self.times["fan_out"]

    def products(self, rate: float) -> float:
        """Milliseconds that the two products over the prefix take at `rate` operations a millisecond."""
        return 4 * self.batch * self.branches * HEADS * HEAD_DIM * self.prefix / rate


def measure(batch: int, branches: int, prefix: int, repetitions: int) -> Result:
    """Raises ArithmeticError when the methods disagree: a figure of a wrong method means nothing."""
    step, scattered = (Step.of(batch, branches, prefix, scattered) for scattered in (False, True))
    for name, output in (("PyTorch's", step.fan_out()), ("the C++", step.cpp())):
        difference = float((output - step.dense()).abs().max())
        if difference > 1e-4:
            raise ArithmeticError(f"fan-out by {name} kernels and dense-mask attention differ by {difference}")
    methods: dict[str, Callable[[], Tensor]] = {
        "fan_out": step.fan_out,
        "cpp": step.cpp,
        "scattered": scattered.fan_out,
        "cpp_scattered": scattered.cpp,
        "dense": step.dense,
        "per_branch": step.per_branch,
        "per_branch_paged": step.per_branch_paged,
        "one_branch": Step.of(batch, 1, prefix).fan_out,
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repetitions):
        for name, method in methods.items():
            start = time.process_time()
            method()
            times[name].append(1000 * (time.process_time() - start))
    return Result(
        batch,
        branches,
        prefix,
        {name: statistics.median(values) for name, values in times.items()},
        {name: peak_memory(method) / 1024 for name, method in methods.items()},
    )


@dataclass(frozen=True)
class Forward:
    """The attention of a model's layers, plan included, in milliseconds."""

    model: str
    layers: int
    fan_out: bool  # or causal
    rows: int
    columns: int  # before the rows
    times: dict[str, float]


def measure_forward(model: Model, fan_out: bool, rows: int, columns: int, repetitions: int) -> Forward:
    """One sequence, whose blocks lie anywhere. Raises ArithmeticError when the ways disagree."""
    step = Step.of(1, rows, columns, scattered=True, model=model)
    mask = step.mask if fan_out else torch.arange(columns, columns + rows)
    generator = torch.Generator().manual_seed(1)
    pools = [[model.pool(len(step.keys), generator) for _ in range(2)] for _ in range(model.layers)]
    times: dict[str, list[float]] = {name: [] for name in PLANS}
    outputs = {}
    for _ in range(repetitions):
        for name, plan in PLANS.items():
            start = time.process_time()
            planned = plan(step.rows, step.tables, BLOCK_SIZE, len(step.keys), mask)
            for keys, values in pools:
                outputs[name] = planned.attend(step.query, keys, values, model.scale)
            times[name].append(1000 * (time.process_time() - start))
    difference = float((outputs["torch"] - outputs["cpp"]).abs().max())
    if difference > 1e-4:
        raise ArithmeticError(f"attention by PyTorch's and by the C++ kernels differ by {difference}")
    return Forward(
        model.name, model.layers, fan_out, rows, columns, {name: statistics.median(times[name]) for name in times}
    )


def products_rate(size: int = 1024) -> float:
    """Floating point operations a millisecond of a large matrix product: what no attention can exceed."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(7):
        start = time.process_time()
        torch.mm(left, right)
        times.append(1000 * (time.process_time() - start))
    return float(2 * size**3 / min(times))


def peak_memory(method: Callable[[], Tensor]) -> int:
    """Most bytes held at once, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        method()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def table(results: list[Result], forwards: list[Forward], command: str, where: str, rate: float) -> str:
    """The results as a page."""
    lines = [
        "# Fan-out attention on the CPU",
        "",
        f"`{command}`, {where}.",
        "",
        "## One layer",
        "",
        f"Float32, {HEADS} heads on {KV_HEADS} KV heads of {HEAD_DIM}, K = {LOOKAHEAD}, depth {DEPTH}, "
        f"blocks of {BLOCK_SIZE}. Milliseconds of processor time (medians) and KiB held beside the inputs.",
        "*fan-out*: the plugin's path through PyTorch's kernels, plan included, blocks in order; *C++*: its own kernel",
        "instead; *scattered*: the same with blocks in random order. *dense*: PyTorch's fused attention with a stored",
        "mask, mask included, blocks in order. *per branch*: every branch a sequence of its own, PyTorch's fused",
        "attention; *paged*: the same in the plugin's causal path.",
        "*ΣF = 1*: the fan-out with one branch. *products*: both products over the prefix at the "
        f"{rate / 1e6:.0f} GFLOP/s of a large",
        "matrix product measured in the same run: nothing that computes in float32 can be faster.",
        "",
        "| B | ΣF | prefix | fan-out | C++ | scattered | C++ scattered | dense | per branch | paged | ΣF = 1 "
        "| products | fan-out / C++ | dense / fan-out | per branch / fan-out | paged / fan-out | fan-out / ΣF=1 "
        "| KiB fan-out | KiB dense |",
        "|" + "--:|" * 19,
    ]
    for r in results:
        t, m = r.times, r.memory
        cells = [r.batch, r.branches, r.prefix, *(f"{t[name]:.2f}" for name in t)]
        cells += [f"{r.products(rate):.2f}", f"{1 / r.slower('cpp'):.2f}"]
        cells += [f"{r.slower(name):.2f}" for name in ("dense", "per_branch", "per_branch_paged")]
        cells += [f"{1 / r.slower('one_branch'):.2f}", f"{m['fan_out']:.0f}", f"{m['dense']:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "## All layers of a forward",
        "",
        "One sequence, blocks in random order, each layer with a pool of its own, so that keys and values come from",
        "memory as they do in a forward. *columns*: those before the rows, which are a trunk (causal) or a fan-out at",
        f"depth {DEPTH}. Plan included. Prompts, whose rows are many, have one layer here.",
        "",
        "| model | layers | rows | of a | columns | PyTorch | C++ | PyTorch / C++ |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for f in forwards:
        kind = "fan-out" if f.fan_out else "trunk" if f.columns else "prompt"
        cells = [f.model, f.layers, f.rows, kind, f.columns]
        cells += [f"{time:.2f}" for time in f.times.values()]
        cells += [f"{f.times['torch'] / f.times['cpp']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Fan-out attention on the CPU beside dense-mask attention.")
    parser.add_argument("--out", type=Path, required=True, help="folder for fan_out_attention_cpu.json and .md")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--branches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--prefix", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 9], help="of a forward")
    parser.add_argument("--columns", type=int, nargs="+", default=[200, 1000, 4000], help="before them")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 300, 1000, 4000], help="their rows")
    parser.add_argument("--note", default="", help="what else there is to say of the machine")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        rate = products_rate()
        results = [
            measure(batch, branches, prefix, options.repetitions)
            for batch, branches, prefix in product(options.batch, options.branches, options.prefix)
        ]
        forwards = [
            measure_forward(model, fan_out, rows, columns, options.repetitions)
            for model, fan_out, rows, columns in product((DRAFT, TARGET), (False, True), options.rows, options.columns)
        ]
        forwards += [
            measure_forward(replace(model, layers=1), False, rows, 0, options.repetitions)
            for model, rows in product((DRAFT, TARGET), options.prompts)
        ]
    machine = about("")["machine"]
    where = f"PyTorch {torch.__version__}, {torch.get_num_threads()} of {machine['cores']} cores, {machine['cpu']}"
    where += f" ({options.note})" if options.note else ""
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} {COMMAND} {shlex.join(arguments)}"
    page = table(results, forwards, command, where, rate)
    (options.out / "fan_out_attention_cpu.md").write_text(page)
    record = {
        "command": command,
        "where": where,
        "products_flop_per_ms": rate,
        "results": [asdict(result) for result in results],
        "forwards": [asdict(forward) for forward in forwards],
    }
    (options.out / "fan_out_attention_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
