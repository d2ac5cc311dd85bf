"""The attention kernel on a GPU, checked and then timed beside others: `python tests/gpu/fan_out.py --out FILE`.

Prints one table, writes one JSON, takes less than 4 minutes: what the time does not allow is named as skipped. Exits
with 1 when a case is wrong. `--cpu` runs the first part through Triton's interpreter.

Times are medians of CUDA graph replays. A graph goes through many layers with a KV pool each, as a model does, so that
nothing is read from the cache that a model would read from memory. Bandwidth counts every key and value once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when the language is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_cases import Case, fan_out_case, random_case
from gpu_timing import LIMIT_S, copy_ceiling, device_ms, seconds_left
from masks import mask_of
from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import RowTensors
from saguaro.plugins.triton_lang import Workspace, launch
from saguaro.plugins.variant import Variant

BLOCK_SIZE, LOOKAHEAD, DEPTH = 16, 7, 3
# (query heads, KV heads, head dim): Llama-3.2-1B and Qwen3-0.6B, the drafts of the paper's pairs.
MODELS = ((32, 8, 64), (16, 8, 128))
# Recompiled for every shape, which takes seconds.
FLEX_SHAPES = ((1, 16, 4096), (4, 16, 4096), (8, 32, 4096))


def variant_for(query: Tensor, keys: Tensor, rows: RowTensors, **options: float) -> Variant:
    scale = query.shape[-1] ** -0.5
    return Variant(query.dtype, *query.shape[1:2], *keys.shape[2:], keys.shape[1], scale, rows.most_rows, **options)


def run(case: Case, splits: int, device: str) -> Tensor:
    """The kernel's output for a case made on the CPU, on the CPU. Whatever it leaves unwritten is NaN."""
    rows = RowTensors.of(case.rows, case.tables, case.mask, device)
    moved = case.to(device)
    options = {"splits": splits, "window": case.window, "soft_cap": case.soft_cap}
    variant = variant_for(moved.query, moved.keys, rows, **options)
    output = torch.full_like(moved.query, torch.nan)
    launch(variant, rows, moved.query, moved.keys, moved.values, output, Workspace.of(variant, len(output), device))
    return output.cpu()


def wrong_cases(cases: int, device: str) -> list[str]:
    """Random batches whose error is above FlashAttention's rule; stops when half of the time is gone."""
    wrong = []
    for seed in range(cases):
        if seconds_left() < LIMIT_S / 2:
            wrong.append(f"only {seed} of {cases} cases in the time allowed")
            break
        # The interpreter does not multiply bfloat16.
        case = random_case(seed, **({} if device == "cuda" else {"dtype": (torch.float16, torch.float32)[seed % 2]}))
        splits = (1, 2, 4, 8, 16, 32)[seed % 6]
        try:
            excess = case.excess(run(case, splits, device))
        except AssertionError:
            excess = float("inf")
        if excess > 0:
            wrong.append(f"seed {seed}, {case.query.dtype}, {splits} splits: {excess:.1e} above the bound")
    return wrong


def graph_is_wrong() -> list[str]:
    """One captured step, replayed at other depths and prefixes through its small tensors alone."""
    counts, wrong = [(3, 0, 2), (1, 1, 4)], []
    cases = [fan_out_case(counts, p, d, head_dim=64, dtype=torch.bfloat16) for p, d in (([5, 90], 0), ([70, 200], 2))]
    inputs = [(case.to("cuda"), RowTensors.of(case.rows, case.tables, case.mask, "cuda")) for case in cases]
    large, large_rows = inputs[1]
    query, keys, values = (torch.zeros_like(t) for t in (large.query, large.keys, large.values))
    rows = RowTensors.of(cases[1].rows, cases[1].tables, cases[1].mask, "cuda")
    variant = variant_for(query, keys, rows, splits=4)
    output, workspace = torch.empty_like(query), Workspace.of(variant, len(query), "cuda")
    graph = capture(lambda: launch(variant, rows, query, keys, values, output, workspace))
    for case, (moved, new) in zip(cases, inputs, strict=True):
        query.copy_(moved.query)
        keys[: len(moved.keys)] = moved.keys
        values[: len(moved.values)] = moved.values
        rows.block_table[:, : new.block_table.shape[1]] = new.block_table
        for name in ("sequences", "fork", "branch"):
            getattr(rows, name).copy_(getattr(new, name))
        output.fill_(torch.nan)
        graph.replay()
        if case.excess(output.cpu()) > 0:
            wrong.append(f"graph replay at depth {case.mask.depth}: above the bound")
    return wrong


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(step: Callable[[], object]) -> float:
    """Median time of a step, replayed from a graph."""
    return device_ms(capture(step).replay)


