"""Which `speculation:` section suits a pair of models on this machine and these prompts.

Three things are measured: answers of the running deployment, what both models think at each position of them, and how
long the forwards of a round take. The first two decide by `replay` how any setting would have fared, the third how long
its rounds would have taken; the best is then run beside plain decoding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saguaro.bench.ranked_replay import RankedReplay, roll_out
from saguaro.bench.replay import Figures, Played, Replay, Scored, Text, answer_logits, score
from saguaro.bench.tune_batches import Predicted, predictions
from saguaro.engines.base import Engine, causal_batch
from saguaro.errors import ConfigError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig
from saguaro.orchestrator.drafters.backups import text_drafter
from saguaro.orchestrator.drafters.base import Guess, Trunk
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.estimators import Estimators, Fit, GuessCurve
from saguaro.orchestrator.fan_out_policy import Lists, uniform
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.types import TEXT_BACKUPS, Backup, Outcome, Rule, Speculation
from saguaro.plugins.fan_out import FanOut

LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8)
BUDGETS = (1, 2, 4, 8, 16, 32)
SCALES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)
GUESSES = (1, 2, 3, 4, 8, 16)
RANKED_BUDGETS = (8, 16)
LEAST_PROBABILITIES = (0.08, 0.04, 0.02, 0.01)
_LEAST = 4  # texts of a temperature that are looked at, whatever the time
_SAMPLES = 1000  # of a bootstrap
_PLAYS = 8  # of each text under `ratio`, where rounds are drawn
_WORTH = 1.01  # a larger lookahead or budget has to be faster by so much

Progress = Callable[[str, float], None]  # what is being done, and how much of it is


@dataclass(frozen=True)
class Estimate:
    """A mean over texts and the bounds of its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RoundTime:
    """Mean seconds of rounds: to verify, to prepare meanwhile, to draft after a miss, and of all of it."""

    verify: float
    prepare: float
    backup: float
    whole: float


@dataclass(frozen=True)
class Times:
    """Seconds, medians. A round prepares for one trunk forward and K steps of all branches."""

    verify: dict[int, float]  # by lookahead: one forward of the target over K+1 rows, and its decision
    trunk: dict[int, float]  # by lookahead: one forward of the draft over K+1 rows, and the guesses
    step: dict[int, float]  # by branches: one forward of the draft over so many rows

    def prepare(self, lookahead: int, budget: int) -> float:
        return self.trunk[lookahead] + lookahead * self.step[budget]

    def draft(self, lookahead: int) -> float:
        """A speculation after a miss, or in sd."""
        return lookahead * self.step[1]

    def of_ranked(self, rounds: Sequence[Played]) -> RoundTime:
        """Of rounds that differ in length and in branches. The draft model is the backup."""
        drafted, missed = np.array([(r.drafted, not r.hit) for r in rounds], dtype=float).reshape(-1, 2).T
        verify = _between(self.verify, drafted)
        steps = _between({0: 0.0} | self.step, np.array([r.rows for r in rounds], ndmin=2))
        prepare = _between(self.trunk, drafted) + steps.sum(1)
        backup = missed * drafted * self.step[1]
        whole = np.maximum(verify, prepare) + backup
        return RoundTime(
            float(verify.mean()), float(prepare.mean()), float(backup.sum() / max(missed.sum(), 1)), float(whole.mean())
        )


