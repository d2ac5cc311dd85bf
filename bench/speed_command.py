"""What `saguaro bench` does."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

import saguaro
from saguaro.bench import speed_plots
from saguaro.bench.load import read_prompts
from saguaro.bench.speed import (
    Figures,
    Placement,
    Setting,
    SpeedPlan,
    SpeedRun,
    measure,
    medians,
    partings,
    prompts_by_kind,
    ratios,
    timeline,
)
from saguaro.engines.manifest import Manifest
from saguaro.llm import LLM, build_engines
from saguaro.orchestrator.config import DeploymentConfig, find_deployment, read_deployment
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import Auto, Mode

_PAIRS: tuple[tuple[Mode, Mode], ...] = (("ssd", "sd"), ("ssd", "ar"), ("sd", "ar"))
_QUICK: dict[str, Any] = {"sd_lookaheads": (), "batches": (1,), "temperatures": (0.0,), "max_tokens": 16, "repeats": 1}
_HEADS = {
    "tokens_per_second": "tok/s",
    "total_tokens_per_second": "total",
    "tokens_per_second_per_device": "per device",
    "acceptance_length": "accepted",
}


def bench(
    deployment: str,
    store: Path,
    *,
    out: Path,
    prompts: Path | None = None,
    as_json: bool = False,
    quick: bool = False,
    **options: Any,
) -> None:
    """Measure a deployment, print tables, write JSON and plots into `out`. Raises SaguaroError."""
    path = find_deployment(deployment)
    config = read_deployment(path)
    wanted: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if quick:
        wanted |= _QUICK
    texts = {"prompts": read_prompts(prompts)} if prompts else prompts_by_kind(1 if quick else None)
    lookahead = config.speculation.lookahead
    plan = SpeedPlan(texts, 0 if lookahead == "auto" else lookahead, **wanted)
    console = Console(stderr=True)
    with console.status("starting the deployment") as line:
        document, runs, spans = run_plan(config, path, store, plan, line.update)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    drawn = speed_plots.draw(document["runs"], spans, out)
    if as_json:
        Console().print_json(data=document)
        return
    table = Console()
    if not table.is_terminal:
        table.width = 180  # in a file nothing says how wide it is
    table.print(_figures_table(document["runs"]))
    table.print(_ratios_table(document["ratios"]))
    near, other = partings(runs)
    if near or other:
        table.print(f"{near} greedy answers part from plain decoding at a near-tie of the target, {other} elsewhere.")
    if not drawn:
        console.print("no plots: install saguaro-serving[bench]")
    console.print(f"written to {out}")


def run_plan(
    config: DeploymentConfig, path: Path, store: Path, plan: SpeedPlan, progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[SpeedRun], tuple[Span, ...]]:
    """Start a deployment (recipes are relative to its file, `path`), measure it, stop it: what was found, the runs it
    rests on, and the spans of one answer."""
    with ExitStack() as stack:
        llms: dict[Placement, LLM] = {
            placement: stack.enter_context(LLM(placed(config, placement, plan, path), store=store))
            for placement in plan.placements
        }
        runs, sweep = measure(plan, llms, devices_of(config, path, store), progress)
        curves = miss_curves(llms[plan.placements[0]].metrics())
        shown = next((run.setting for run in runs if run.setting.mode == plan.modes[-1]), runs[0].setting)
        progress("one answer with a trace")
        first_text = next(iter(plan.prompts.values()))[0]
        spans = timeline(llms[shown.placement], replace(shown, batch=1), first_text, plan.max_tokens)
    return report(runs, sweep) | {"miss_curves": curves} | about(config.name), runs, spans


def miss_curves(metrics: str) -> list[dict[str, Any]]:
    """The fits c F^-r in a text of metrics: `after` a rejection or full acceptance, by what the speculation was and by
    temperature."""
    curves: dict[tuple[str, ...], dict[str, Any]] = {}
    for family in text_string_to_metric_families(metrics):
        figure = family.name.removeprefix("saguaro_miss_curve_")
        for sample in family.samples if figure != family.name else ():
            curves.setdefault(tuple(sample.labels.values()), dict(sample.labels))[figure] = sample.value
    return list(curves.values())


def report(runs: Sequence[SpeedRun], sweep: Sequence[SpeedRun]) -> dict[str, Any]:
    """`runs`: one object for each setting, medians over all its batches; `ratios`: medians of paired runs."""
    by_setting: dict[Setting, list[SpeedRun]] = {}
    for run in (*sweep, *runs):
        by_setting.setdefault(run.setting, []).append(run)
    chosen = {run.setting for run in runs}
    near, other = partings(runs)
    return {
        "runs": [
            asdict(setting)
            | asdict(medians(group))
            | {
                "swept": setting not in chosen,  # only tried, to find sd's best lookahead
                "repeats": len(group),
                "drafted": _added(run.drafted for run in group),  # by place in the speculation
                "accepted": _added(run.accepted for run in group),
                "speeds": [round(run.figures.tokens_per_second or 0.0, 3) for run in group],
                "kinds": {
                    kind: medians([run for run in group if run.kind == kind]).tokens_per_second
                    for kind in dict.fromkeys(run.kind for run in group)
                },
            }
            for setting, group in by_setting.items()
        ],
        "ratios": [row for group in _comparable(runs) for row in _ratio_rows(group)],
        "greedy_answers_that_part": {"at_a_near_tie": near, "elsewhere": other},
    }


def _added(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(places) for places in zip(*counts, strict=True)]


def about(deployment: str, program: str = "saguaro") -> dict[str, Any]:
    """Where and how it was measured."""
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "").partition(":")[2]
    return {
        "deployment": deployment,
        "machine": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cpu": cpu.strip(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "versions": {"saguaro": saguaro.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
        "command": f"{program} {shlex.join(sys.argv[1:])}",
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def placed(config: DeploymentConfig, placement: Placement, plan: SpeedPlan, path: Path) -> DeploymentConfig:
    """The deployment with room for every batch and lookahead of the plan, on cores of its own or on all of them."""
    cores = tuple(sorted(os.sched_getaffinity(0)))

    def model(part: Any) -> Any:
        recipe = path.parent / part.recipe
        moved = replace(part, recipe=str(recipe) if recipe.is_file() else part.recipe)
        return moved if placement == "own" else replace(moved, cores=cores, threads=len(cores))

    lookahead: int | Auto = max(plan.lookahead, *plan.sd_lookaheads, 1) if plan.lookahead else "auto"
    return replace(
        config,
        target=model(config.target),
        draft=model(config.draft) if config.draft else None,
        speculation=replace(config.speculation, mode=config.speculation.limit, lookahead=lookahead),
        serving=replace(config.serving, max_sequences=max(config.serving.max_sequences, *plan.batches)),
    )


def devices_of(config: DeploymentConfig, path: Path, store: Path) -> dict[Mode, int]:
    """Ranks that each mode needs: the draft's devices count, also where they only draft."""
    target, draft = (Manifest.load(part).tp if part else 0 for part in build_engines(config, path, store))
    return {"ar": target, "sd": target + draft, "ssd": target + draft}