@dataclass(frozen=True)
class Result:
    heads: tuple[int, int, int]  # query heads, KV heads, head dim
    batch: int
    branches: int
    prefix: int
    splits: int
    us: dict[str, float | str]  # microseconds of one layer, or why there are none
    bandwidth: float  # of the kernel, as a part of the copy ceiling


@dataclass(frozen=True)
class Step:
    """One branch-decoding step of a batch of equal sequences over the KV pools of many layers."""

    mask: FanOutMask
    rows: RowTensors
    tables: list[list[int]]
    query: Tensor
    pools: list[tuple[Tensor, Tensor]]  # keys and values of each layer

    @staticmethod
    def of(heads: tuple[int, int, int], batch: int, branches: int, prefix: int) -> Step:
        counts = tuple(branches // (LOOKAHEAD + 1) for _ in range(LOOKAHEAD + 1))
        mask = mask_of([counts] * batch, [prefix] * batch, DEPTH)
        width = -(-(prefix + LOOKAHEAD + 1 + branches * (DEPTH + 1)) // BLOCK_SIZE)
        tables = [list(range(s * width, (s + 1) * width)) for s in range(batch)]
        rows = RowTensors.of([branches] * batch, tables, mask, "cuda")
        shape = (batch * width, BLOCK_SIZE, heads[1], heads[2])
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        size = 4 * torch.Size(shape).numel()
        layers = min(64, max(4, 2**29 // size))  # half a gigabyte: far more than any cache
        pools = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(layers)]
        query = torch.randn(batch * branches, heads[0], heads[2], **options)
        return Step(mask, rows, tables, query, pools)

    @property
    def columns(self) -> int:
        return len(self.tables[0]) * BLOCK_SIZE

    def sequences(self, pool: Tensor) -> Tensor:
        """[B, KV heads, columns, D]: tables lie in order, so the pool is read in place."""
        return pool.view(len(self.tables), self.columns, *pool.shape[2:]).transpose(1, 2)

    def queries(self) -> Tensor:
        return self.query.view(len(self.tables), -1, *self.query.shape[1:]).transpose(1, 2)

    def kernel(self) -> tuple[Callable[[], object], int, Tensor]:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        variant = variant_for(self.query, self.pools[0][0], self.rows)
        variant = variant.split_for(len(self.tables), self.rows.most_columns, processors)
        output, workspace = torch.empty_like(self.query), Workspace.of(variant, len(self.query), "cuda")

        def step() -> None:
            for keys, values in self.pools:
                launch(variant, self.rows, self.query, keys, values, output, workspace)

        return step, variant.splits, output

    def dense(self) -> Callable[[], Tensor]:
        """PyTorch's attention under a stored mask, which is made before and not timed."""
        mask = self.mask.dense(self.columns).view(len(self.tables), 1, -1, self.columns).cuda()

        def step() -> Tensor:
            for keys, values in self.pools:
                output = scaled_dot_product_attention(
                    self.queries(), self.sequences(keys), self.sequences(values), attn_mask=mask, enable_gqa=True
                )
            return output.transpose(1, 2).reshape(self.query.shape)

        return step

    def flex(self) -> Callable[[], Tensor]:
        """PyTorch's flex attention with the same predicate; its block mask is made before and not timed."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        prefix, trunk, branches = (int(t[0]) for t in (self.mask.prefix, self.mask.trunk, self.mask.branches))
        fork = self.mask.fork[:branches].cuda()

        def visible(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            own = column - prefix - trunk
            inside = (own >= 0) & (own % branches == row) & (own // branches <= DEPTH)
            return (column < prefix + fork[row] + 1) | inside

        block_mask = create_block_mask(visible, None, None, branches, self.columns, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)

        def step() -> Tensor:
            for keys, values in self.pools:
                output = compiled(
                    self.queries(),
                    self.sequences(keys),
                    self.sequences(values),
                    block_mask=block_mask,
                    enable_gqa=True,
                )
            return output.transpose(1, 2).reshape(self.query.shape)

        return step

    def flashinfer(self) -> Callable[[], Tensor]:
        """FlashInfer's paged prefill with a custom mask, planned before and not timed."""
        import flashinfer

        batch, branches = len(self.tables), len(self.query) // len(self.tables)
        blocks = len(self.tables[0])
        steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"), "NHD"
        )
        wrapper.plan(
            steps * branches,
            steps * blocks,
            torch.tensor(self.tables, dtype=torch.int32, device="cuda").flatten(),
            torch.full((batch,), BLOCK_SIZE, dtype=torch.int32, device="cuda"),
            self.query.shape[1],
            self.pools[0][0].shape[2],
            self.query.shape[2],
            BLOCK_SIZE,
            custom_mask=self.mask.dense(self.columns).flatten().cuda(),
            q_data_type=self.query.dtype,
        )

        def step() -> Tensor:
            for pools in self.pools:
                output = wrapper.run(self.query, pools)
            return output

        return step


def measure(heads: tuple[int, int, int], batch: int, branches: int, prefix: int, ceiling: float) -> Result:
    step = Step.of(heads, batch, branches, prefix)
    kernel, splits, output = step.kernel()
    per_layer = 1000 / len(step.pools)
    us: dict[str, float | str] = {"kernel": per_layer * milliseconds(kernel)}
    others = {"dense": step.dense, "flex": step.flex, "flashinfer": step.flashinfer}
    for name, make in others.items():
        if name == "flashinfer" and not find_spec("flashinfer"):
            us[name] = "not installed"
        elif name == "flex" and (batch, branches, prefix) not in FLEX_SHAPES:
            us[name] = "-"
        elif seconds_left() < 40:
            us[name] = "skipped: time"
        else:
            other = make()
            difference = float((other().float() - output.float()).abs().max())
            us[name] = per_layer * milliseconds(other) if difference < 0.02 else f"differs by {difference:.2f}"
    used = prefix + LOOKAHEAD + 1 + branches * (DEPTH + 1)
    read = 2 * 2 * batch * used * heads[1] * heads[2]  # keys and values of two bytes
    return Result(heads, batch, branches, prefix, splits, us, read / (float(us["kernel"]) / 1e6) / ceiling)


def table(results: list[Result], ceiling: float) -> str:
    """The results as a table in markdown."""
    names = ("kernel", "dense", "flex", "flashinfer")
    lines = [
        f"Copy ceiling {ceiling / 1e9:.0f} GB/s. Microseconds of one layer, bfloat16, K = {LOOKAHEAD}, depth {DEPTH}.",
        "",
        f"| heads | B | ΣF | prefix | splits | {' | '.join(names)} | kernel's bandwidth / ceiling |",
        "|" + "--:|" * (6 + len(names)),
    ]
    for r in results:
        times = [f"{t:.1f}" if isinstance(t, float) else t for t in (r.us[name] for name in names)]
        shape = "/".join(map(str, r.heads))
        cells = [shape, r.batch, r.branches, r.prefix, r.splits, *times, f"{r.bandwidth:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="The attention kernel: checked, then timed.")
    parser.add_argument("--cpu", action="store_true", help="only check, in Triton's interpreter")
    parser.add_argument("--cases", type=int, default=300, help="random batches to check")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of what was found")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device; --cpu checks the kernel in Triton's interpreter")
    device = "cpu" if options.cpu else "cuda"
    wrong = wrong_cases(options.cases, device)
    results: list[Result] = []
    report = {"device": device, "torch": torch.__version__, "cases": options.cases, "wrong": wrong}
    if not options.cpu:
        report["device"] = torch.cuda.get_device_name()
        wrong += graph_is_wrong()
        report["copy_ceiling_bytes_per_s"] = ceiling = copy_ceiling()
        for heads, batch, branches, prefix in product(MODELS, (1, 4, 8), (8, 16, 32), (128, 1024, 4096)):
            if seconds_left() < 10:
                report["skipped"] = f"everything after {len(results)} shapes, for lack of time"
                break
            results.append(measure(heads, batch, branches, prefix, ceiling))
        sys.stdout.write(table(results, ceiling))
    report["results"] = [asdict(result) for result in results]
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"{options.cases} random batches on {report['device']}: {len(wrong)} wrong\n")
    sys.stdout.writelines(f"  {line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
