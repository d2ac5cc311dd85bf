"""Plots of `saguaro bench`: speeds as bars, the latency-throughput front, and the timeline of one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from saguaro.bench.speed import SpeedRun, medians
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import MODES

_COLOURS = {"verify": "#3b6ea5", "wait": "#d9d9d9", "commit": "#7f7f7f", "prepare": "#4a9c5d", "backup": "#c8743a"}
_SHOWN_S = 3.0  # of the timeline, at most
_SHOWN_ROUNDS = 8


def draw(runs: Sequence[SpeedRun], spans: Sequence[Span], out: Path) -> bool:
    """Write speed.png, front.png (several batch sizes only) and timeline.png. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    _bars(Figure(figsize=(9, 4.5), layout="constrained"), runs, out / "speed.png")
    if len({run.setting.batch for run in runs}) > 1:
        _front(Figure(figsize=(6, 4.5), layout="constrained"), runs, out / "front.png")
    if spans:
        _timeline(Figure(figsize=(10, 2.2), layout="constrained"), spans, out / "timeline.png")
    return True


def _bars(figure, runs: Sequence[SpeedRun], path: Path) -> None:  # type: ignore[no-untyped-def]
    """Tokens per second of one stream by kind of prompt, at the smallest batch and the first temperature."""
    first = runs[0].setting
    shown = [r for r in runs if (r.setting.batch, r.setting.temperature) == (first.batch, first.temperature)]
    kinds = list(dict.fromkeys(run.kind for run in shown))
    bars = list(dict.fromkeys((run.setting.placement, run.setting.mode) for run in shown))
    axes = figure.subplots()
    for place, (placement, mode) in enumerate(bars):
        heights = [
            medians(
                [r for r in shown if (r.kind, r.setting.placement, r.setting.mode) == (kind, placement, mode)]
            ).tokens_per_second
            or 0.0
            for kind in kinds
        ]
        width = 0.8 / len(bars)
        axes.bar(
            [i + (place + 0.5) * width - 0.4 for i in range(len(kinds))], heights, width, label=f"{mode} ({placement})"
        )
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(ylabel="tokens per second", title=f"Decoding, batch {first.batch}, T={first.temperature:g}")
    axes.legend()
    figure.savefig(path)


def _front(figure, runs: Sequence[SpeedRun], path: Path) -> None:  # type: ignore[no-untyped-def]
    """What one user sees against what the machine yields, one line for each mode."""
    axes = figure.subplots()
    temperature, placement = runs[0].setting.temperature, runs[0].setting.placement
    for mode in MODES:
        of_mode = [
            run
            for run in runs
            if (run.setting.mode, run.setting.temperature, run.setting.placement) == (mode, temperature, placement)
        ]
        batches = sorted({run.setting.batch for run in of_mode})
        points = [medians([run for run in of_mode if run.setting.batch == batch]) for batch in batches]
        axes.plot(
            [point.tokens_per_second for point in points],
            [point.total_tokens_per_second for point in points],
            marker="o",
            label=mode,
        )
        for batch, point in zip(batches, points, strict=True):
            axes.annotate(str(batch), (point.tokens_per_second or 0.0, point.total_tokens_per_second or 0.0))
    axes.set(xlabel="tokens per second of one stream", ylabel="tokens per second in all", title="By batch size")
    axes.legend()
    figure.savefig(path)


def _timeline(figure, spans: Sequence[Span], path: Path) -> None:  # type: ignore[no-untyped-def]
    """The first rounds after the prompt: the verifier above, the speculator below."""
    verifications = sorted((span for span in spans if span.name == "verify"), key=lambda span: span.start)
    start = verifications[0].start
    end = min(verifications[min(_SHOWN_ROUNDS, len(verifications)) - 1].end, start + int(_SHOWN_S * 1e9))
    axes = figure.subplots()
    for name, colour in _COLOURS.items():
        pieces = [
            ((span.start - start) / 1e6, (span.end - span.start) / 1e6)
            for span in spans
            if span.name == name and start <= span.start < end
        ]
        axes.broken_barh(pieces, (0 if name in ("prepare", "backup") else 1, 0.8), color=colour, label=name)
    axes.set_yticks([0.4, 1.4], ["speculator", "verifier"])
    axes.set(xlabel="milliseconds")
    axes.legend(ncols=5, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.35))
    figure.savefig(path)
