"""Plain, speculative and speculative speculative decoding of one deployment, measured side by side in one run.

Everything is interleaved: each prompt goes through every setting before the next one comes, in an order that rotates,
so that what else the machine does meets all of them alike. Ratios are of runs over the same prompts; figures are
medians.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal

import yaml
from prometheus_client.parser import text_string_to_metric_families

from saguaro.errors import ConfigError
from saguaro.llm import LLM, Result
from saguaro.orchestrator.config import MAX_LOOKAHEAD
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import MODES, Mode, SamplingParams

Placement = Literal["own", "all"]
PLACEMENTS: tuple[Placement, ...] = ("own", "all")
_DRAFTED = "saguaro_draft_tokens_total"
_ACCEPTED = "saguaro_accepted_tokens_total"


@dataclass(frozen=True)
class Setting:
    """How a batch of prompts is decoded. `own`: each model on cores of its own. `all`: both on all cores."""

    mode: Mode
    lookahead: int  # 0 for ar
    batch: int = 1
    temperature: float = 0.0
    placement: Placement = "own"

    def __str__(self) -> str:
        lookahead = f" K={self.lookahead}" if self.lookahead else ""
        return f"{self.mode}{lookahead} batch {self.batch} T={self.temperature:g} {self.placement}"


@dataclass(frozen=True)
class SpeedPlan:
    """What to measure. `sd_lookaheads` are tried on the first prompts; the fastest one stands for sd."""

    prompts: Mapping[str, tuple[str, ...]]  # by kind
    lookahead: int  # of ssd; 0: as the deployment decides from round to round
    modes: tuple[Mode, ...] = MODES
    sd_lookaheads: tuple[int, ...] = ()  # none: that of ssd
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    placements: tuple[Placement, ...] = ("own",)
    max_tokens: int = 96
    repeats: int = 3

    def __post_init__(self) -> None:
        def check(valid: bool, name: str, limit: str) -> None:
            if not valid:
                raise ConfigError(f"{name} must be {limit}, got {getattr(self, name)}")

        check(bool(self.prompts) and all(self.prompts.values()), "prompts", "at least one text of every kind")
        check(bool(self.modes) and set(self.modes) <= set(MODES), "modes", f"among {', '.join(MODES)}")
        check(all(1 <= k <= MAX_LOOKAHEAD for k in self.sd_lookaheads), "sd_lookaheads", f"1 to {MAX_LOOKAHEAD}")
        check(bool(self.batches) and all(1 <= n <= 256 for n in self.batches), "batches", "between 1 and 256")
        check(bool(self.temperatures) and all(0 <= t <= 5 for t in self.temperatures), "temperatures", "0 to 5")
        check(bool(self.placements) and set(self.placements) <= set(PLACEMENTS), "placements", "own, all or both")
        check(self.max_tokens >= 2, "max_tokens", "at least 2")
        check(self.repeats >= 1, "repeats", "at least 1")


@dataclass(frozen=True)
class Figures:
    """Of one batch, or medians over several. None where there is nothing to measure, never a zero."""

    tokens_per_second: float | None  # of one stream, decoding
    total_tokens_per_second: float | None  # of all streams of the batch
    tokens_per_second_per_device: float | None  # the total over the ranks of the models in use
    ttft_ms: float | None
    acceptance_length: float | None
    p_hit: float | None
    e_hit: float | None
    e_miss: float | None
    t_p: float | None
    t_b: float | None
    verify_ms: float | None
    wait_ms: float | None
    idle_ms: float | None  # of the speculator, per round
    branches: float | None  # mean number prepared for a sequence in a round


@dataclass(frozen=True)
class SpeedRun:
    """One batch of prompts in one setting."""

    kind: str
    repeat: int
    setting: Setting
    figures: Figures
    tokens: tuple[tuple[int, ...], ...]  # of each answer
    near_ties: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...] = ()  # draft tokens that were verified, by place in the speculation
    accepted: tuple[int, ...] = ()


def prompts_by_kind(per_kind: int | None = None) -> dict[str, tuple[str, ...]]:
    """The shipped prompts: code, maths, chat, instructions."""
    kinds = yaml.safe_load((resources.files("saguaro.bench") / "prompts.yaml").read_text())
    return {kind: tuple(texts[:per_kind]) for kind, texts in kinds.items()}


def measure(
    plan: SpeedPlan, llms: Mapping[Placement, LLM], devices: Mapping[Mode, int], progress: Callable[[str], None]
) -> tuple[list[SpeedRun], list[SpeedRun]]:
    """All runs of the plan, and those of the sweep that chose sd's lookahead. `devices` counts the ranks of a mode."""
    sweep: list[SpeedRun] = []
    settings: list[Setting] = []
    for placement, temperature, batch in itertools.product(plan.placements, plan.temperatures, plan.batches):
        base = Setting("ar", 0, batch, temperature, placement)
        tried = [replace(base, mode="sd", lookahead=k) for k in plan.sd_lookaheads if "sd" in plan.modes]
        runs = list(_runs(plan, tried, 1, llms, devices, progress)) if len(tried) > 1 else []
        sweep += runs
        best = {"ar": 0, "sd": _fastest(runs).lookahead if runs else (*plan.sd_lookaheads, plan.lookahead)[0]}
        settings += [
            replace(base, mode=mode, lookahead=best.get(mode, plan.lookahead)) for mode in MODES if mode in plan.modes
        ]
    return list(_runs(plan, settings, plan.repeats, llms, devices, progress)), sweep


