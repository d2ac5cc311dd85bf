"""The paper's figures (arXiv 2603.03251) from our own runs.

python -m saguaro.bench.figures 3 4 5        (1, 6, 7, 11 and 13 need nothing else to be running)

Each writes figN.json (data, command, machine) and figN.png into `--out`. What takes long, recorded answers and measured
speeds, is kept in `--data` and taken from there by every figure that needs it. `--draw` only draws what is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from saguaro.bench import figure_data as data
from saguaro.bench import figure_plots as plots
from saguaro.bench.figure_sources import LLAMA, QWEN, REAL, Document, Sources, as_plotted, kept
from saguaro.bench.speed_command import about
from saguaro.bench.tune import Times
from saguaro.build.driver import build
from saguaro.build.recipe import find_recipe
from saguaro.cache import cache_folder
from saguaro.engines.profile import Profile
from saguaro.errors import ConfigError, SaguaroError

_LISTED = (4, 4)  # lookahead and budget where lists are compared: with more guesses than positions they hardly differ
_TRADED = (3, 8)  # where C is
_SD_LOOKAHEADS = (2, 4, 6)
_MODELLED_BATCH = 16


# What is in each figure


def _overview(sources: Sources, deployment: str) -> Document:
    bench = sources.bench(deployment)
    means = {row["mode"]: statistics.fmean(row["kinds"].values()) for row in bench["runs"] if not row["swept"]}
    paper = list(data.published(deployment))
    return {
        "traces": sources.speeds(deployment)["traces"],
        "bench": {key: bench[key] for key in ("command", "machine")},
        "mean": means,
        "paper_mean": {mode: statistics.fmean(row[mode] for *_, row in paper) for mode in means},
    }


def _misses(sources: Sources, deployment: str) -> Document:
    lookahead = data.configured(deployment).speculation.max_lookahead
    greedy, sampled = sources.judges(deployment, (0.0, 1.0), data.untimed(lookahead))
    return {
        "curves": [
            data.miss_curve(greedy, "coupled", "random", lookahead),
            data.miss_curve(greedy, "coupled", "ngram", lookahead),
            data.miss_curve(sampled, "ratio", "random", lookahead),
            data.miss_curve(sampled, "coupled", "random", lookahead),
        ]
    }


def _temperatures(sources: Sources, deployment: str, times: Times) -> Document:
    judges = sources.judges(deployment, data.TEMPERATURES, times)
    return {"rows": data.by_temperature(judges, *_LISTED)}


def _trade_off(sources: Sources) -> Document:
    (judge,) = sources.judges(REAL, (1.0,), sources.times)
    return {"rows": data.trade_off(judge, *_TRADED), "example": data.residual_example()}


def _batches(sources: Sources, deployment: str) -> Document:
    rows = [kept(row, "batch", "backup") for row in sources.backups(deployment)]
    lookahead = data.configured(deployment).speculation.max_lookahead
    profiles = _profiles(sources, deployment)
    devices = data.by_devices(*profiles, lookahead, lookahead + 1, _MODELLED_BATCH)
    return {"rows": rows, "batch": _MODELLED_BATCH, "devices": devices}


def _end_to_end(sources: Sources, *deployments: str) -> Document:
    """Speeds by kind of all deployments; the paper's, and those by batch, of the first one."""
    found = sources.speeds(deployments[0])
    return {
        "benches": {name: sources.bench(name) for name in deployments},
        "paper": [{"kind": kind, "set": name} | dict(row) for kind, name, row in data.published(deployments[0])],
        "runs": as_plotted(found["runs"]),
        "ratios": found["ratios"],
    }


def _profiles(sources: Sources, deployment: str) -> tuple[Profile, Profile]:
    """Of target and draft."""
    config = data.configured(deployment)
    assert config.draft is not None
    built = [build(find_recipe(model.recipe), sources.store, progress=False) for model in (config.target, config.draft)]
    target, draft = map(Profile.load, built)
    return target, draft


# The figures


@dataclass(frozen=True)
class PaperFigure:
    title: str
    caption: str  # where the data come from
    deployment: str
    make: Callable[[Sources], Document]
    draw: Callable[[Any, Document], None]
    inches: tuple[float, float] = (9.0, 3.6)


