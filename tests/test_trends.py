"""The trends: one thing is varied at a time, and the switch of the backup is found where the speeds cross."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from saguaro.bench import trends
from saguaro.bench.speed import SpeedPlan
from saguaro.bench.trends import switch
from saguaro.orchestrator.analysis import critical_batch
from saguaro.orchestrator.config import DeploymentConfig


def row(backup: str, batch: int, speed: float, **figures: Any) -> dict[str, Any]:
    return {"backup": backup, "batch": batch, "tokens_per_second": speed, "p_hit": 0.8, "e_hit": 4.0} | (
        {"e_miss": 1.0, "t_b": 0.3} | figures
    )


def test_the_backup_switches_where_the_speeds_cross() -> None:
    rows = [row("none", 4, 3.1), row("none", 1, 1.8), row("primary", 1, 2.0), row("primary", 4, 2.5)]
    found = switch(rows, "none")
    assert found["gain"] == {1: pytest.approx(-0.1), 4: pytest.approx(0.24)}
    assert found["measured"] == pytest.approx(1 + 3 * 0.1 / 0.34, abs=0.01)
    assert found["predicted"] == pytest.approx(critical_batch(0.8, 4.0, 1.0, 0.3), abs=0.01) == 3.98


def test_a_backup_that_never_pays_never_switches() -> None:
    rows = [row("none", 1, 1.0, p_hit=0.5), row("primary", 1, 2.0, t_b=0.2)]
    found = switch(rows, "none")
    assert (found["measured"], found["predicted"]) == (None, None)
    assert switch([row("none", 1, 3.0), row("primary", 1, 2.0)], "none")["measured"] == 1.0


def test_one_thing_is_varied_at_a_time_and_other_parts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[DeploymentConfig] = []

    def run_plan(config: DeploymentConfig, path: Path, store: Path, plan: SpeedPlan, progress: object) -> Any:
        configs.append(config)
        settings = itertools.product(plan.modes, plan.batches, plan.temperatures)
        names = ("mode", "batch", "temperature")
        rows = [row("", 1, 2.0, kinds={}) | dict(zip(names, each, strict=True)) for each in settings]
        return {"runs": rows}, [], ()

    out = tmp_path / "trends.json"
    out.write_text(json.dumps({"temperature": ["from before"]}))
    monkeypatch.setattr("saguaro.bench.trends.run_plan", run_plan)
    options = "--parts batch fan_out backup --batches 2 8 --budgets 3 --backups primary none"
    monkeypatch.setattr(sys, "argv", ["trends", "simulated-qwen3-32b", *options.split(), "--out", str(out)])
    trends.main()
    found = json.loads(out.read_text())
    assert found["temperature"] == ["from before"]
    assert [(r["mode"], r["batch"]) for r in found["batch"]] == list(itertools.product(("ar", "sd", "ssd"), (2, 8)))
    expected = [("sd", 0, 2), ("sd", 0, 8), ("ssd", 3, 2), ("ssd", 3, 8)]
    assert [(r["mode"], r["budget"], r["batch"]) for r in found["fan_out"]] == expected
    assert [(r["backup"], r["batch"]) for r in found["backup"]] == list(itertools.product(("primary", "none"), (2, 8)))
    assert all("kinds" not in r for r in found["backup"])
    settings = [(c.speculation.fan_out.budget, c.speculation.backup) for c in configs]
    assert settings == [(15, "primary"), (15, "primary"), (3, "primary"), (15, "primary"), (15, "none")]
    assert found["switch"][0] == {"backup": "none", "gain": {"2": 0.0, "8": 0.0}, "measured": None, "predicted": 3.98}
    assert set(found["command"]) == {"batch", "fan_out", "backup"}
    assert found["command"]["batch"].startswith("python -m saguaro.bench.trends simulated-qwen3-32b --parts batch")
    assert "switch" in capsys.readouterr().out