def _runs(
    plan: SpeedPlan,
    settings: Sequence[Setting],
    repeats: int,
    llms: Mapping[Placement, LLM],
    devices: Mapping[Mode, int],
    progress: Callable[[str], None],
) -> Iterator[SpeedRun]:
    for setting in settings:  # what is compiled, allocated or guessed for the first time is nobody's speed
        progress(f"warming up {setting}")
        _batch(plan, setting, llms[setting.placement], next(iter(plan.prompts.values())), 0, 8)
    for turn, (repeat, kind) in enumerate(itertools.product(range(repeats), plan.prompts)):
        for setting in {s.placement: s for s in settings}.values():  # nobody shall gain from another's prefix cache
            _batch(
                plan,
                replace(setting, mode=plan.modes[-1], lookahead=plan.lookahead),
                llms[setting.placement],
                plan.prompts[kind],
                repeat,
                2,
            )
        for place in range(len(settings)):
            setting = settings[(turn + place) % len(settings)]
            progress(f"{kind}, {repeat + 1} of {repeats}: {setting}")
            llm = llms[setting.placement]
            before = _counters(llm)
            results = _batch(plan, setting, llm, plan.prompts[kind], repeat)
            counted = _counters(llm) - before
            longest = max((int(place) for (_, place), tokens in counted.items() if tokens), default=0)
            places = [str(place + 1) for place in range(setting.lookahead or longest)] if setting.mode != "ar" else []
            yield SpeedRun(
                kind,
                repeat,
                setting,
                _figures(results, devices[setting.mode]),
                tuple(tuple(result.token_ids) for result in results),
                tuple(result.stats.near_ties for result in results),
                tuple(int(counted[_DRAFTED, place]) for place in places),
                tuple(int(counted[_ACCEPTED, place]) for place in places),
            )


def _batch(
    plan: SpeedPlan, setting: Setting, llm: LLM, texts: Sequence[str], repeat: int, max_tokens: int | None = None
) -> list[Result]:
    """One batch at once: prompts of one kind in turn, others in each repeat, answers of full length."""
    chosen = itertools.islice(itertools.cycle(texts), repeat * setting.batch, (repeat + 1) * setting.batch)
    return llm.generate(
        [[{"role": "user", "content": text}] for text in chosen],
        SamplingParams(
            temperature=setting.temperature, max_tokens=max_tokens or plan.max_tokens, ignore_eos=True, seed=repeat
        ),
        mode=setting.mode,
        lookahead=setting.lookahead or None,
    )


