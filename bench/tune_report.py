"""What `saguaro tune` found, as tables and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from saguaro.bench.tune import Choice, Curve, Estimate, Sweeps, Times
from saguaro.bench.tune_batches import BACKUPS
from saguaro.errors import ConfigError
from saguaro.orchestrator.metrics import RequestStats
from saguaro.orchestrator.types import MODES, Mode

FIGURES = (".pdf", ".png", ".svg")


@dataclass(frozen=True)
class Run:
    """One answer of the recommended deployment."""

    temperature: float
    prompt: int
    mode: Mode
    lookahead: int
    stats: RequestStats


def tables(sweeps: Sequence[Sweeps], times: Times, runs: Sequence[Run]) -> Iterator[Table]:
    yield _times_table(times)
    for sweep in sweeps:
        yield _curves_table(sweep)
        yield _choices_table(sweep)
        yield _batches_table(sweep)
    yield _runs_table(runs)


def _times_table(times: Times) -> Table:
    budgets = sorted(times.step)
    heads = ("K", "verify ms", "over 1 token", "T_sd = T_b", *(f"T_p, budget {budget}" for budget in budgets))
    table = _table("Times, in units of one verification", heads, "T_p above 1: the target waits for the draft")
    for k in sorted(times.trunk):
        verify = times.verify[k]
        ratios = [verify / times.verify[0], times.draft(k) / verify, *(times.prepare(k, b) / verify for b in budgets)]
        table.add_row(str(k), f"{verify * 1e3:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    return table


def _curves_table(sweep: Sweeps) -> Table:
    title = f"Temperature {sweep.temperature:g}: {sweep.tokens} tokens of {sweep.texts} answers"
    table = _table(title, ("", *map(str, range(1, 17))), "")
    table.add_row("accepted, at position", *(f"{rate:.2f}" for rate in sweep.acceptance))
    for name, curve in (("a rejection", sweep.after_rejection), ("full acceptance", sweep.after_acceptance)):
        cells = [f"{curve.misses[f]:.2f}" if f in curve.misses else "" for f in range(1, 17)]
        table.add_row(f"missed by F guesses after {name} ({curve.rounds}, {_law(curve)})", *cells)
    return table


def _law(curve: Curve) -> str:
    if curve.fit is None:
        return "too few for a power law"
    fit = curve.fit
    return f"{fit.curve.scale:.2f} F^-{fit.curve.exponent:.2f}, R² {fit.r_squared:.2f}"


def _choices_table(sweep: Sweeps) -> Table:
    heads = ["", "K", "budget", "policy", "rule", "C", "backup", "accepted", "hit rate", "gain", "tokens"]
    heads += ["E_hit", "E_miss", "T_p", "T_b", "x ar"]
    note = (
        "* fastest of its kind; ± half of the 95% interval over answers; "
        "gain: in hit rate over uniform, the best list (ranked), coupled or C = 1; "
        "tokens: of a round; x ar: predicted speed over plain decoding"
    )
    table = _table(f"Temperature {sweep.temperature:g}: one thing at a time", heads, note)
    for name in ("sd", "lookahead", "budget", "lists", "ranked", "rules", "cache_aware", "backups"):
        choices: list[Choice] = getattr(sweep, name)
        table.add_section()
        for choice in choices:
            fastest = choice is max(choices, key=lambda c: c.speed)
            table.add_row(("*" if fastest else " ") + name.replace("cache_aware", "C"), *_cells(choice))
    return table


def _batches_table(sweep: Sweeps) -> Table:
    heads = ("batch", "drafts", "mode", "K", "budget", "backup", "x ar", "T_p", *(f"ssd, {name}" for name in BACKUPS))
    note = "x ar: over plain decoding of the same batch; of more rows than were measured by a line through those"
    table = _table(f"Temperature {sweep.temperature:g}: larger batches, more drafts. Predicted, not run", heads, note)
    for predicted in sweep.batches:
        if predicted.batch == min(p.batch for p in sweep.batches):
            table.add_section()
        setting = predicted.setting
        ssd = setting.mode == "ssd"
        table.add_row(
            *(str(predicted.batch), str(predicted.replicas), setting.mode),
            str(setting.lookahead) if setting.mode != "ar" else "",
            str(setting.budget) if ssd else "",
            setting.backup if setting.mode != "ar" else "",
            f"{predicted.speed:.2f}",
            f"{predicted.t_p:.2f}" if ssd else "",
            *(f"{predicted.backups[name]:.2f}" for name in BACKUPS),
        )
    return table


def _cells(choice: Choice) -> Iterator[str]:
    policy = choice.policy if choice.budget else ""
    if choice.least_probability is not None:
        policy += f", {choice.least_probability:g}"
    yield from (str(choice.lookahead), str(choice.budget), policy, choice.rule, f"{choice.cache_aware:g}")
    yield choice.backup
    yield from (_interval(choice.acceptance), _interval(choice.hit_rate))
    yield _interval(choice.gain, "+") if choice.gain else ""
    yield _interval(choice.tokens_per_round)
    for value in (choice.e_hit, choice.e_miss, choice.t_p, choice.t_b, choice.speed):
        yield "" if value is None else f"{value:.2f}"


def _interval(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.mean:{sign}.2f} ±{(estimate.high - estimate.low) / 2:.2f}"


def _runs_table(runs: Sequence[Run]) -> Table:
    heads = ("T", "mode", "K", "answers", "tokens/s", "x ar", "x sd", "tokens/round", "hit rate", "E_hit", "E_miss")
    table = _table("Run: the recommended setting", (*heads, "T_p", "wait ms"), "medians over prompts")
    for temperature in sorted({r.temperature for r in runs}):
        for mode in MODES:
            chosen = [r for r in runs if r.temperature == temperature and r.mode == mode]
            if not chosen:
                continue

            def median(figure: Callable[[RequestStats], float | None], chosen: list[Run] = chosen) -> str:
                values = [value for r in chosen if (value := figure(r.stats)) is not None]
                return f"{statistics.median(values):.2f}" if values else ""

            ratios = [speed_ratio(runs, temperature, mode, other) for other in ("ar", "sd")]
            table.add_row(
                *(f"{temperature:g}", mode, str(chosen[0].lookahead) if mode != "ar" else "", str(len(chosen))),
                median(lambda s: s.tokens_per_second),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                median(lambda s: s.acceptance_length),
                median(lambda s: s.hit_rate) if mode == "ssd" else "",
                *(median(lambda s: s.e_hit), median(lambda s: s.e_miss), median(lambda s: s.t_p)),
                median(lambda s: s.wait_ms),
            )
    return table


def speed_ratio(runs: Sequence[Run], temperature: float, one: Mode, other: Mode) -> float | None:
    """Median over prompts of tokens per second in two modes."""
    speeds: dict[Mode, dict[int, float]] = {mode: {} for mode in MODES}
    for r in runs:
        if r.temperature == temperature and r.stats.tokens_per_second:
            speeds[r.mode][r.prompt] = r.stats.tokens_per_second
    both = speeds[one].keys() & speeds[other].keys()
    return statistics.median(speeds[one][n] / speeds[other][n] for n in both) if both else None


def _table(title: str, heads: Sequence[str], caption: str) -> Table:
    table = Table(title=title, caption=caption or None)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=index > 0)
    return table


# The plot


def check_figure(path: Path) -> None:
    """Before anything is measured. Raises ConfigError for an unknown kind of file or without matplotlib."""
    if path.suffix not in FIGURES:
        raise ConfigError(f"--plot must name a file that ends in one of {', '.join(FIGURES)}, got {path.name!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install saguaro-serving[bench], or leave --plot out") from error


def plot(sweeps: Sequence[Sweeps], times: Times, path: Path) -> None:
    """A row of panels for each temperature. Raises ConfigError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(24, 4 * len(sweeps)), layout="constrained")
    for sweep, row in zip(sweeps, figure.subplots(len(sweeps), 6, squeeze=False)):
        _plot_row(sweep, times, row)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from error


