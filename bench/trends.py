"""How batch size, fan-out, backup and temperature move the speed of a deployment, and where the backup should change.

python -m saguaro.bench.trends DEPLOYMENT --out FILE [--parts batch fan_out backup temperature]

Parts that are already in FILE and are not measured now stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from saguaro.bench.load import shipped_prompts
from saguaro.bench.speed import SpeedPlan
from saguaro.bench.speed_command import about, run_plan
from saguaro.errors import SaguaroError
from saguaro.orchestrator.analysis import critical_batch
from saguaro.orchestrator.config import DeploymentConfig, find_deployment, read_deployment
from saguaro.orchestrator.types import Backup

Row = dict[str, Any]

_REPEATS = 4  # batches of each setting


@dataclass(frozen=True)
class Trends:
    """What is varied, one thing at a time."""

    config: DeploymentConfig
    path: Path  # recipes are relative to it
    store: Path
    batches: tuple[int, ...] = (1, 4, 8, 16)
    budgets: tuple[int, ...] = (1, 3, 7, 14, 21, 42)
    backups: tuple[Backup, ...] = ("primary", "none", "random")
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 96
    progress: Callable[[str], None] = field(default=lambda text: None)

    def batch(self) -> list[Row]:
        """All modes."""
        return list(self._rows(self.config, modes=("ar", "sd", "ssd"), batches=self.batches))

    def fan_out(self) -> list[Row]:
        """ssd with a budget at the first and the last batch size, and what no budget (sd) yields there."""
        batches = tuple(dict.fromkeys((self.batches[0], self.batches[-1])))
        rows = [row | {"budget": 0} for row in self._rows(self.config, modes=("sd",), batches=batches)]
        for budget in self.budgets:
            speculation = self.config.speculation
            fan_out = replace(speculation.fan_out, budget=budget, counts=None, counts_after_miss=None)
            config = replace(self.config, speculation=replace(speculation, fan_out=fan_out))
            rows += [row | {"budget": budget} for row in self._rows(config, modes=("ssd",), batches=batches)]
        return rows

    def backup(self) -> list[Row]:
        """ssd with each backup at each batch size."""
        rows: list[Row] = []
        for backup in self.backups:
            config = replace(self.config, speculation=replace(self.config.speculation, backup=backup))
            rows += [row | {"backup": backup} for row in self._rows(config, modes=("ssd",), batches=self.batches)]
        return rows

    def temperature(self) -> list[Row]:
        """sd and ssd, one stream."""
        return list(self._rows(self.config, modes=("sd", "ssd"), temperatures=self.temperatures))

    def _rows(self, config: DeploymentConfig, **plan: Any) -> Iterator[Row]:
        speculation = config.speculation
        self.progress(f"backup {speculation.backup}, fan-out {speculation.fan_out.budget}: {plan}")
        # Every stream its own prompt: equal ones would hit and miss together.
        prompts = {"mixed": shipped_prompts()}
        whole = SpeedPlan(prompts, speculation.max_lookahead, max_tokens=self.max_tokens, repeats=_REPEATS, **plan)
        document, _, _ = run_plan(config, self.path, self.store, whole, self.progress)
        left_out = {"swept", "repeats", "speeds", "kinds", "drafted", "accepted", "placement"}
        yield from ({key: value for key, value in row.items() if key not in left_out} for row in document["runs"])


PARTS: dict[str, Callable[[Trends], list[Row]]] = {
    "batch": Trends.batch,
    "fan_out": Trends.fan_out,
    "backup": Trends.backup,
    "temperature": Trends.temperature,
}


def switch(rows: Sequence[Row], fast: Backup) -> Row:
    """Where a backup that costs nothing overtakes the draft model: measured, and by Theorem 17.

    The theorem is given what was measured at the smallest batch: p_hit, E_hit and E_miss with the fast backup, T_b with
    the draft model. None: at no batch that was measured; for the theorem, at none at all.
    """
    slow_rows, fast_rows = (
        sorted((row for row in rows if row["backup"] == name), key=lambda row: row["batch"])
        for name in ("primary", fast)
    )
    first = fast_rows[0]
    predicted = critical_batch(first["p_hit"], first["e_hit"], first["e_miss"] or 1.0, slow_rows[0]["t_b"] or 0.0)
    gains = [
        (slow["batch"], quick["tokens_per_second"] / slow["tokens_per_second"] - 1)
        for slow, quick in zip(slow_rows, fast_rows, strict=True)
    ]
    return {
        "backup": fast,
        "gain": {batch: round(gain, 4) for batch, gain in gains},  # of the fast backup, by batch
        "measured": _crossing(gains),
        "predicted": None if math.isinf(predicted) else round(predicted, 2),
    }


def _crossing(gains: Sequence[tuple[int, float]]) -> float | None:
    """The batch size at which the gain becomes positive, on a straight line between two that were measured."""
    if gains[0][1] > 0:
        return float(gains[0][0])
    for (low, before), (high, after) in zip(gains, gains[1:]):
        if after > 0:
            return round(low + (high - low) * -before / (after - before), 2)
    return None


def _table(part: str, rows: Sequence[Row]) -> Table:
    names = [name for name in rows[0] if any(row.get(name) is not None for row in rows)]
    table = Table(*names, title=part)
    for row in rows:
        values = (row.get(name) for name in names)
        table.add_row(*("" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in values))
    return table


def main() -> None:
    from saguaro.cache import cache_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deployment")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    for name, kind in (("batches", int), ("budgets", int), ("backups", str), ("temperatures", float)):
        parser.add_argument(f"--{name}", nargs="+", type=kind, default=list(getattr(Trends, name)))
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer (default 96)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    found = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    try:
        path = find_deployment(arguments.deployment)
        config = read_deployment(path)
        with console.status("") as line:
            varied = {
                name: tuple(getattr(arguments, name)) for name in ("batches", "budgets", "backups", "temperatures")
            }
            trends = Trends(
                config, path, cache_folder(), **varied, max_tokens=arguments.max_tokens, progress=line.update
            )
            measured = {part: PARTS[part](trends) for part in arguments.parts}
    except SaguaroError as error:
        parser.exit(1, f"{error}\n")
    if "backup" in measured and "primary" in arguments.backups:
        measured["switch"] = [switch(measured["backup"], name) for name in arguments.backups if name != "primary"]
    for part, rows in measured.items():
        Console(width=200).print(_table(part, rows))
    command = shlex.join(["python", "-m", "saguaro.bench.trends", *sys.argv[1:]])
    commands = found.get("command", {}) | dict.fromkeys(arguments.parts, command)
    document = found | measured | about(config.name) | {"command": commands}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
