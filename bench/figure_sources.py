"""What the paper's figures are made of: recorded answers, measured speeds and committed results.

What takes long is kept in a folder: made when it is first asked for, and read by every figure after that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from saguaro.bench import figure_data as data
from saguaro.bench import recorded
from saguaro.bench.load import shipped_prompts
from saguaro.bench.speed import SpeedPlan, prompts_by_kind
from saguaro.bench.tune import Judge, Times
from saguaro.bench.tune_command import TunePlan
from saguaro.errors import ConfigError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.types import Mode

Document = dict[str, Any]
REAL, LLAMA, QWEN = "qwen-coder-cpu", "simulated-llama-3.1-70b", "simulated-qwen3-32b"
_TUNED = "tune_qwen_coder_cpu.json"
_BENCHES = {
    REAL: "bench_qwen_coder_cpu.json",
    LLAMA: "bench_simulated_llama.json",
    QWEN: "bench_simulated_qwen3.json",
}
_PLOTTED = ("batch", "temperature", "placement", "swept", "kinds")  # what `speed_plots` looks at, beside speeds
_RECORDED = {REAL: (8, 48), QWEN: (16, 256)}  # answers of each temperature, and tokens of each
_TOKENS = 64  # of each answer of a run


class Sources:
    """What figures are made of. Raises ConfigError for a file that cannot be read."""

    def __init__(self, store: Path, folder: Path, results: Path, progress: Callable[[str], None]) -> None:
        self.store = store
        self._folder = folder
        self._results = results
        self._progress = progress

    @cached_property
    def times(self) -> Times:
        """Of the real pair's forwards, as `saguaro tune --json` wrote them."""
        found = self._committed(_TUNED)["times"]
        return Times(*({int(key): s for key, s in found[name].items()} for name in ("verify", "trunk", "step")))

    def bench(self, deployment: str) -> Document:
        """What `saguaro bench` wrote of a quiet machine."""
        found = self._committed(_BENCHES[deployment])
        return {key: found[key] for key in ("command", "machine", "ratios")} | {"runs": as_plotted(found["runs"])}

    def _committed(self, name: str) -> Document:
        path = self._results / name
        try:
            document: Document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--results: {path} cannot be read: {error}") from None
        return document

    def judges(self, deployment: str, temperatures: Sequence[float], times: Times) -> list[Judge]:
        """Over recorded answers, one of each temperature; those that are missing are recorded first."""
        files = {t: self._folder / f"answers-{deployment}-T{t:g}.json" for t in temperatures}
        if missing := tuple(t for t, file in files.items() if not file.is_file()):
            count, tokens = _RECORDED[deployment]
            plan = TunePlan(shipped_prompts()[:count], missing, tokens, seconds=86400, least_probabilities=())
            found = recorded.record(deployment, self.store, plan, lambda stage, _: self._progress(stage))
            for temperature, document in found.items():
                self._write(files[temperature], document)
        base = data.configured(deployment).speculation
        loaded = [recorded.load(file) for file in files.values()]
        return [data.judge(answers, base, times, about["vocab_size"]) for answers, about in loaded]

    def speeds(self, deployment: str) -> Document:
        """ar, sd and ssd, both with the deployment's lookahead, by kind of prompt and batch."""
        config = data.configured(deployment)
        plan = self._plan(config, batches=data.BATCHES)
        return self._measured(f"speeds-{deployment}", deployment, config, plan)

    def backups(self, deployment: str) -> list[Document]:
        """ssd with one guess at each position and either backup, and sd, by batch."""
        rows: list[Document] = []
        for backup in ("primary", "random"):
            lookahead = data.configured(deployment).speculation.max_lookahead
            lists = {"policy": "uniform", "budget": lookahead + 1}
            config = data.configured(deployment, backup=backup, fan_out=lists)
            modes: tuple[Mode, ...] = ("sd", "ssd") if backup == "primary" else ("ssd",)
            plan = self._plan(config, modes=modes, batches=data.BATCHES)
            found = self._measured(f"batches-{deployment}-{backup}", deployment, config, plan)
            # Of sd the backup is what always drafts.
            rows += [row | {"backup": backup if row["mode"] == "ssd" else None} for row in found["runs"]]
        return rows

    def _plan(self, config: DeploymentConfig, **options: Any) -> SpeedPlan:
        lookahead = config.speculation.max_lookahead
        return SpeedPlan(prompts_by_kind(), lookahead, max_tokens=_TOKENS, repeats=1, **options)

    def _measured(self, name: str, deployment: str, config: DeploymentConfig, plan: SpeedPlan) -> Document:
        path = self._folder / f"{name}.json"
        if not path.is_file():
            self._write(path, data.speeds(config, deployment, plan, self.store, self._progress))
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        return document

    def _write(self, path: Path, document: Document) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document), encoding="utf-8")


def kept(row: Document, *more: str) -> Document:
    """Of a row of `saguaro bench`."""
    names = ("mode", "lookahead", *more, "tokens_per_second", "total_tokens_per_second")
    return {name: row[name] for name in (*names, "acceptance_length", "p_hit", "t_p", "t_b")}


def as_plotted(rows: Sequence[Document]) -> list[Document]:
    return [kept(row, *_PLOTTED) for row in rows]