def _plot_row(sweep: Sweeps, times: Times, row: Any) -> None:
    misses, speed, hits, ranked, scale, clock = row
    for name, curve in (("after a rejection", sweep.after_rejection), ("all accepted", sweep.after_acceptance)):
        misses.loglog(list(curve.misses), list(curve.misses.values()), marker=".", label=f"{name}: {_law(curve)}")
    misses.set(title=f"T = {sweep.temperature:g}", xlabel="guesses F", ylabel="bonus token missed")
    speed.axhline(1, color="grey", linewidth=1, label="ar")
    for label, choices in (("sd", sweep.sd), ("ssd, best budget", sweep.lookahead)):
        speed.plot([c.lookahead for c in choices], [c.speed for c in choices], marker=".", label=label)
    speed.set(xlabel="lookahead K", ylabel="predicted speed over ar", ylim=(0, None))
    for policy in dict.fromkeys(choice.policy for choice in sweep.lists):
        chosen = [choice for choice in sweep.lists if choice.policy == policy]
        _errorbar(hits, [c.budget for c in chosen], [c.hit_rate for c in chosen], policy)
    hits.set(xlabel="budget", ylabel="hit rate", xscale="log")
    if sweep.ranked:
        least = [c.least_probability or 0.0 for c in sweep.ranked]
        _errorbar(ranked, least, [c.hit_rate for c in sweep.ranked], "hit rate")
        ranked.plot(least, [c.t_p for c in sweep.ranked], marker=".", label="T_p")
        ranked.plot(least, [c.speed for c in sweep.ranked], marker=".", label="predicted speed over ar")
        best = sweep.ranked[0]
        title = f"ranked, K = {best.lookahead}, budget {best.budget}"
        ranked.set(title=title, xlabel="least probability", xscale="log", ylim=(0, None))
    else:
        ranked.set_axis_off()
    for label, figures in (
        ("acceptance", [c.acceptance for c in sweep.cache_aware]),
        ("hit rate", [c.hit_rate for c in sweep.cache_aware]),
    ):
        _errorbar(scale, [c.cache_aware for c in sweep.cache_aware], figures, label)
    if sweep.cache_aware:
        scale.set(xlabel="C of cache-aware sampling, rule ratio", ylim=(None, 1))
    else:
        scale.set_axis_off()  # at temperature 0 the rules coincide
    for budget in sorted(times.step):
        lookaheads = sorted(times.trunk)
        ratios = [times.prepare(k, budget) / times.verify[k] for k in lookaheads]
        clock.plot(lookaheads, ratios, marker=".", label=f"budget {budget}")
    clock.axhline(1, color="grey", linewidth=1)
    clock.set(xlabel="lookahead K", ylabel="T_p", ylim=(0, None))
    for axes in row:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")


def _errorbar(axes: Any, x: Sequence[float], estimates: Sequence[Estimate], label: str) -> None:
    if not estimates:
        return
    means = [e.mean for e in estimates]
    below, above = [max(e.mean - e.low, 0) for e in estimates], [max(e.high - e.mean, 0) for e in estimates]
    axes.errorbar(x, means, yerr=[below, above], marker=".", capsize=2, label=label)
