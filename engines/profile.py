"""How a simulated model behaves: the times of its forwards, and how a draft differs from its target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from saguaro.engines.schema import parse
from saguaro.errors import ConfigError

FILE = "profile.json"


@dataclass(frozen=True)
class Agreement:
    """How a draft differs from its target at temperature 0."""

    acceptance: float  # probability that its best token is the target's
    miss_scale: float  # c: after a rejection F guesses miss with probability c F^-r
    miss_exponent: float  # r

    def __post_init__(self) -> None:
        for name, low, high in (("acceptance", 0, 1), ("miss_scale", 0, 1), ("miss_exponent", 0.01, 10)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Profile:
    """One model on one device, and how it differs from its target if it is a draft. Target and draft share the seed."""

    forward_ms: dict[int, float]  # by rows; straight lines between, and on beyond the last two
    agreement: Agreement | None = None  # None: the target
    sharpness: float = 3.0  # how peaked the distribution is: p_j ∝ (1 + j)^-sharpness
    seed: int = 0

    def __post_init__(self) -> None:
        rows = list(self.forward_ms)
        if not rows or rows != sorted(rows) or rows[0] < 1:
            raise ConfigError(f"forward_ms must be times by numbers of rows, fewest first, got {self.forward_ms}")
        if min(self.forward_ms.values()) < 0:
            raise ConfigError(f"forward_ms must be 0 or more, got {self.forward_ms}")
        if self.sharpness <= 0:
            raise ConfigError(f"sharpness must be above 0, got {self.sharpness}")

    def seconds(self, rows: int) -> float:
        """Time of a forward over so many rows."""
        known, times = list(self.forward_ms), list(self.forward_ms.values())
        if rows <= known[-1] or len(known) == 1:
            return float(np.interp(rows, known, times)) / 1e3
        slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
        return max(0.0, times[-1] + slope * (rows - known[-1])) / 1e3

    def write(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Profile:
        document = json.loads((directory / FILE).read_text(encoding="utf-8"))
        document["forward_ms"] = {int(rows): value for rows, value in document["forward_ms"].items()}
        return parse(document, cls, str(directory / FILE))
