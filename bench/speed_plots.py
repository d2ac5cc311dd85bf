"""Plots of `saguaro bench`: speeds as bars, the latency-throughput front, and the timeline of one answer.

All but the timeline are drawn from the rows of its report (`runs` in bench.json).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import MODES

Row = Mapping[str, Any]

_COLOURS = {"verify": "#3b6ea5", "wait": "#d9d9d9", "commit": "#7f7f7f", "prepare": "#4a9c5d", "backup": "#c8743a"}
_SHOWN_S = 3.0  # of the timeline, at most
_SHOWN_ROUNDS = 8


def draw(rows: Sequence[Row], spans: Sequence[Span], out: Path) -> bool:
    """Write speed.png, front.png (several batch sizes only) and timeline.png. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    bars(figure.subplots(), rows)
    figure.savefig(out / "speed.png")
    if len({row["batch"] for row in rows}) > 1:
        figure = Figure(figsize=(6, 4.5), layout="constrained")
        front(figure.subplots(), rows)
        figure.savefig(out / "front.png")
    if spans:
        figure = Figure(figsize=(10, 2.2), layout="constrained")
        axes = figure.subplots()
        timeline(axes, spans)
        axes.legend(ncols=5, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.35))
        figure.savefig(out / "timeline.png")
    return True


def bars(axes: Any, rows: Sequence[Row]) -> None:
    """Tokens per second of one stream by kind of prompt, at the first batch and temperature."""
    first = rows[0]
    shown = [r for r in _chosen(rows) if (r["batch"], r["temperature"]) == (first["batch"], first["temperature"])]
    kinds = list(shown[0]["kinds"])
    width = 0.8 / len(shown)
    for place, row in enumerate(shown):
        axes.bar(
            [i + (place + 0.5) * width - 0.4 for i in range(len(kinds))],
            [row["kinds"][kind] or 0.0 for kind in kinds],
            width,
            label=f"{row['mode']} ({row['placement']})",
        )
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(ylabel="tokens per second", title=f"Decoding, batch {first['batch']}, T={first['temperature']:g}")
    axes.legend()


def front(axes: Any, rows: Sequence[Row]) -> None:
    """What one user sees against what the machine yields, one line for each mode."""
    temperature, placement = rows[0]["temperature"], rows[0]["placement"]
    for mode in MODES:
        points = sorted(
            (
                row
                for row in _chosen(rows)
                if (row["mode"], row["temperature"], row["placement"]) == (mode, temperature, placement)
            ),
            key=lambda row: row["batch"],
        )
        each, all_ = ([row[name] for row in points] for name in ("tokens_per_second", "total_tokens_per_second"))
        axes.plot(each, all_, marker="o", label=mode)
        for row, x, y in zip(points, each, all_):
            axes.annotate(str(row["batch"]), (x or 0.0, y or 0.0))
    axes.set(xlabel="tokens per second of one stream", ylabel="tokens per second in all", title="By batch size")
    axes.legend()


def timeline(axes: Any, spans: Sequence[Span]) -> None:
    """The first rounds after the prompt: the verifier above, the speculator below."""
    verifications = sorted((span for span in spans if span.name == "verify"), key=lambda span: span.start)
    start = verifications[0].start
    end = min(verifications[min(_SHOWN_ROUNDS, len(verifications)) - 1].end, start + int(_SHOWN_S * 1e9))
    for name, colour in _COLOURS.items():
        pieces = [
            ((span.start - start) / 1e6, (span.end - span.start) / 1e6)
            for span in spans
            if span.name == name and start <= span.start < end
        ]
        axes.broken_barh(pieces, (0 if name in ("prepare", "backup") else 1, 0.8), color=colour, label=name)
    axes.set_yticks([0.4, 1.4], ["speculator", "verifier"])
    axes.set(xlabel="milliseconds")


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """Without those that were only tried; by mode."""
    return sorted((row for row in rows if not row["swept"]), key=lambda row: MODES.index(row["mode"]))
