"""`saguaro tune`: measure a pair on this machine and these prompts, and recommend a `speculation:` section."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import saguaro
from saguaro.bench import tune
from saguaro.bench.load import read_prompts, shipped_prompts
from saguaro.bench.ranked_replay import AT_ONCE
from saguaro.bench.replay import Scored, Text
from saguaro.bench.tune_report import Run, check_figure, plot, tables
from saguaro.engines import load_engine
from saguaro.engines.base import Engine
from saguaro.engines.manifest import Manifest
from saguaro.errors import ConfigError
from saguaro.llm import LLM, anchored, build_engines
from saguaro.orchestrator.config import (
    DeploymentConfig,
    FanOutConfig,
    SpeculationConfig,
    find_deployment,
    read_deployment,
)
from saguaro.orchestrator.types import Mode, RequestSampling, Rule, SamplingParams

_BLOCK = 16
# Shares of the time: until when answers are taken, looked at, and forwards timed; the rest confirms.
_ANSWERS, _SCORED, _TIMED = 0.35, 0.55, 0.65
_PASSES = 5  # of the clock at least
_CONFIRMED = 2  # prompts at least


@dataclass(frozen=True)
class TunePlan:
    """How much is measured. `seconds` bounds the measuring roughly: what has begun is finished."""

    prompts: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 96
    seconds: float = 600.0
    lookaheads: tuple[int, ...] = tune.LOOKAHEADS
    budgets: tuple[int, ...] = tune.BUDGETS
    ranked_budgets: tuple[int, ...] = tune.RANKED_BUDGETS
    least_probabilities: tuple[float, ...] = tune.LEAST_PROBABILITIES  # of the policy `ranked`; empty: without it

    def __post_init__(self) -> None:
        def check(valid: bool, name: str, limit: str) -> None:
            if not valid:
                raise ConfigError(f"{name} must be {limit}, got {getattr(self, name)}")

        check(bool(self.prompts), "prompts", "at least one text")
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        check(bool(self.temperatures) and distinct, "temperatures", "one or more different numbers")
        check(16 <= self.max_tokens <= 4096, "max_tokens", "between 16 and 4096")
        check(10 <= self.seconds <= 86400, "seconds", "between 10 and 86400")

    @property
    def all_budgets(self) -> tuple[int, ...]:
        return tuple(sorted({*self.budgets, *(self.ranked_budgets if self.least_probabilities else ())}))


class _Bar:
    """A progress bar over the stages, on standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._stage = ""

    def __call__(self, stage: str, share: float) -> None:
        if stage != self._stage:
            if self._task is not None:
                self._progress.update(self._task, completed=1.0)
            self._stage, self._task = stage, self._progress.add_task(stage, total=1.0)
        if self._task is not None:
            self._progress.update(self._task, completed=min(share, 1.0))


