"""The numbers of the paper's figures (arXiv 2603.03251) for our pairs: by replay of recorded answers, by runs of the
simulated pairs under the real orchestrator, or by the analytic model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from saguaro.bench import tune
from saguaro.bench.replay import Scored
from saguaro.bench.speed import Setting, SpeedPlan, measure, timeline
from saguaro.bench.speed_command import devices_of, placed, report
from saguaro.bench.tune import Judge, Times
from saguaro.engines.base import fan_out_batch
from saguaro.engines.profile import Profile
from saguaro.llm import LLM
from saguaro.orchestrator import analysis, sampling
from saguaro.orchestrator.config import DeploymentConfig, SpeculationConfig, find_deployment, read_deployment
from saguaro.orchestrator.estimators import power_law
from saguaro.orchestrator.types import Backup, Mode, Rule
from saguaro.plugins.fan_out import FanOut
from saguaro.simulate import Pair, predict
from saguaro.simulate import Setting as Planned

FAN_OUTS = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.3)
BATCHES = (1, 2, 4, 8, 16)
DEVICES = (1, 2, 3, 4, 5, 6, 7, 8)
_BEYOND = 10**9  # rank of a token beyond the width
_TRACED = 64  # tokens of the answer that is drawn as a timeline

Answers = Sequence[dict[Rule, Scored]]
Rows = list[dict[str, Any]]

# Replays


def judge(answers: Answers, base: SpeculationConfig, times: Times, vocab_size: int) -> Judge:
    """Over the answers of one temperature. `geometric` is given what was measured on them."""
    found = tune.curves([scores["coupled"] for scores in answers], base.max_lookahead, base)
    return Judge(answers, times, replace(base, fan_out=tune.fitted(base, [found])), range(vocab_size))


def untimed(lookahead: int) -> Times:
    """For what depends on no time: a second for everything."""
    return Times(dict.fromkeys((0, lookahead), 1.0), {lookahead: 1.0}, dict.fromkeys((1, *FAN_OUTS), 1.0))


def times_of(target: Profile, draft: Profile, lookaheads: Sequence[int], budget: int) -> Times:
    """Of simulated models, as their profiles have them."""
    return Times(
        {k: target.seconds(k + 1) for k in (0, *lookaheads)},
        {k: draft.seconds(k + 1) for k in lookaheads},
        {rows: draft.seconds(rows) for rows in (1, budget)},
    )


def miss_curve(judge: Judge, rule: Rule, backup: Backup, lookahead: int) -> dict[str, Any]:
    """How often F guesses at every position miss the outcome of a speculation of the primary (`after_hit`) and of one
    of the backup (`after_miss`), with the power laws through that.

    Both are of rounds in which one of the two drafts always. `overall` is the hit rate of rounds in which a miss
    decides who drafts next, `chain` what Theorem 7 makes of the two rates.
    """

    def ranks(drafting: Backup) -> list[int]:
        """Of the bonus tokens among the guesses."""
        never = judge.setting(
            lookahead=lookahead, rule=rule, backup=drafting, fan_out={"policy": "uniform", "budget": 0}
        )
        rounds = chain.from_iterable(judge.rounds(never))
        return [_BEYOND if played.rank is None else played.rank for played in rounds]

    after_hit, after_miss = (np.array(ranks(drafting)) for drafting in ("primary", backup))
    points: Rows = []
    for fan_out in FAN_OUTS:
        lists = {"policy": "uniform", "budget": fan_out * (lookahead + 1)}
        setting = judge.setting(lookahead=lookahead, rule=rule, backup=backup, fan_out=lists)
        missed = [float((ranks >= fan_out).mean()) for ranks in (after_hit, after_miss)]
        points.append(
            {
                "fan_out": fan_out,
                "after_hit": missed[0],
                "after_miss": missed[1],
                "overall": float(judge.figures(setting).hit_rate),
                "chain": analysis.overall_hit_rate(1 - missed[0], 1 - missed[1]),
            }
        )
    return {
        "temperature": judge.scored[0]["coupled"].text.request.params.temperature,
        "rule": rule,
        "backup": backup,
        "lookahead": lookahead,
        "points": points,
        "rounds": {"after_hit": len(after_hit), "after_miss": len(after_miss)},
        "fits": {name: law(points, name) for name in ("after_hit", "after_miss")},
    }


def law(points: Rows, name: str) -> dict[str, float] | None:
    """c F^-r through the points that have misses, each weighing as much as it has."""
    seen = [(point["fan_out"], point[name]) for point in points if point[name]]
    if len(seen) < 2:
        return None
    guesses, misses = zip(*seen)
    fit = power_law(guesses, misses, misses)
    return {"scale": fit.curve.scale, "exponent": fit.curve.exponent, "r_squared": fit.r_squared}


def by_temperature(judges: Sequence[Judge], lookahead: int, budget: int) -> Rows:
    """sd with its best lookahead, and ssd with either list, under both rules: hit rate, and speed by Theorem 7."""
    rows: Rows = []
    for one in judges:
        temperature = one.scored[0]["coupled"].text.request.params.temperature
        rules: tuple[Rule, ...] = ("coupled", "ratio") if "ratio" in one.scored[0] else ("coupled",)
        for rule in rules:
            alone = [replace(one.setting(lookahead=k, rule=rule), mode="sd") for k in sorted(one.times.trunk)]
            settings = {"sd": max(alone, key=one.speed)}
            for policy in ("uniform", "geometric"):
                lists = {"policy": policy, "budget": budget}
                settings[policy] = one.setting(lookahead=lookahead, rule=rule, fan_out=lists)
            for name, setting in settings.items():
                choice = one.judge(setting)
                rows.append({"temperature": temperature, "rule": rule, "lists": name} | _judged(choice))
    return rows


def trade_off(judge: Judge, lookahead: int, budget: int) -> Rows:
    """Acceptance and hit rate as C falls."""
    lists = {"policy": "uniform", "budget": budget}
    whole = judge.setting(lookahead=lookahead, rule="ratio", fan_out=lists)
    settings = [replace(whole, cache_aware=scale) for scale in tune.SCALES]
    return [{"C": s.cache_aware} | _judged(judge.judge(s)) for s in settings]


def _judged(choice: tune.Choice) -> dict[str, Any]:
    kept = ("lookahead", "budget", "acceptance", "hit_rate", "tokens_per_round", "t_p", "t_b", "speed")
    return {name: value for name, value in asdict(choice).items() if name in kept}


def residual_example() -> dict[str, Any]:
    """Two tokens each take a hair more than half of the residual: cache-aware sampling moves it to where it is guessed.

    The constructed case of Theorem 19, exactly. `hit_rate` given a rejection, by the number of guesses.
    """
    target, scale, fan_out = np.array([0.48, 0.48, 0.02, 0.02]), 47 / 147, 2
    plain = np.array([0.49, 0.49, 0.01, 0.01])
    aware = np.asarray(sampling.cache_aware(plain, fan_out, scale), dtype=np.float64)
    return {"C": scale, "fan_out": fan_out, "p": target.tolist()} | {
        name: {
            "q": q.tolist(),
            "residual": (np.maximum(target - q, 0) / np.maximum(target - q, 0).sum()).tolist(),
            "acceptance": float(np.minimum(target, q).sum()),
            "hit_rate": {f: float(analysis.residual_hit_rate(target, q, f)) for f in (1, 2)},
        }
        for name, q in (("plain", plain), ("cache_aware", aware))
    }


# Runs


def configured(deployment: str, **speculation: Any) -> DeploymentConfig:
    """A deployment with changes to its speculation; those of `fan_out` key by key."""
    config = read_deployment(find_deployment(deployment))
    fan_out = replace(config.speculation.fan_out, **speculation.pop("fan_out", {}))
    return replace(config, speculation=replace(config.speculation, fan_out=fan_out, **speculation))


def speeds(config: DeploymentConfig, deployment: str, plan: SpeedPlan, store: Any, progress: Any) -> dict[str, Any]:
    """`saguaro bench` of a changed deployment: its report, and the spans of one answer of each mode with a draft."""
    path = find_deployment(deployment)
    with LLM(placed(config, "own", plan, path), store=store) as llm:
        runs, sweep = measure(plan, {"own": llm}, devices_of(config, path, store), progress)
        best = {run.setting.mode: run.setting for run in runs if run.setting.batch == plan.batches[0]}
        text = next(iter(plan.prompts.values()))[0]
        drafting: list[Mode] = [mode for mode in ("sd", "ssd") if mode in best]
        traces = {mode: _trace(llm, best[mode], text) for mode in drafting}
    return report(runs, sweep) | {"traces": traces}


def _trace(llm: LLM, setting: Setting, text: str) -> list[tuple[str, int, int]]:
    """(name, start, end) of each span, nanoseconds from the first."""
    spans = timeline(llm, setting, text, _TRACED)
    first = min(span.start for span in spans)
    return [(span.name, span.start - first, span.end - first) for span in spans]


# The model


def by_devices(target: Profile, draft: Profile, lookahead: int, budget: int, batch: int) -> Rows:
    """Predicted speeds with more draft devices, over plain decoding and over sd, which has one draft device.

    Times are those of the profiles at this batch.
    """
    agreement = draft.agreement
    assert agreement is not None, "a draft's profile says how it differs from its target"
    rows = batch * (lookahead + 1)
    step, wide = draft.seconds(1), draft.seconds(rows)
    pair = Pair(
        acceptance=agreement.acceptance,
        draft_step=step / target.seconds(rows),
        row_cost=(wide / step - 1) / (rows - 1),
        miss_scale=agreement.miss_scale,
        miss_exponent=agreement.miss_exponent,
    )
    found = [predict(pair, Planned(lookahead, budget, batch, devices)) for devices in DEVICES]
    return [
        {"devices": p.setting.devices, "sd": p.sd, "ssd": p.ssd, "p_hit": p.p_hit, "t_p": p.t_p, "backup": p.backup}
        for p in found
    ]


# The mask


def mask_example(counts: tuple[int, ...] = (4, 4, 4, 4), prefix: int = 6, depth: int = 2) -> dict[str, Any]:
    """What each branch sees at a step, as engines get it: a row of 0 and 1 for each."""
    fan_out = FanOut(counts)
    columns = prefix + len(counts) + fan_out.branches * (depth + 1)
    tokens = torch.zeros(fan_out.branches, dtype=torch.int64)
    mask = fan_out_batch(tokens, [fan_out], [prefix], [range(columns)], depth, 1).fan_out
    assert mask is not None
    rows = ["".join(map(str, row)) for row in mask.dense(columns).int().tolist()]
    return {"counts": counts, "prefix": prefix, "depth": depth, "forks": fan_out.forks, "rows": rows}


# The paper's own numbers


def published(name: str) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """(our kind of prompts, the paper's set, its decode tokens/s by mode): batch 1, greedy, five H100."""
    for kind, dataset in zip(_KINDS, _SETS):
        place = _SETS.index(dataset)
        yield kind, dataset, {mode: values[place] for mode, values in _PUBLISHED[name].items()}


_KINDS = ("code", "maths", "chat", "instructions")
_SETS = ("HumanEval", "GSM8K", "UltraFeedback", "Alpaca")
_PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "simulated-llama-3.1-70b": {"ar": (54.7,) * 4, "sd": (176, 188, 138, 145), "ssd": (283, 301, 215, 224)},
    "simulated-qwen3-32b": {"ar": (88.8,) * 4, "sd": (146, 152, 122, 127), "ssd": (222, 234, 174, 185)},
}