def _comparable(runs: Sequence[SpeedRun]) -> list[list[SpeedRun]]:
    """Runs that differ in their mode only."""
    groups: dict[tuple[object, ...], list[SpeedRun]] = {}
    for run in runs:
        groups.setdefault((run.setting.batch, run.setting.temperature, run.setting.placement), []).append(run)
    return list(groups.values())


def _ratio_rows(group: Sequence[SpeedRun]) -> list[dict[str, Any]]:
    where = asdict(group[0].setting)
    rows = []
    for one, other in _PAIRS:
        if found := ratios(group, one, other):
            quartiles = statistics.quantiles(found, n=4) if len(found) > 1 else [found[0]] * 3
            rows.append(
                {key: where[key] for key in ("batch", "temperature", "placement")}
                | {"ratio": f"{one}/{other}", "median": statistics.median(found)}
                | {"quartiles": [quartiles[0], quartiles[2]], "runs": len(found)}
            )
    return rows


def _figures_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Columns without any figure are left out."""
    figures = [name for name in Figures.__dataclass_fields__ if any(row[name] is not None for row in rows)]
    table = Table(
        title="Medians over prompts and repeats", caption="times in milliseconds, T_p and T_b in verifications"
    )
    for name in ("mode", "K", "batch", "T", "cores"):
        table.add_column(name, justify="left" if name in ("mode", "cores") else "right")
    for name in figures:
        table.add_column(_HEADS.get(name, name.removesuffix("_ms").replace("_", " ")), justify="right")
    for row in rows:
        table.add_row(
            row["mode"] + (" (tried)" if row["swept"] else ""),
            str(row["lookahead"] or ""),
            str(row["batch"]),
            f"{row['temperature']:g}",
            row["placement"],
            *("" if row[name] is None else f"{row[name]:.2f}" for name in figures),
        )
    return table


def _ratios_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Speed-ups, of runs over the same prompts", caption="median, and the middle half of the runs")
    for name in ("batch", "T", "cores", "ratio", "median", "quartiles", "runs"):
        table.add_column(name, justify="left" if name in ("cores", "ratio") else "right")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            str(row["batch"]),
            f"{row['temperature']:g}",
            row["placement"],
            row["ratio"],
            f"{row['median']:.2f}",
            f"{low:.2f} to {high:.2f}",
            str(row["runs"]),
        )
    return table
