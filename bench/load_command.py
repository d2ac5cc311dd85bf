"""What `saguaro load` does."""

from __future__ import annotations

import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import saguaro
from saguaro.bench.load import LoadPlan, LoadPoint, read_prompts, run_load, shipped_prompts, write_results
from saguaro.bench.perf_analyzer import VERSION, perf_analyzer
from saguaro.errors import ConfigError
from saguaro.llm import build_engines
from saguaro.orchestrator.config import read_deployment
from saguaro.orchestrator.prompts import encode_prompt, load_tokenizer
from saguaro.orchestrator.types import MODES, Mode
from saguaro.supervisor.control import status

_HEADS = {
    "requests_per_second": "req/s",
    "tokens_per_second": "tok/s",
    "rate": "arrivals/s",
    "concurrency": "in flight",
}


def load(
    name: str | None, store: Path, *, out: Path, prompts: Path | None, as_json: bool, modes: list[Mode], **plan: Any
) -> None:
    """Load a served deployment, print a table and write JSON, CSV and plot into `out`. Raises SaguaroError."""
    state = status(name)
    if state.mode is None or state.status not in ("ok", "degraded"):
        raise ConfigError(f"{state.name} is {state.status}: look at `saguaro status {state.name}`")
    allowed = MODES[: MODES.index(state.mode) + 1]
    if too_much := [mode for mode in modes if mode not in allowed]:
        raise ConfigError(
            f"{state.name} runs {state.mode} now, which rules out {', '.join(too_much)}: leave it out of --modes"
        )
    levels: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plan.items()}
    texts = read_prompts(prompts) if prompts else shipped_prompts()
    wanted = LoadPlan(prompts=texts, modes=tuple(modes) or allowed, **levels)
    path = Path(state.deployment)
    target, _ = build_engines(read_deployment(path), path, store)
    tokenizer = load_tokenizer(target)

    def encode(text: str) -> list[int]:
        return encode_prompt(tokenizer, [{"role": "user", "content": text}])

    points: list[LoadPoint] = []
    console = Console(stderr=True)
    with console.status("") as line:
        running = run_load(
            wanted,
            tool=perf_analyzer(store),
            http=state.addresses["http"].removeprefix("http://").partition("/")[0],
            grpc=state.addresses["grpc"],
            encode=encode,
            progress=line.update,
        )
        points.extend(running)
    about = {
        "deployment": state.name,
        "machine": platform.machine(),
        "version": saguaro.__version__,
        "perf_analyzer": VERSION,
    }
    write_results(out, wanted, points, **about)
    if as_json:
        Console().print_json(data=[asdict(point) for point in points])
    else:
        table = Console()
        if not table.is_terminal:
            table.width = 140  # in a file nothing says how wide it is
        table.print(_table(points))
        console.print(f"written to {out}")


def _table(points: list[LoadPoint]) -> Table:
    """Columns without any figure are left out."""
    columns = [field.name for field in fields(LoadPoint) if any(getattr(p, field.name) is not None for p in points)]
    table = Table(caption="times in milliseconds")
    for name in columns:
        table.add_column(
            _HEADS.get(name, name.replace("_", " ")), justify="left" if name in ("route", "mode") else "right"
        )
    for point in points:
        values = [getattr(point, name) for name in columns]
        table.add_row(*("" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in values))
    return table
