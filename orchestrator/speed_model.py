"""What a setting would bring, by the paper's formulas over measured figures, and the best one. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saguaro.orchestrator import analysis
from saguaro.orchestrator.fan_out_policy import Curve, predicted_hit_rate, row_hits
from saguaro.orchestrator.types import Backup, Mode, Setting
from saguaro.plugins.fan_out import FanOut

Time = Callable[[float], float]  # rows -> seconds
_SMALL = 8  # branches


@dataclass(frozen=True)
class Outlook:
    """What is known of a deployment: from measurements, and where there are none from priors.

    Acceptances are of each place in a speculation, given that the tokens before it were accepted.
    """

    verify: Time
    draft: Time  # a step of the draft
    trunk: Time  # its forward over trunks, from which outcomes are guessed
    prepared: Sequence[float]  # acceptance of speculations that had been prepared
    backups: Mapping[Backup, Sequence[float]]  # and of those drafted after a miss
    in_turn: Mapping[Backup, Sequence[float]]  # and in `sd`, where every speculation is
    rejected: Curve  # of the bonus token after a rejection
    accepted: Curve  # after full acceptance
    overhead: float = 0.0  # seconds that the speculator works in a round beside its steps
    written: Callable[[int, bool], FanOut] | None = None  # the list by lookahead, after a hit or not, if it is fixed
    replicas: int = 1  # of the draft, which share out branches and misses; times are those of the slowest
    least_probability: float = 0.0  # of what is prepared at all, where guesses are ranked


@dataclass(frozen=True)
class Prediction:
    setting: Setting
    tokens_per_second: float  # of a sequence
    p_hit: float = 0.0
    e_hit: float = 0.0
    e_miss: float = 0.0
    t_p: float = 0.0
    t_b: float = 0.0


def predict(outlook: Outlook, setting: Setting, batch: int) -> Prediction:
    """One setting at a batch size (Theorem 7, Corollary 16).

    Time is that of the verification of K+1 rows for each sequence, not of a plain step: longer trunks cost more.
    """
    if setting.mode == "ar":
        return Prediction(setting, _per_second(1.0, outlook.verify(batch)))
    lookahead, trunks = setting.lookahead, batch * (setting.lookahead + 1)
    verify = outlook.verify(trunks)
    e_miss = _tokens((outlook.in_turn if setting.mode == "sd" else outlook.backups)[setting.backup][:lookahead])
    if setting.mode == "sd":
        drafting = _backup_seconds(outlook, setting, batch / outlook.replicas)
        # The draft's KV follows the trunk while the target is busy.
        seconds = max(verify, outlook.trunk(trunks)) + drafting
        return Prediction(setting, _per_second(e_miss, seconds), e_miss=e_miss, t_b=_ratio(drafting, verify))
    prepare = prepare_seconds(outlook, batch, lookahead, setting.budget)
    after_hit = _hit_rate(outlook, outlook.prepared[:lookahead], setting.budget, True)
    after_miss = _hit_rate(outlook, outlook.backups[setting.backup][:lookahead], setting.budget, False)
    p_hit = analysis.overall_hit_rate(after_hit, after_miss)
    e_hit = _tokens(outlook.prepared[:lookahead])
    some_miss = 1 - p_hit**batch
    missing = batch * (1 - p_hit) / some_miss if some_miss > 0 else 1.0  # rows, in rounds with a miss
    deferring = setting.backup == "defer"
    # Rows that sit out are drafted with the branches; all wait only when all have missed.
    drafting = _backup_seconds(outlook, setting, (batch if deferring else missing) / outlook.replicas)
    t_p, t_b = _ratio(prepare, verify), _ratio(drafting, verify)
    if deferring:
        speed_up = analysis.defer_speed_up(p_hit, e_hit, e_miss, t_p, t_b, batch)
    else:
        speed_up = analysis.ssd_speed_up(p_hit, e_hit, e_miss, t_p, t_b, batch, interrupt=False)
    return Prediction(setting, _per_second(speed_up, verify), p_hit, e_hit, e_miss, t_p, t_b)


def prepare_seconds(outlook: Outlook, batch: int, lookahead: int, budget: int) -> float:
    """The trunks in one forward, then all branches of a replica, a token at a time."""
    rows = [budget] * lookahead if outlook.least_probability == 0 else _growing(outlook, lookahead, budget)
    branches = sum(outlook.draft(batch * math.ceil(count / outlook.replicas)) for count in rows if count)
    return outlook.overhead + outlook.trunk(batch * (lookahead + 1)) + branches


@dataclass(frozen=True)
class Choices:
    """What may be chosen; a single value is a decision of the deployment."""

    lookaheads: Sequence[int]
    budgets: Sequence[int]  # in rising order
    backups: Sequence[Backup]

    @property
    def open(self) -> bool:
        return len(self.lookaheads) > 1 or len(self.budgets) > 1 or len(self.backups) > 1


def best(outlook: Outlook, choices: Choices, mode: Mode, batch: int) -> Prediction:
    """The setting of a mode with the highest predicted speed.

    For each lookahead the largest budget whose branches are done before the verification (T_p <= 1): more guesses never
    hurt as long as they are free. Where not even the smallest is, the verifier waits in any case, and the best of the
    small ones is taken.
    """
    found: list[Prediction] = []
    for lookahead in choices.lookaheads if mode != "ar" else choices.lookaheads[:1]:
        budgets = _budgets(outlook, choices, lookahead, batch) if mode == "ssd" else [0]
        backups = choices.backups if mode != "ar" else choices.backups[:1]
        if (mode != "ssd" or batch == 1) and len(backups) > 1:
            backups = [backup for backup in backups if backup != "defer"]  # it is `primary` there
        for budget, backup in itertools.product(budgets, backups):
            found.append(predict(outlook, Setting(mode, lookahead, budget, backup), batch))
    return max(found, key=lambda prediction: prediction.tokens_per_second)


def _budgets(outlook: Outlook, choices: Choices, lookahead: int, batch: int) -> list[int]:
    verify = outlook.verify(batch * (lookahead + 1))
    free = [budget for budget in choices.budgets if prepare_seconds(outlook, batch, lookahead, budget) <= verify]
    small = [budget for budget in choices.budgets if budget <= _SMALL]
    return free[-1:] or small or [choices.budgets[0]]


class Planner:
    """The setting in force for each mode and batch size. It gives way only to one that is predicted to be faster by
    more than `gain`, so that noise in the measurements does not change it."""

    def __init__(self, choices: Choices, *, gain: float = 0.02, review: int = 8, longest: int = 512) -> None:
        self._choices = choices
        self._gain = gain
        self._review = review  # rounds between two looks; twice as many after each that changed nothing
        self._longest = longest
        self._plans: dict[tuple[Mode, int], _Plan] = {}

    def setting(self, outlook: Callable[[], Outlook], mode: Mode, batch: int, *, anew: bool = False) -> Setting:
        """To be asked once a round. `anew`: the mode did not run before, and what is known of it may have changed."""
        plan = self._plans.get((mode, batch))
        if plan is None:
            prediction = best(outlook(), self._choices, mode, batch)
            plan = self._plans[mode, batch] = _Plan(prediction.setting, self._review, self._review // 2)
        elif mode != "ar" and self._choices.open:
            plan.left -= 1
            if plan.left <= 0 or anew:
                self._look_again(plan, outlook(), mode, batch)
        return plan.setting

    def _look_again(self, plan: _Plan, outlook: Outlook, mode: Mode, batch: int) -> None:
        now = predict(outlook, plan.setting, batch)
        then = best(outlook, self._choices, mode, batch)
        if then.tokens_per_second > now.tokens_per_second * (1 + self._gain):
            plan.setting, plan.pause = then.setting, self._review
        else:
            plan.pause = min(2 * plan.pause, self._longest)
        plan.left = plan.pause


@dataclass
class _Plan:
    setting: Setting
    pause: int
    left: int


def _backup_seconds(outlook: Outlook, setting: Setting, rows: float) -> float:
    return setting.lookahead * outlook.draft(max(1.0, rows)) if setting.backup in ("primary", "defer") else 0.0


def _tokens(acceptance: Sequence[float]) -> float:
    """Tokens of a round, bonus included."""
    return 1.0 + float(np.cumprod(acceptance).sum())


def _hit_rate(outlook: Outlook, acceptance: Sequence[float], budget: int, hit: bool) -> float:
    """Of the list that is fixed, or else of the best one."""
    if outlook.written is None or not budget:
        return float(_hit_rates(outlook, acceptance, budget)[budget])
    fan_out = outlook.written(len(acceptance), hit)
    hits = row_hits(max(fan_out.counts), len(acceptance), outlook.rejected, outlook.accepted)
    return predicted_hit_rate(fan_out, analysis.outcome_weights(acceptance), hits)


def _hit_rates(outlook: Outlook, acceptance: Sequence[float], budget: int) -> NDArray[np.float64]:
    """[budget + 1] The best hit rate of each budget.

    Exact where a second guess gains no more than the first (1 - c >= c (1 - 2^-r)); elsewhere a little too high. Of
    guesses that are ranked anew in every round it says what a fixed list would do: they hit more often.
    """
    gains = _gains(outlook, acceptance, budget)
    return np.concatenate([[0.0], np.where(gains >= outlook.least_probability, gains, 0).cumsum()])


def _gains(outlook: Outlook, acceptance: Sequence[float], budget: int) -> NDArray[np.float64]:
    """[budget] The greatest gains of a guess, wherever they are."""
    weights = np.array(analysis.outcome_weights(acceptance))
    rejected, accepted = (np.diff(curve.hits(budget)) for curve in (outlook.rejected, outlook.accepted))
    gains = np.concatenate([np.outer(weights[:-1], rejected).ravel(), weights[-1] * accepted])
    return np.sort(gains)[::-1][:budget]


def _growing(outlook: Outlook, lookahead: int, budget: int) -> list[int]:
    """Branches that get a token at each depth: while they are as likely to be needed as the least that is prepared."""
    acceptance = outlook.prepared[:lookahead]
    reached = np.cumprod([1.0, *acceptance])[:lookahead, None] * _gains(outlook, acceptance, budget)
    growing: list[int] = (reached >= outlook.least_probability).sum(1).tolist()
    return growing


def _per_second(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else tokens


def _ratio(seconds: float, verify: float) -> float:
    return seconds / verify if verify > 0 else 0.0