def _counters(llm: LLM) -> Counter[tuple[str, str]]:
    """Draft tokens verified and accepted, by name and place in the speculation."""
    counted: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(llm.metrics()):
        for sample in family.samples:
            if sample.name in (_DRAFTED, _ACCEPTED):
                counted[sample.name, sample.labels["position"]] += sample.value  # type: ignore[assignment]
    return counted


def _figures(results: Sequence[Result], devices: int) -> Figures:
    """Means over the streams of one batch."""

    def mean(values: Iterator[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    stats = [result.stats for result in results]
    speed = mean(s.tokens_per_second for s in stats)
    total = speed * len(stats) if speed is not None else None
    return Figures(
        tokens_per_second=speed,
        total_tokens_per_second=total,
        tokens_per_second_per_device=total / devices if total is not None else None,
        ttft_ms=mean(s.ttft_ms for s in stats),
        acceptance_length=mean(s.acceptance_length for s in stats),
        p_hit=mean(s.hit_rate for s in stats),
        e_hit=mean(s.e_hit for s in stats),
        e_miss=mean(s.e_miss for s in stats),
        t_p=mean(s.t_p for s in stats),
        t_b=mean(s.t_b for s in stats),
        verify_ms=mean(s.verify_ms for s in stats),
        wait_ms=mean(s.wait_ms for s in stats),
        idle_ms=mean(s.idle_ms for s in stats),
        branches=mean(s.branches for s in stats),
    )


def _fastest(runs: Sequence[SpeedRun]) -> Setting:
    speeds: dict[Setting, list[float]] = {}
    for run in runs:
        speeds.setdefault(run.setting, []).append(run.figures.tokens_per_second or 0.0)
    return max(speeds, key=lambda setting: statistics.median(speeds[setting]))


def medians(runs: Sequence[SpeedRun]) -> Figures:
    """Median of each figure over the runs that have it."""

    def median(name: str) -> float | None:
        known = [value for run in runs if (value := getattr(run.figures, name)) is not None]
        return statistics.median(known) if known else None

    return Figures(**{name: median(name) for name in Figures.__dataclass_fields__})


def ratios(runs: Sequence[SpeedRun], one: Mode, other: Mode) -> list[float]:
    """Speed of `one` over that of `other`, for every batch of prompts that both decoded."""

    def key(run: SpeedRun) -> tuple[object, ...]:
        return run.kind, run.repeat, replace(run.setting, mode="ar", lookahead=0)

    speeds = {key(run): run.figures.tokens_per_second for run in runs if run.setting.mode == other}
    pairs = [(run.figures.tokens_per_second, speeds.get(key(run))) for run in runs if run.setting.mode == one]
    return [ours / theirs for ours, theirs in pairs if ours and theirs]


def partings(runs: Sequence[SpeedRun]) -> tuple[int, int]:
    """Greedy answers that differ from plain decoding's: at a near-tie of the target, and otherwise (never)."""
    plain = {(r.kind, r.repeat, r.setting.batch, r.setting.placement): r for r in runs if r.setting.mode == "ar"}
    near = other = 0
    for run in runs:
        base = plain.get((run.kind, run.repeat, run.setting.batch, run.setting.placement))
        if run.setting.temperature > 0 or base is None or base.setting.temperature > 0:
            continue
        for mine, theirs, my_ties, their_ties in zip(
            run.tokens, base.tokens, run.near_ties, base.near_ties, strict=True
        ):
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
            if place is not None:
                tie = place in (*my_ties, *their_ties)
                near, other = near + tie, other + (not tie)
    return near, other


def timeline(llm: LLM, setting: Setting, text: str, max_tokens: int) -> tuple[Span, ...]:
    """What both roles did during one answer."""
    result = llm.generate(
        [[{"role": "user", "content": text}]],
        SamplingParams(temperature=setting.temperature, max_tokens=max_tokens, ignore_eos=True, seed=0),
        mode=setting.mode,
        lookahead=setting.lookahead or None,
        trace=True,
    )[0]
    return result.spans