def _between(seconds: Mapping[int, float], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """On the lines through what was measured."""
    return np.interp(at, sorted(seconds), [seconds[key] for key in sorted(seconds)])


@dataclass(frozen=True)
class Choice:
    """One setting and what it is expected to do at one temperature. Speeds are relative to plain decoding."""

    lookahead: int
    budget: int
    policy: str
    least_probability: float | None  # of the policy `ranked`
    rule: Rule
    cache_aware: float
    backup: Backup
    acceptance: Estimate  # of the tokens that were judged
    hit_rate: Estimate
    tokens_per_round: Estimate
    e_hit: float | None
    e_miss: float | None
    t_p: float
    t_b: float
    speed: float
    gain: Estimate | None = None  # of the hit rate over the one it is compared with, on the same texts


@dataclass(frozen=True)
class Curve:
    """P(the bonus token is not among the best F), and the power law c F^-r through it."""

    misses: dict[int, float]
    fit: Fit | None
    rounds: int


@dataclass(frozen=True)
class Sweeps:
    """Everything tried at one temperature."""

    temperature: float
    texts: int
    tokens: int
    acceptance: list[float]  # by position of the draft token, of those that were reached
    after_rejection: Curve
    after_acceptance: Curve
    sd: list[Choice]
    lookahead: list[Choice]  # each with its best budget
    budget: list[Choice]
    lists: list[Choice]
    ranked: list[Choice]  # of the best lookahead and budget of its own
    rules: list[Choice]
    cache_aware: list[Choice]
    backups: list[Choice]
    batches: list[Predicted]  # and replicas: never run


# What is measured


def score_texts(
    draft: Engine,
    target: Engine,
    answers: Sequence[Sequence[Text]],
    width: int,
    until: float,
    progress: Progress,
    lookahead: int = 0,
) -> list[list[dict[Rule, Scored]]]:
    """By temperature, as `answers` are, and by rule; at temperature 0 the rules are one. With a `lookahead` the draft
    drafts so far from every position, too.

    As many texts as there is time for, a few of each temperature at least.
    """
    found: list[list[dict[Rule, Scored]]] = [[] for _ in answers]
    longest = max(map(len, answers))
    for number in range(longest):
        for texts, scored in zip(answers, found):
            progress("what both models think of the answers", number / longest)
            if number >= len(texts) or number >= _LEAST and time.monotonic() > until:
                continue
            text = texts[number]
            said = answer_logits(draft, text)
            coupled = score(said, None, text, "coupled", width)
            if lookahead:
                coupled = replace(coupled, rollouts=roll_out(draft, text, said, lookahead, width))
            scores: dict[Rule, Scored] = {"coupled": coupled}
            if text.request.params.temperature > 0:
                scores["ratio"] = score(said, answer_logits(target, text), text, "ratio", width)
            scored.append(scores)
    return found


class Stopwatch:
    """The work of both roles on one text, by the code that does it in a deployment."""

    def __init__(self, target: Engine, draft: Engine, text: Text, threads: tuple[int, int], width: int) -> None:
        self._target, self._draft, self._text, self._threads = target, draft, text, threads
        self._drafter = ModelDrafter(draft, "coupled", Lists(uniform), width=width)
        self._tokens = (*text.prompt, *text.answer)
        self._at = len(text.prompt)  # what is committed when the clock starts
        for engine in (target, draft):
            engine.forward(causal_batch([self._tokens[: self._at]], [0], [self._table(engine)], [1], engine.block_size))

    def _table(self, engine: Engine) -> tuple[int, ...]:
        return tuple(range(engine.num_blocks))

    def _row(self, lookahead: int, budget: int) -> DraftRow:
        at = self._at
        return DraftRow(
            0,
            at - 1,
            (self._tokens[at - 1],),
            None,
            False,
            lookahead,
            budget,
            self._table(self._draft),
            self._text.request,
        )

    def verify(self, lookahead: int) -> float:
        torch.set_num_threads(self._threads[0])
        start = time.perf_counter()
        at, trunk = self._at, self._tokens[self._at - 1 :][: lookahead + 1]
        batch = causal_batch([trunk], [at - 1], [self._table(self._target)], [lookahead + 1], self._target.block_size)
        logits = self._target.forward(batch).logits
        trial = sampling.Trial(self._text.request, self._tokens[:at], Speculation(trunk[1:]))
        sampling.verify(logits, [trial], "coupled")
        return time.perf_counter() - start

    def trunk(self, lookahead: int) -> float:
        """Feed the trunk and guess one bonus token a row."""
        torch.set_num_threads(self._threads[1])
        row = self._row(lookahead, lookahead + 1)
        trunk = Trunk(row, self._at - 1, self._tokens[self._at :][:lookahead])
        start = time.perf_counter()
        self._drafter.predict([trunk], [FanOut((1,) * (lookahead + 1))])
        return time.perf_counter() - start

    def step(self, branches: int) -> float:
        """One token for each of so many branches at the end of a trunk of one row."""
        torch.set_num_threads(self._threads[1])
        trunk = Trunk(self._row(1, branches), self._at - 1, ())
        guesses = [Guess(Outcome(0, token % self._draft.vocab_size)) for token in range(branches)]
        start = time.perf_counter()
        self._drafter.draft([trunk], [guesses])
        return time.perf_counter() - start


def measure_times(
    watch: Stopwatch, lookaheads: Sequence[int], budgets: Sequence[int], until: float, least: int, progress: Progress
) -> Times:
    """Medians over passes, each of which times everything once, so that what disturbs the machine disturbs all."""
    kinds: list[tuple[str, Callable[[int], float], int]] = [("verify", watch.verify, k) for k in (0, *lookaheads)]
    kinds += [("trunk", watch.trunk, k) for k in lookaheads] + [("step", watch.step, b) for b in sorted({1, *budgets})]
    seen: dict[tuple[str, int], list[float]] = {(name, value): [] for name, _, value in kinds}
    started, number = time.monotonic(), 0
    while number <= least or time.monotonic() < until:
        for name, work, value in kinds:
            seconds = work(value)
            if number:  # the first pass warms up
                seen[name, value].append(seconds)
        number += 1
        elapsed = time.monotonic() - started
        progress("how long forwards take", min(number / (least + 1), elapsed / max(until - started, 1e-9)))
    medians = {key: float(np.median(values)) for key, values in seen.items()}
    return Times(*({v: s for (n, v), s in medians.items() if n == name} for name in ("verify", "trunk", "step")))


# What follows


@dataclass
class Judge:
    """Settings over the texts of one temperature, and the clock."""

    scored: Sequence[dict[Rule, Scored]]
    times: Times
    base: SpeculationConfig
    ordinary: Sequence[int]  # tokens that a random backup may draw
    seed: int = 0
    weights: NDArray[np.float64] = field(init=False)  # [samples, texts] of the bootstrap, the same for all settings
    _played: dict[SpeculationConfig, Figures] = field(default_factory=dict)
    _clocked: dict[SpeculationConfig, RoundTime] = field(default_factory=dict)  # of those with the policy `ranked`

    def __post_init__(self) -> None:
        count = len(self.scored)
        self.weights = np.random.default_rng(self.seed).multinomial(count, [1 / count] * count, _SAMPLES).astype(float)

    def figures(self, setting: SpeculationConfig) -> Figures:
        """Rounds by text; those of `ratio` several times."""
        if setting not in self._played:
            rounds = self.rounds(setting)
            self._played[setting] = Figures.of(rounds)
            if _is_ranked(setting):
                self._clocked[setting] = self.times.of_ranked(list(chain.from_iterable(rounds)))
        return self._played[setting]

    def rounds(self, setting: SpeculationConfig) -> list[list[Played]]:
        """By text, of all its plays."""
        estimators = Estimators(setting.prior)
        if _is_ranked(setting):
            ranked = RankedReplay(
                setting.policy(estimators),
                lookahead=setting.max_lookahead,
                budget=setting.budgets()[-1],
                least_probability=setting.fan_out.least_probability,
            )
            return [ranked.play(scores["coupled"]) for scores in self.scored]
        texts = TEXT_BACKUPS if setting.mode == "ssd" else ()
        drafter = None
        if (name := next((n for n in texts if n == setting.backup), None)) is not None:
            longest = max(len(s["coupled"].text.prompt) + len(s["coupled"].text.answer) for s in self.scored)
            drafter = text_drafter(name, TokenMemory(longest + 1, 1), setting.rule, self.ordinary)
        player = Replay(
            setting.policy(estimators),
            estimators if setting.fan_out.policy == "auto" else None,
            lookahead=setting.max_lookahead,
            budget=setting.budgets()[-1] if setting.mode == "ssd" else 0,
            cache_aware=setting.cache_aware,
            backup=drafter,
        )
        rounds: list[list[Played]] = []
        draws = np.random.default_rng(self.seed)
        for number, scores in enumerate(self.scored):
            scored = scores.get(setting.rule, scores["coupled"])
            plays = _PLAYS if scored.weighed is not None else 1
            rounds.append([played for _ in range(plays) for played in player.play(scored, number, draws)])
        return rounds

    def judge(self, setting: SpeculationConfig, beside: SpeculationConfig | None = None) -> Choice:
        """`beside`: whose hit rate the gain is over."""
        figures = self.figures(setting)
        again = figures.resampled(self.weights)

        def estimate(name: str) -> Estimate:
            return _estimate(float(getattr(figures, name)), getattr(again, name))

        seconds = self.seconds(setting)
        gain = None
        if beside is not None:
            other = self.figures(beside)
            gain = _estimate(
                float(figures.hit_rate - other.hit_rate), again.hit_rate - other.resampled(self.weights).hit_rate
            )
        misses = figures.rounds.sum() - figures.hits.sum()
        return Choice(
            setting.max_lookahead,
            setting.budgets()[-1] if setting.mode == "ssd" else 0,
            setting.fan_out.policy or "counts",
            setting.fan_out.ranked_from,
            setting.rule,
            setting.cache_aware,
            setting.backups[0],
            estimate("acceptance"),
            estimate("hit_rate"),
            estimate("tokens_per_round"),
            _ratio(figures.tokens_of_hits.sum(), figures.hits.sum()),
            _ratio(figures.tokens.sum() - figures.tokens_of_hits.sum(), misses),
            seconds.prepare / seconds.verify,
            seconds.backup / seconds.verify,
            self.speed(setting),
            gain,
        )

    def speed(self, setting: SpeculationConfig) -> float:
        """Over plain decoding: Theorem 7, with a primary that finishes its branches (`analysis.ssd_speed_up`)."""
        return float(self.figures(setting).tokens_per_round) * self.times.verify[0] / self.seconds(setting).whole

    def seconds(self, setting: SpeculationConfig) -> RoundTime:
        figures = self.figures(setting)
        if _is_ranked(setting):
            return self._clocked[setting]
        k = setting.max_lookahead
        verify = self.times.verify[k]
        prepare = self.times.prepare(k, setting.budgets()[-1]) if setting.mode == "ssd" else 0.0
        backup = self.times.draft(k) if setting.backup == "primary" else 0.0
        return RoundTime(verify, prepare, backup, max(verify, prepare) + (1 - float(figures.hit_rate)) * backup)

    @property
    def replays_ranked(self) -> bool:
        """Whether there are rollouts, and this rule's draft tokens are theirs at this temperature."""
        drawn = self.base.rule == "ratio" and "ratio" in self.scored[0]
        return not drawn and all(scores["coupled"].rollouts is not None for scores in self.scored)

    def setting(self, **changes: Any) -> SpeculationConfig:
        """The deployment's, with changes; those of `fan_out` key by key, and no hand-written lists."""
        fan_out = replace(
            self.base.fan_out,
            counts=None,
            counts_after_miss=None,
            **{"policy": "geometric", "least_probability": FanOutConfig().least_probability}
            | changes.pop("fan_out", {}),
        )
        return replace(self.base, preset=None, mode="ssd", **{"backup": "primary", **changes}, fan_out=fan_out)


def _is_ranked(setting: SpeculationConfig) -> bool:
    return setting.mode == "ssd" and setting.fan_out.policy == "ranked"


def curves(scored: Sequence[Scored], lookahead: int, setting: SpeculationConfig) -> tuple[list[float], Curve, Curve]:
    """Acceptance by position, and how far down the guesses the bonus token lies after a rejection and after none."""
    player = Replay(Lists(uniform), Estimators(), lookahead=lookahead, budget=0)
    draws = np.random.default_rng(0)
    rounds = [r for number, text in enumerate(scored) for r in player.play(text, number, draws)]
    width = scored[0].ranked.ids.shape[1]
    reached = [sum(r.accepted >= k for r in rounds) for k in range(lookahead + 1)]
    acceptance = [reached[k + 1] / reached[k] if reached[k] else math.nan for k in range(lookahead)]

    def curve(chosen: Sequence[Played]) -> Curve:
        ranks = GuessCurve(decay=1.0)
        for r in chosen:
            ranks.observe(width - 1, r.rank)  # one of the listed may be the rejected token
        counts = [sum(r.rank is None or r.rank >= f for r in chosen) for f in GUESSES]
        misses = {f: n / len(chosen) for f, n in zip(GUESSES, counts) if f < width} if chosen else {}
        return Curve(misses, ranks.fit(), len(chosen))

    rejected = [r for r in rounds if r.accepted < lookahead]
    whole = [r for r in rounds if r.accepted == lookahead]
    return acceptance, curve(rejected), curve(whole)


def fitted(base: SpeculationConfig, found: Sequence[tuple[list[float], Curve, Curve]]) -> FanOutConfig:
    """`fan_out` with the acceptance and the miss curve after a rejection that were measured, over all temperatures."""
    rates = [rate for acceptance, _, _ in found for rate in acceptance if math.isfinite(rate)]
    fits = [(curve.fit.curve, curve.rounds) for _, curve, _ in found if curve.fit]
    fan_out = replace(base.fan_out, acceptance=round(float(np.mean(rates)), 3) if rates else base.fan_out.acceptance)
    if not fits:
        return fan_out
    weights = [rounds for _, rounds in fits]
    scale = float(np.average([curve.scale for curve, _ in fits], weights=weights))
    exponent = float(np.average([curve.exponent for curve, _ in fits], weights=weights))
    return replace(fan_out, miss_scale=round(max(scale, 0.001), 3), miss_exponent=round(max(exponent, 0.001), 3))


def best(judges: Sequence[Judge], lookaheads: Sequence[int], budgets: Sequence[int]) -> SpeculationConfig:
    """The fastest lookahead, budget and backup over all temperatures; of settings about as fast the smaller one."""
    return _fastest(
        judges,
        [
            judges[0].setting(lookahead=lookahead, fan_out={"budget": budget}, backup=backup)
            for lookahead in lookaheads
            for budget in budgets
            for backup in ("primary", "ngram", "none")
        ],
    )


def best_ranked(
    judges: Sequence[Judge], lookaheads: Sequence[int], budgets: Sequence[int], least: Sequence[float]
) -> list[SpeculationConfig]:
    """With the policy `ranked` the fastest lookahead and budget, and every least probability. Nothing where it cannot
    be replayed.
    """
    if not least or not all(judge.replays_ranked for judge in judges):
        return []

    def setting(lookahead: int, budget: int, probability: float) -> SpeculationConfig:
        fan_out = {"policy": "ranked", "budget": budget, "least_probability": probability}
        return judges[0].setting(lookahead=lookahead, fan_out=fan_out)

    fastest = _fastest(judges, [setting(k, b, p) for k in lookaheads for b in budgets for p in least])
    return [replace(fastest, fan_out=replace(fastest.fan_out, least_probability=p)) for p in least]


def _fastest(judges: Sequence[Judge], settings: Sequence[SpeculationConfig]) -> SpeculationConfig:
    """Of those about as fast the first."""
    speeds = [_mean_speed(judges, setting) for setting in settings]
    return next(setting for speed, setting in zip(speeds, settings) if speed * _WORTH >= max(speeds))


def _mean_speed(judges: Sequence[Judge], setting: SpeculationConfig) -> float:
    return math.exp(sum(math.log(judge.speed(setting)) for judge in judges) / len(judges))


def sweeps(
    judge: Judge,
    chosen: SpeculationConfig,
    found: tuple[list[float], Curve, Curve],
    lookaheads: Sequence[int],
    budgets: Sequence[int],
    ranked: Sequence[SpeculationConfig] = (),
) -> Sweeps:
    """One thing at a time is varied around `chosen`; `ranked` is judged beside it."""
    temperature = judge.scored[0]["coupled"].text.request.params.temperature

    def fan_out(setting: SpeculationConfig, **changes: Any) -> SpeculationConfig:
        return replace(setting, fan_out=replace(setting.fan_out, **changes))

    def fastest(k: int) -> Choice:
        options = [fan_out(replace(chosen, lookahead=k), budget=b) for b in budgets]
        return judge.judge(max(options, key=judge.speed))

    def lists() -> Iterator[Choice]:
        for b in budgets:
            even = fan_out(chosen, budget=b, policy="uniform")
            yield judge.judge(even)
            for policy in ("geometric", "auto"):
                yield judge.judge(fan_out(chosen, budget=b, policy=policy), even)

    by_ngram = judge.judge(replace(chosen, backup="ngram", mode="ssd"))
    of_ngram = max(0.0, (by_ngram.e_miss or 1.0) - 1)  # of tokens a / (1 - a), for speculations without an end
    ratio = replace(chosen, rule="ratio", cache_aware=1.0)
    with_rules = temperature > 0 and "ratio" in judge.scored[0]
    backups: tuple[Backup, ...] = ("primary", *TEXT_BACKUPS)
    return Sweeps(
        temperature=temperature,
        texts=len(judge.scored),
        tokens=sum(len(scores["coupled"].text.answer) for scores in judge.scored),
        acceptance=found[0],
        after_rejection=found[1],
        after_acceptance=found[2],
        sd=[judge.judge(replace(chosen, mode="sd", lookahead=k, backup="primary")) for k in lookaheads],
        lookahead=[fastest(k) for k in lookaheads],
        budget=[judge.judge(fan_out(chosen, budget=b)) for b in budgets],
        lists=list(lists()),
        ranked=[judge.judge(setting, chosen) for setting in ranked],
        rules=[judge.judge(replace(chosen, rule="coupled", cache_aware=1.0)), judge.judge(ratio, chosen)]
        if with_rules
        else [],
        cache_aware=[judge.judge(replace(ratio, cache_aware=c), ratio) for c in SCALES] if with_rules else [],
        backups=[judge.judge(replace(chosen, backup=name)) for name in backups],
        batches=predictions(
            judge.times, found, judge.base, of_ngram / (1 + of_ngram), lookaheads, [b for b in budgets if b]
        ),
    )


def recommended(
    judges: Sequence[Judge],
    chosen: SpeculationConfig,
    lookaheads: Sequence[int],
    ranked: Sequence[SpeculationConfig] = (),
) -> SpeculationConfig:
    """`chosen` with the policy and rule that are fastest, one of `ranked`, or `sd` or `ar` where nothing makes ssd
    faster than those.

    What comes first stays unless something is faster by more than the predictions are worth.
    """
    for policy in ("auto", "uniform"):
        other = replace(chosen, fan_out=replace(chosen.fan_out, policy=policy))
        if policy == "auto" or _mean_speed(judges, other) > _WORTH * _mean_speed(judges, chosen):
            chosen = other
    if all("ratio" in judge.scored[0] for judge in judges):
        for scale in SCALES:
            other = replace(chosen, rule="ratio", cache_aware=scale)
            if _mean_speed(judges, other) > _WORTH * _mean_speed(judges, chosen):
                chosen = other
    alone = max(
        (replace(chosen, mode="sd", backup="primary", lookahead=k) for k in lookaheads),
        key=lambda setting: _mean_speed(judges, setting),
    )
    if ranked and _mean_speed(judges, other := _fastest(judges, ranked)) > _WORTH * _mean_speed(judges, chosen):
        chosen = other
    if _mean_speed(judges, alone) > _WORTH * _mean_speed(judges, chosen):
        chosen = alone
    return replace(chosen, mode="ar") if _mean_speed(judges, chosen) * _WORTH < 1 else chosen


def _estimate(mean: float, again: NDArray[np.float64]) -> Estimate:
    known = again[np.isfinite(again)]
    low, high = np.percentile(known, [2.5, 97.5]) if len(known) else (math.nan, math.nan)
    return Estimate(mean, float(low), float(high))


def _ratio(one: float, other: float) -> float | None:
    return float(one / other) if other else None


def check_ranks(name: str, tp: int) -> None:
    """Raises ConfigError for a model that does not fit one process."""
    if tp > 1:
        raise ConfigError(
            f"the {name} is built for {tp} ranks, and tuning runs both models in this one process: tune a deployment "
            "whose recipes have `tp: 1`. Acceptance and hit rates are those of the models, on any number of ranks"
        )
