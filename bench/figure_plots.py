"""How the paper's figures are drawn, each from what `figure_data` made of it. `figure` is one of matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from saguaro.bench import speed_plots
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import MODES

Data = Mapping[str, Any]
_MODES = {"ar": "#7f7f7f", "sd": "#c8743a", "ssd": "#3b6ea5"}
_LISTS = {"sd": "#c8743a", "uniform": "#4a9c5d", "geometric": "#3b6ea5"}
_STYLES = {"coupled": "-", "ratio": "--"}


def timelines_and_bars(figure: Any, data: Data) -> None:
    """Figure 1."""
    left, right = figure.subfigures(1, 2, width_ratios=(3, 1))
    traces = left.subplots(2, 1, sharex=True)
    for axes, (mode, spans) in zip(traces, data["traces"].items(), strict=True):
        speed_plots.timeline(axes, [Span(*span) for span in spans])
        axes.set(title=mode, xlabel="")
    end = min(axes.dataLim.x1 for axes in traces)
    traces[0].set_xlim(0, end)
    traces[1].set_xlabel("milliseconds")
    traces[0].legend(ncols=5, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, 1.45))
    axes = right.subplots()
    for place, (name, means) in enumerate((("ours", data["mean"]), ("paper", data["paper_mean"]))):
        for at, mode in enumerate(MODES):
            hatch = "//" if place else None
            bar = axes.bar(at + 0.4 * place - 0.2, means[mode], 0.38, color=_MODES[mode], hatch=hatch, alpha=0.9)
            axes.bar_label(bar, fmt="%.0f", fontsize="x-small")
        axes.bar([0], [0], color="white", edgecolor="black", hatch="//" if place else None, label=name)
    axes.set_xticks(range(3), MODES)
    axes.set(ylabel="tokens per second, mean of the sets")
    axes.legend(fontsize="small")


def miss_curves(figure: Any, data: Data) -> None:
    """Figures 3 and 10."""
    left, right = figure.subplots(1, 2)
    shown = data["curves"][0]
    for name, colour in (("after_hit", "#3b6ea5"), ("after_miss", "#c8743a")):
        points = [p for p in shown["points"] if p[name]]
        fit = shown["fits"][name]
        law = f": {fit['scale']:.2f} F^-{fit['exponent']:.2f}, R² {fit['r_squared']:.2f}" if fit else ""
        drafted = "primary" if name == "after_hit" else f"backup, {shown['backup']}"
        place = [p["fan_out"] for p in points]
        left.plot(place, [p[name] for p in points], "o", color=colour, label=f"after the {drafted}{law}")
        if fit:
            left.plot(place, [fit["scale"] * f ** -fit["exponent"] for f in place], color=colour, linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="F, guesses at each position", ylabel="miss rate")
    left.set_title(f"T={shown['temperature']:g}, {shown['rule']}, K={shown['lookahead']}", fontsize="medium")
    left.legend(fontsize="x-small")
    for curve in data["curves"]:
        label = f"T={curve['temperature']:g}, {curve['rule']}, backup {curve['backup']}"
        places, rates = zip(*((p["fan_out"], p["overall"]) for p in curve["points"]))
        right.plot(places, rates, marker=".", linestyle=_STYLES[curve["rule"]], label=label)
    right.set(xscale="log", xlabel="F, guesses at each position", ylabel="p_hit, overall", ylim=(0, 1))
    right.legend(fontsize="x-small")
    for axes in (left, right):
        axes.set_xticks([p["fan_out"] for p in shown["points"]], [p["fan_out"] for p in shown["points"]])
        axes.minorticks_off()


def temperatures(figure: Any, data: Data) -> None:
    """Figures 4 and 12."""
    left, right = figure.subplots(1, 2)
    _by_temperature(left, data["rows"], lambda row: row["speed"], ("sd", "uniform", "geometric"))
    _by_temperature(right, data["rows"], lambda row: row["hit_rate"]["mean"], ("uniform", "geometric"))
    left.set(ylabel="predicted speed over ar", ylim=(0, None))
    right.set(ylabel="hit rate", ylim=(0, 1))


def _by_temperature(
    axes: Any, rows: Sequence[Data], value: Callable[[Data], float | None], names: Sequence[str]
) -> None:
    """A line for each kind of list and rule, where more than one temperature has it."""
    for rule, style in _STYLES.items():
        for name in names:
            points = [(row["temperature"], value(row)) for row in rows if (row["lists"], row["rule"]) == (name, rule)]
            if points:
                label = f"{name}, {rule}"
                axes.plot(*zip(*points), marker=".", color=_LISTS[name], linestyle=style, label=label)
    axes.set(xlabel="temperature")
    axes.legend(fontsize="x-small")


def cache_aware(figure: Any, data: Data) -> None:
    """Figure 5."""
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    for row in data["rows"]:
        x, y = row["hit_rate"]["mean"], row["acceptance"]["mean"]
        left.plot(x, y, "o", color="#3b6ea5")
        left.annotate(f"C={row['C']:g}", (x, y), fontsize="x-small", xytext=(4, 3), textcoords="offset points")
    left.set(xlabel="hit rate", ylabel="acceptance of a draft token")
    example = data["example"]
    tokens = np.arange(len(example["p"]))
    for axes, name in ((middle, "plain"), (right, "cache_aware")):
        one = example[name]
        axes.bar(tokens - 0.2, example["p"], 0.4, color="#7f7f7f", label="target p")
        axes.bar(tokens + 0.2, one["q"], 0.4, color="#c8743a", label="draft q")
        axes.plot(tokens, one["residual"], "D", color="#3b6ea5", label="residual")
        hit = one["hit_rate"]["2"]
        axes.set(xlabel="token", ylim=(0, 0.7), xticks=tokens)
        scale = f"C={example['C']:.2f}" if name == "cache_aware" else "C=1"
        axes.set_title(f"{scale}: accepted {one['acceptance']:.2f}, hit {hit:.2f} (F=2)", fontsize="small")
    middle.legend(fontsize="x-small")


def batches(figure: Any, data: Data) -> None:
    """Figure 6."""
    left, right = figure.subplots(1, 2)
    for backup, colour in (("primary", "#3b6ea5"), ("random", "#c8743a")):
        rows = [row for row in data["rows"] if row["backup"] == backup]
        sizes, each = zip(*((row["batch"], row["tokens_per_second"]) for row in rows))
        left.plot(sizes, each, marker="o", color=colour, label=f"ssd, F=1, backup {backup}")
    sizes, each = zip(*((row["batch"], row["tokens_per_second"]) for row in data["rows"] if row["mode"] == "sd"))
    left.plot(sizes, each, marker=".", color="#7f7f7f", linestyle=":", label="sd")
    left.set(xlabel="batch", ylabel="tokens per second of one stream", ylim=(0, None), xscale="log")
    left.set_xticks(sizes, sizes)
    left.minorticks_off()
    left.legend(fontsize="x-small")
    count = [row["devices"] for row in data["devices"]]
    for mode in ("sd", "ssd"):
        right.plot(count, [row[mode] for row in data["devices"]], marker=".", color=_MODES[mode], label=mode)
    right.set(xlabel="draft devices", ylabel="predicted speed over ar", ylim=(0, None))
    right.set_title(f"model, batch {data['batch']}", fontsize="medium")
    right.legend(fontsize="small")


def end_to_end(figure: Any, data: Data) -> None:
    """Figures 7 and 11."""
    *panels, front = figure.subplots(1, 1 + len(data["benches"]))
    for axes, (name, bench) in zip(panels, data["benches"].items(), strict=True):
        speed_plots.bars(axes, bench["runs"])
        axes.set_title(name, fontsize="medium")
        axes.tick_params(axis="x", labelsize="x-small")
    _paper_marks(panels[0], data["paper"])
    for axes in panels:
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # for the legend
        axes.legend(fontsize="x-small")
    speed_plots.front(front, data["runs"])


def _paper_marks(axes: Any, paper: Sequence[Data]) -> None:
    """The paper's speeds over the bars of its sets."""
    for place, row in enumerate(paper):
        for at, mode in enumerate(MODES):
            x = place + (at + 0.5) * 0.8 / len(MODES) - 0.4
            axes.plot(x, row[mode], "k_", markersize=12, label="paper" if place == at == 0 else None)
    axes.set_xticks(range(len(paper)), [f"{row['kind']}\n({row['set']})" for row in paper], fontsize="x-small")


def mask(figure: Any, data: Data) -> None:
    """Figure 8."""
    axes = figure.subplots()
    seen = np.array([[int(bit) for bit in row] for row in data["rows"]])
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", interpolation="nearest")
    prefix, trunk, branches = data["prefix"], len(data["counts"]), len(data["forks"])
    edges = [0, prefix, prefix + trunk, *(prefix + trunk + branches * (d + 1) for d in range(data["depth"] + 1))]
    names = ["prefix", "trunk", *(f"depth {d}" for d in range(data["depth"] + 1))]
    for edge in edges[1:-1]:
        axes.axvline(edge - 0.5, color="black", linewidth=0.8)
    axes.set_xticks([(a + b - 1) / 2 for a, b in zip(edges, edges[1:])], names)
    axes.set_yticks(range(branches), [f"k={fork}" for fork in data["forks"]], fontsize="xx-small")
    axes.set(ylabel="branches, by fork")