_REPLAYED = f"measured on recorded answers of {REAL}, replayed"
_RUN = "simulated pair, real orchestrator"
_BENCH = f"{_RUN}; bars from bench.md's machine"
FIGURES: dict[int, PaperFigure] = {
    1: PaperFigure("SD and SSD in time", _BENCH, LLAMA, lambda s: _overview(s, LLAMA), plots.timelines_and_bars),
    3: PaperFigure("Misses by fan-out", _REPLAYED, REAL, lambda s: _misses(s, REAL), plots.miss_curves),
    4: PaperFigure(
        "Temperature",
        f"hit rates {_REPLAYED}; speeds by Theorem 7 over measured times",
        REAL,
        lambda s: _temperatures(s, REAL, s.times),
        plots.temperatures,
    ),
    5: PaperFigure(
        "Hit rate against acceptance", f"left {_REPLAYED}; right exact", REAL, _trade_off, plots.cache_aware
    ),
    6: PaperFigure("Batch size", f"left {_RUN}; right model", LLAMA, lambda s: _batches(s, LLAMA), plots.batches),
    7: PaperFigure("End to end", _BENCH, LLAMA, lambda s: _end_to_end(s, LLAMA, REAL), plots.end_to_end, (11, 3.6)),
    8: PaperFigure(
        "The mask of a fan-out", "the predicate of the plugin", "", lambda s: data.mask_example(), plots.mask, (9, 3)
    ),
    10: PaperFigure(
        "Misses by fan-out, Qwen3", f"{_RUN}, replayed", QWEN, lambda s: _misses(s, QWEN), plots.miss_curves
    ),
    11: PaperFigure("End to end, Qwen3", _BENCH, QWEN, lambda s: _end_to_end(s, QWEN), plots.end_to_end),
    12: PaperFigure(
        "Temperature, Qwen3",
        f"hit rates {_RUN}, replayed; speeds by Theorem 7 over the recipes' times",
        QWEN,
        lambda s: _temperatures(s, QWEN, data.times_of(*_profiles(s, QWEN), _SD_LOOKAHEADS, _LISTED[1])),
        plots.temperatures,
    ),
    13: PaperFigure("Batch size, Qwen3", f"left {_RUN}; right model", QWEN, lambda s: _batches(s, QWEN), plots.batches),
}


def make(number: int, sources: Sources, out: Path) -> None:
    """Write figN.json."""
    figure = FIGURES[number]
    document = {"figure": number, "title": figure.title, "caption": figure.caption, "data": figure.make(sources)}
    document |= about(figure.deployment, "python -m saguaro.bench.figures")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"fig{number}.json").write_text(json.dumps(_short(document), indent=1, allow_nan=False) + "\n")


def draw(number: int, out: Path) -> Path:
    """Write figN.png from figN.json. Raises ConfigError without one, or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("figures need matplotlib: install saguaro-serving[bench]") from error
    path = out / f"fig{number}.json"
    if not path.is_file():
        raise ConfigError(f"there is no {path} to draw: leave out --draw to make it")
    document = json.loads(path.read_text(encoding="utf-8"))
    kind = FIGURES[number]
    figure = Figure(figsize=kind.inches, layout="constrained")
    kind.draw(figure, document["data"])
    figure.suptitle(f"{document['title']} ({document['caption']})", fontsize="medium")
    drawn = path.with_suffix(".png")
    figure.savefig(drawn, dpi=90)
    return drawn


def _short(value: Any) -> Any:
    """Five digits are what the figures are worth."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m saguaro.bench.figures", description=__doc__)
    parser.add_argument("figures", metavar="N", type=int, nargs="+", choices=FIGURES, help="as in the paper")
    parser.add_argument("--out", type=Path, default=Path("docs/results/figures"), metavar="DIR")
    parser.add_argument("--data", type=Path, default=Path(".cache/figures"), metavar="DIR", help="what took long")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/results"), metavar="DIR", help="of `saguaro bench` and `tune`"
    )
    parser.add_argument("--store", type=Path, metavar="DIR")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    with console.status("") as line:
        sources = Sources(arguments.store or cache_folder(), arguments.data, arguments.results, line.update)
        try:
            for number in arguments.figures:
                if not arguments.draw:
                    make(number, sources, arguments.out)
                console.print(str(draw(number, arguments.out)), soft_wrap=True)
        except SaguaroError as error:
            console.print(f"figures: {error}", markup=False, soft_wrap=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
