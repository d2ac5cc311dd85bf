"""`saguaro simulate`: what lookahead, fan-out, batch size and more draft devices would bring, by the analytic model.

Nothing is run. Times are in units of one verification, which is taken to cost the same for every lookahead and batch;
the draft has hardware of its own, as in the paper. Speeds are relative to plain decoding at the same batch size.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from saguaro.errors import ConfigError
from saguaro.orchestrator import analysis
from saguaro.orchestrator.fan_out_policy import AcceptedCurve, MissCurve, geometric, predicted_hit_rate, row_hits

if TYPE_CHECKING:
    from rich.table import Table

FIGURES = (".pdf", ".png", ".svg")
_SWEEPS: dict[str, tuple[int, ...]] = {
    "lookahead": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12),
    "budget": (1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "devices": (1, 2, 3, 4, 6, 8),
}


@dataclass(frozen=True)
class Pair:
    """What is known of a pair of models on their hardware."""

    acceptance: float  # a: probability that a draft token is accepted
    draft_step: float  # one forward of the draft over one row, in verifications
    row_cost: float = 0.03  # of each further row, as a share of that
    miss_scale: float = 0.4  # c of the miss curve c F^-r
    miss_exponent: float = 0.6  # r
    fast_acceptance: float = 0.0  # of the tokens of a backup that costs nothing

    def __post_init__(self) -> None:
        for name in ("acceptance", "fast_acceptance"):
            _check(name, getattr(self, name), 0, 1)
        _check("draft_step", self.draft_step, 0, 100)
        _check("row_cost", self.row_cost, 0, 100)
        _check("miss_scale", self.miss_scale, 0, 1)
        _check("miss_exponent", self.miss_exponent, 0, 10)

    def step(self, rows: float) -> float:
        """Time of one draft forward."""
        return self.draft_step * (1 + self.row_cost * (max(1.0, rows) - 1))


@dataclass(frozen=True)
class Setting:
    """What can be chosen. `budget` is ΣF of one draft device; `devices` of them prepare disjoint outcomes."""

    lookahead: int = 4
    budget: int = 8
    batch: int = 1
    devices: int = 1

    def __post_init__(self) -> None:
        _check("lookahead", self.lookahead, 1, 32)
        _check("budget", self.budget, 0, 128)
        _check("batch", self.batch, 1, 1024)
        _check("devices", self.devices, 1, 8)


@dataclass(frozen=True)
class Prediction:
    setting: Setting
    fan_out: tuple[int, ...]
    backup: Literal["primary", "defer", "fast"]  # the best of them
    p_hit: float
    e_hit: float
    e_miss: float
    t_p: float
    t_b: float
    critical_batch: float | None  # Theorem 17, from the hit rate with the primary backup; None: that is always best
    sd: float  # speed-ups over plain decoding
    ssd: float


def predict(pair: Pair, setting: Setting) -> Prediction:
    """Theorems 7, 12 and 17 and Corollary 16 for one setting, with the best backup."""
    return max(each_backup(pair, setting), key=lambda prediction: prediction.ssd)


def each_backup(pair: Pair, setting: Setting) -> list[Prediction]:
    """With each of the backups; `defer` is `primary` where nobody else is in the batch, or nothing is prepared."""
    lookahead, batch, total = setting.lookahead, setting.batch, setting.budget * setting.devices
    rejected = MissCurve(pair.miss_scale, pair.miss_exponent)
    accepted = AcceptedCurve(pair.acceptance, rejected)
    e_hit = analysis.tokens_per_round(pair.acceptance, lookahead)
    # The trunk in one forward, then all branches, a token at a time.
    t_p = pair.step(batch * (lookahead + 1)) + lookahead * pair.step(batch * setting.budget) if total else 0.0

    def hit_rate(acceptance: float) -> float:
        """After a speculation whose tokens are accepted with this probability."""
        fan_out = geometric(total, lookahead, acceptance, rejected, accepted)
        weights = analysis.outcome_weights([acceptance] * lookahead)
        return predicted_hit_rate(fan_out, weights, row_hits(total, lookahead, rejected, accepted))

    after_hit = hit_rate(pair.acceptance)
    found: list[Prediction] = []
    backups: tuple[tuple[Literal["primary", "defer", "fast"], float], ...] = (
        ("primary", pair.acceptance),
        ("defer", pair.acceptance),
        ("fast", pair.fast_acceptance),
    )
    slow = lookahead * pair.step(batch * (1 - after_hit))
    limit = analysis.critical_batch(after_hit, e_hit, analysis.tokens_per_round(pair.fast_acceptance, lookahead), slow)
    for backup, acceptance in backups:
        p_hit = analysis.overall_hit_rate(after_hit, hit_rate(acceptance))
        e_miss = analysis.tokens_per_round(acceptance, lookahead)
        # Rows that sit out are few beside the branches they are drafted with; those that do not are all of the batch.
        missing = {"primary": batch * (1 - p_hit), "defer": batch, "fast": 0.0}[backup]
        t_b = lookahead * pair.step(missing) if missing else 0.0
        if backup == "defer":
            ssd = analysis.defer_speed_up(p_hit, e_hit, e_miss, t_p, t_b, batch)
        else:
            ssd = analysis.ssd_speed_up(p_hit, e_hit, e_miss, t_p, t_b, batch, interrupt=False)
        found.append(
            Prediction(
                setting=setting,
                fan_out=geometric(total, lookahead, pair.acceptance, rejected, accepted).counts,
                backup=backup,
                p_hit=p_hit,
                e_hit=e_hit,
                e_miss=e_miss,
                t_p=t_p,
                t_b=t_b,
                critical_batch=None if math.isinf(limit) else limit,
                sd=e_hit / (1 + lookahead * pair.step(batch)),
                ssd=ssd,
            )
        )
    return found if batch > 1 and total else [prediction for prediction in found if prediction.backup != "defer"]


def sweeps(pair: Pair, setting: Setting) -> dict[str, list[Prediction]]:
    """One choice at a time is varied, the others stay as in `setting`, which is always among them."""
    return {
        name: [predict(pair, replace(setting, **{name: value})) for value in sorted({*values, getattr(setting, name)})]
        for name, values in _SWEEPS.items()
    }


def as_json(pair: Pair, setting: Setting, found: dict[str, list[Prediction]]) -> dict[str, object]:
    return {
        "pair": asdict(pair),
        "setting": asdict(setting),
        "prediction": asdict(predict(pair, setting)),
        "backups": {prediction.backup: asdict(prediction) for prediction in each_backup(pair, setting)},
        "sweeps": {name: [asdict(prediction) for prediction in predictions] for name, predictions in found.items()},
    }


def table(found: dict[str, list[Prediction]], setting: Setting) -> Table:
    """One section for each choice; `*` marks its best, `>` the given setting."""
    from rich.table import Table

    columns = ("", "value", "F_0 … F_K", "p_hit", "E_hit", "E_miss", "T_p", "T_b", "backup", "sd", "ssd", "ssd/sd")
    result = Table(*columns, title="Predicted speed-up over plain decoding", caption="* best   > as given")
    for name, predictions in found.items():
        best = max(predictions, key=lambda prediction: prediction.ssd)
        result.add_section()
        for prediction in predictions:
            value = getattr(prediction.setting, name)
            given = value == getattr(setting, name)
            counts = " ".join(map(str, prediction.fan_out))
            result.add_row(
                ("*" if prediction is best else "") + (">" if given else ""),
                f"{name} {value}",
                counts if len(counts) <= 24 else counts[:23] + "…",
                *(f"{figure:.2f}" for figure in (prediction.p_hit, prediction.e_hit, prediction.e_miss)),
                *(f"{figure:.2f}" for figure in (prediction.t_p, prediction.t_b)),
                prediction.backup,
                *(f"{f:.2f}" for f in (prediction.sd, prediction.ssd, prediction.ssd / prediction.sd)),
            )
    return result


def plot(found: dict[str, list[Prediction]], setting: Setting, path: Path) -> None:
    """Four panels, one for each choice. Raises ConfigError for an unknown kind of file or without matplotlib."""
    if path.suffix not in FIGURES:
        raise ConfigError(f"--plot must name a file that ends in one of {', '.join(FIGURES)}, got {path.name!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install saguaro-serving[bench], or leave --plot out") from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (name, predictions) in zip(figure.subplots(2, 2).flat, found.items(), strict=True):
        values = [getattr(prediction.setting, name) for prediction in predictions]
        axes.axhline(1, color="grey", linewidth=1, label="ar")
        axes.plot(values, [prediction.sd for prediction in predictions], marker=".", label="sd")
        axes.plot(values, [prediction.ssd for prediction in predictions], marker=".", label="ssd")
        axes.axvline(getattr(setting, name), color="grey", linewidth=1, linestyle=":")
        if name in ("budget", "batch"):
            axes.set_xscale("log", base=2)
        axes.set(xlabel=name, ylabel="speed-up over ar", ylim=(0, None))
        axes.legend()
    figure.suptitle("Analytic model (Theorems 7, 12 and 17, Corollary 16)")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from error


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}")
