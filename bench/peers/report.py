"""What the answers of peers say: figures, speed-ups, agreement; as a document, tables and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.table import Table

from saguaro.bench.peers.measure import PeerRun
from saguaro.bench.peers.peer import Method

_Key = tuple[str, Method]


def report(runs: Sequence[PeerRun], peers: Mapping[str, dict[str, str]], failures: Mapping[str, str]) -> dict[str, Any]:
    """`runs`: one object for each peer and method, medians over its answers. `ratios`: of ssd of each Saguaro to the
    fastest of every other peer's methods of a mode, over the same prompts. `not_measured`: reasons by name of a peer.

    `peers`: in words, by name. Saguaro's come first; agreement is with plain decoding of the first.
    """
    by_method: dict[_Key, list[PeerRun]] = {}
    names = sorted(dict.fromkeys(run.peer for run in runs), key=lambda name: not name.startswith("saguaro"))
    for run in sorted(runs, key=lambda run: names.index(run.peer)):
        by_method.setdefault((run.peer, run.method), []).append(run)
    first = names[0] if names else ""
    plain = {_prompt(run): run for run in runs if (run.peer, run.method.mode) == (first, "ar")}
    rows = []
    for (name, method), group in by_method.items():
        speeds = [run.answer.tokens_per_second for run in group if run.answer.tokens_per_second]
        accepted = [run.answer.acceptance_length for run in group if run.answer.acceptance_length]
        agreeing = [_agreeing(run, plain[_prompt(run)]) for run in group if _prompt(run) in plain]
        rows.append(
            {
                "peer": name,
                "mode": method.mode,
                "lookahead": method.lookahead,
                "tokens_per_second": statistics.median(speeds),
                "quartiles": _quartiles(speeds),
                "acceptance_length": statistics.median(accepted) if accepted else None,
                "answers": len(group),
                "compared": len(agreeing),
                "same_answers": agreeing.count(len(group[0].answer.token_ids)),
                "agreeing_tokens": statistics.median(agreeing) if agreeing else None,
                "speeds": [round(speed, 3) for speed in speeds],
            }
            | peers[name]
        )
    return {"runs": rows, "ratios": _ratios(by_method), "not_measured": dict(failures)}


def _prompt(run: PeerRun) -> tuple[int, str]:
    return run.round, run.kind


def _agreeing(run: PeerRun, plain: PeerRun) -> int:
    """Tokens before the first that differs."""
    pairs = zip(run.answer.token_ids, plain.answer.token_ids)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _quartiles(values: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return [low, high]


def _ratios(by_method: Mapping[_Key, Sequence[PeerRun]]) -> list[dict[str, Any]]:
    speeds = {
        key: {_prompt(run): run.answer.tokens_per_second for run in group if run.answer.tokens_per_second}
        for key, group in by_method.items()
    }
    fastest: dict[tuple[str, str], _Key] = {}
    for key in speeds:
        best = fastest.setdefault((key[0], key[1].mode), key)
        fastest[key[0], key[1].mode] = max(best, key, key=lambda k: statistics.median(speeds[k].values()))
    rows = []
    for ours in (key for key in speeds if key[1].mode == "ssd"):
        for theirs in (key for key in fastest.values() if key != ours):
            common = speeds[ours].keys() & speeds[theirs].keys()
            if found := [speeds[ours][prompt] / speeds[theirs][prompt] for prompt in sorted(common)]:
                ratio = {"of": f"{ours[0]} {ours[1]}", "to": f"{theirs[0]} {theirs[1]}"}
                rows.append(
                    ratio | {"median": statistics.median(found), "quartiles": _quartiles(found), "answers": len(found)}
                )
    return rows


def figures_table(document: Mapping[str, Any]) -> Table:
    table = Table(
        title="Decoding, one stream: medians over prompts",
        caption="same: answers that are those of the first peer's ar; agreeing: tokens before the first that differs",
    )
    for name in ("peer", "method", "precision"):
        table.add_column(name)
    for name in ("tok/s", "quartiles", "accepted", "same", "agreeing"):
        table.add_column(name, justify="right")
    for row in document["runs"]:
        low, high = row["quartiles"]
        table.add_row(
            row["peer"],
            str(Method(row["mode"], row["lookahead"])),
            row["precision"],
            f"{row['tokens_per_second']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "",
            f"{row['same_answers']} of {row['compared']}",
            f"{row['agreeing_tokens']:g}" if row["agreeing_tokens"] is not None else "",
        )
    for name, why in document["not_measured"].items():
        table.add_row(name, "", why)
    return table


def ratios_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Speed-ups, over the same prompts", caption="median, and the middle half of the answers")
    for name in ("of", "to"):
        table.add_column(name)
    for name in ("median", "quartiles", "answers"):
        table.add_column(name, justify="right")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(row["of"], row["to"], f"{row['median']:.2f}", f"{low:.2f} to {high:.2f}", str(row["answers"]))
    return table


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """A bar for each method, with its quartiles. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["peer"] for row in rows))
    medians = [row["tokens_per_second"] for row in rows]
    spread = [[abs(row["quartiles"][end] - row["tokens_per_second"]) for row in rows] for end in (0, 1)]
    labels = [f"{row['peer']}, {Method(row['mode'], row['lookahead'])}" for row in rows]
    axes.barh(range(len(rows)), medians, xerr=spread, color=[f"C{names.index(row['peer']) % 10}" for row in rows])
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second of one stream (median, quartiles)")
    figure.savefig(path)
    return True