def run(
    deployment: str,
    store: Path,
    plan: TunePlan,
    *,
    plot_file: Path | None = None,
    write: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure, then print a table (or one JSON object) and the section, which `write` takes as a file."""
    if plot_file is not None:
        check_figure(plot_file)
    path = find_deployment(deployment)
    config = read_deployment(path)
    if config.draft is None:
        raise ConfigError(f"{path} has no draft: there is nothing to tune in plain decoding")
    # The draft model is looked at even where the deployment does without it.
    config = replace(config, speculation=replace(config.speculation, mode="ssd"))
    target, draft = build_engines(config, path, store)
    for name, directory in (("target", target), ("draft", draft)):
        if directory is not None:
            tune.check_ranks(name, Manifest.load(directory).tp)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        result = _measure(anchored(config, path), target, draft or target, store, plan, _Bar(progress))
    section = section_of(result["speculation"])
    if plot_file is not None:
        plot(result["sweeps"], result["times"], plot_file)
    if write is not None:
        _write(write, section)
    console = Console()
    if as_json:
        console.file.write(json.dumps(_plain(result | {"section": section}), allow_nan=False) + "\n")
        return
    if not console.is_terminal:
        console.width = 160
    console.print(*tables(result["sweeps"], result["times"], result["confirmed"]))
    console.print(section, highlight=False, markup=False)


def _measure(
    config: DeploymentConfig, target: Path, draft: Path, store: Path, plan: TunePlan, bar: _Bar
) -> dict[str, Any]:
    start = time.monotonic()
    base = config.speculation
    scored, engines, prompts = score_answers(config, (target, draft), store, plan, start, bar)
    text = max((s["coupled"].text for s in scored[-1]), key=lambda t: len(t.answer))
    if len(text.answer) < max(plan.lookaheads):
        raise ConfigError(
            f"no answer at temperature {plan.temperatures[-1]:g} has {max(plan.lookaheads)} tokens: give prompts "
            "with longer answers"
        )
    threads = (config.target.threads, config.draft.threads if config.draft else 1)
    watch = tune.Stopwatch(engines[0], engines[1], text, threads, base.width)
    until = start + _TIMED * plan.seconds
    times = tune.measure_times(watch, plan.lookaheads, plan.all_budgets, until, _PASSES, bar)
    ordinary = range(engines[1].vocab_size)
    del engines, watch
    bar("which setting would have been the fastest", 0.0)
    longest_lookahead = max(plan.lookaheads)
    found = [tune.curves([s["coupled"] for s in texts], longest_lookahead, base) for texts in scored]
    base = replace(base, fan_out=tune.fitted(base, found))
    judges = [tune.Judge(texts, times, base, ordinary) for texts in scored]
    chosen = tune.best(judges, plan.lookaheads, plan.budgets)
    ranked = tune.best_ranked(judges, plan.lookaheads, plan.ranked_budgets, plan.least_probabilities)
    swept = [tune.sweeps(j, chosen, f, plan.lookaheads, plan.budgets, ranked) for j, f in zip(judges, found)]
    speculation = tune.recommended(judges, chosen, plan.lookaheads, ranked)
    confirmed = _confirm(config, store, speculation, swept, prompts, plan, start + plan.seconds, bar)
    bar("done", 1.0)
    return {
        "deployment": config.name,
        "version": saguaro.__version__,
        "command": shlex.join(["saguaro", *sys.argv[1:]]),
        "machine": {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "plan": asdict(plan) | {"prompts": len(plan.prompts)},
        "seconds": time.monotonic() - start,
        "times": times,
        "sweeps": swept,
        "speculation": speculation,
        "confirmed": confirmed,
    }


def score_answers(
    config: DeploymentConfig, models: tuple[Path, Path], store: Path, plan: TunePlan, start: float, bar: tune.Progress
) -> tuple[list[list[dict[Rule, Scored]]], list[Engine], list[list[int]]]:
    """Answers of the deployment and what target and draft think of them, by temperature; both engines, with room for
    every lookahead and budget of the plan; the plan's prompts as tokens.
    """
    with LLM(config, store=store) as llm:
        answers = _answers(llm, plan, config.serving.max_sequences, start + _ANSWERS * plan.seconds, bar)
        prompts = [llm.encode([{"role": "user", "content": text}]) for text in plan.prompts]
    longest = max(len(text.prompt) + len(text.answer) for texts in answers for text in texts)
    lookahead = max(plan.lookaheads)
    columns = longest + lookahead + max(*plan.all_budgets, lookahead * min(AT_ONCE, plan.max_tokens)) + 1
    engines = [load_engine(path, block_size=_BLOCK, num_blocks=-(-columns // _BLOCK)) for path in models]
    width = max(config.speculation.width, max(plan.all_budgets) + 2)
    torch.set_num_threads(config.target.threads)
    until = start + _SCORED * plan.seconds
    ahead = lookahead if plan.least_probabilities else 0
    scored = tune.score_texts(engines[1], engines[0], answers, width, until, bar, ahead)
    return scored, engines, prompts


def _answers(llm: LLM, plan: TunePlan, wave: int, deadline: float, bar: tune.Progress) -> list[list[Text]]:
    """By temperature. Several prompts at a time, as many waves as there is time for, one at least."""
    found: list[list[Text]] = [[] for _ in plan.temperatures]
    began = time.monotonic()
    for first in range(0, len(plan.prompts), wave):
        for texts, temperature in zip(found, plan.temperatures):
            now = time.monotonic()
            done = first / len(plan.prompts)
            bar("answers of the deployment as it is", max(done, (now - began) / max(deadline - began, 1e-9)))
            if now > deadline and texts:
                return found
            chats = [[{"role": "user", "content": text}] for text in plan.prompts[first : first + wave]]
            one = SamplingParams(temperature=temperature, max_tokens=plan.max_tokens)
            each = [replace(one, seed=first + number) for number in range(len(chats))]
            for params, result in zip(each, llm.generate(chats, each)):
                prompt = tuple(result.prompt_token_ids)
                request = RequestSampling(params, params.seed or 0, len(prompt))
                texts.append(Text(prompt, tuple(result.token_ids), request))
    return found


def _confirm(
    config: DeploymentConfig,
    store: Path,
    speculation: SpeculationConfig,
    swept: Sequence[tune.Sweeps],
    prompts: Sequence[list[int]],
    plan: TunePlan,
    deadline: float,
    bar: _Bar,
) -> list[Run]:
    """The recommended section, as ssd, beside plain decoding: prompt after prompt, in turns.

    And beside the best sd, if the draft model is the backup: with another one sd would draft with that.
    """
    alone = [max(sweep.sd, key=lambda choice: choice.speed).lookahead for sweep in swept]
    longest = max(speculation.max_lookahead, *alone)
    runs: list[Run] = []
    began = time.monotonic()
    bar("the recommended setting beside plain decoding", 0.0)
    wanted = replace(config, speculation=replace(speculation, mode="ssd", lookahead=longest))
    with LLM(wanted, store=store) as llm:
        for number, prompt in enumerate(prompts):
            for temperature, best_sd in zip(plan.temperatures, alone):
                share = (time.monotonic() - began) / max(deadline - began, 1e-9)
                bar("the recommended setting beside plain decoding", share)
                modes: list[tuple[Mode, int]] = [("ar", 1), ("ssd", speculation.max_lookahead)]
                if speculation.backup == "primary":
                    modes.insert(1, ("sd", best_sd))
                for mode, lookahead in modes if number % 2 else modes[::-1]:
                    params = SamplingParams(temperature=temperature, max_tokens=plan.max_tokens // 2, seed=number)
                    result = llm.generate(prompt, params, mode=mode, lookahead=lookahead)[0]
                    runs.append(Run(temperature, number, mode, lookahead, result.stats))
            if number + 1 >= _CONFIRMED and time.monotonic() > deadline:
                break
    return runs


def section_of(speculation: SpeculationConfig) -> str:
    """The section as YAML: what was tuned, and what differs from the defaults."""
    tuned = ("mode", "lookahead", "fan_out", "rule", "backup")
    keys: dict[str, Any] = {}
    for name, value in asdict(speculation).items():
        if name == "fan_out":
            own = ["policy", "budget", "acceptance", "miss_scale", "miss_exponent"]
            own += ["least_probability"] if speculation.fan_out.policy == "ranked" else []
            keys[name] = {k: v for k, v in value.items() if k in own or v != getattr(FanOutConfig(), k)}
        elif name in tuned or value != getattr(SpeculationConfig(), name):
            keys[name] = value
    return yaml.safe_dump({"speculation": keys}, sort_keys=False)


def _write(path: Path, section: str) -> None:
    try:
        path.write_text(section, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write: {path} cannot be written: {error}") from error


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, numbers that JSON does not know as null, and five digits."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if value - value == 0 else None
    return value


def plan_of(
    prompts: Path | None, temperatures: Sequence[float], max_tokens: int | None, seconds: float | None, quick: bool
) -> TunePlan:
    """What the command line asked for; `quick` is a minute with few settings, for a first look."""
    texts = read_prompts(prompts) if prompts else shipped_prompts()
    usual = (
        TunePlan(
            texts,
            seconds=60.0,
            max_tokens=32,
            lookaheads=(1, 2, 4),
            budgets=(1, 4, 8),
            ranked_budgets=(8,),
            least_probabilities=(0.08, 0.02),
        )
        if quick
        else TunePlan(texts)
    )
    return replace(
        usual,
        prompts=texts[:8] if quick else texts,
        temperatures=tuple(temperatures),
        max_tokens=usual.max_tokens if max_tokens is None else max_tokens,
        seconds=usual.seconds if seconds is None else seconds,
    )
