"""Measured speeds, and when one is truly higher than another."""

from __future__ import annotations

import math

MARGIN = 0.03  # by which another mode has to be faster
FEWEST = 3  # rounds from which anything is concluded
_SMALL = 8  # rounds that are few
_CHANGED = 0.25  # by which a probe differs from the last one if conditions have changed


class Rate:
    """Tokens per second of a sequence, decayed: a ratio of two means, and its standard error."""

    def __init__(self) -> None:
        self.rounds = 0.0  # with decay
        self._weights_squared = 0.0
        self._tokens = self._seconds = 0.0
        self._tokens_squared = self._seconds_squared = self._product = 0.0

    def fade(self, share: float) -> None:
        """Let what is known weigh less."""
        self.rounds *= share
        self._weights_squared *= share * share
        self._tokens *= share
        self._seconds *= share
        self._tokens_squared *= share
        self._seconds_squared *= share
        self._product *= share

    def add(self, tokens: float, seconds: float) -> None:
        self.rounds += 1
        self._weights_squared += 1
        self._tokens += tokens
        self._seconds += seconds
        self._tokens_squared += tokens * tokens
        self._seconds_squared += seconds * seconds
        self._product += tokens * seconds

    @property
    def value(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    @property
    def round_seconds(self) -> float:
        return self._seconds / self.rounds if self.rounds else 0.0

    @property
    def error(self) -> float:
        """Standard error; infinite where there is next to nothing."""
        rate = self.value
        effective = self.rounds**2 / self._weights_squared if self._weights_squared else 0.0
        if rate is None or effective < FEWEST - 0.01:
            return math.inf
        spread = self._tokens_squared - 2 * rate * self._product + rate * rate * self._seconds_squared
        few = 1 + _SMALL / effective  # a few rounds may be more alike than they should
        return few * math.sqrt(max(0.0, spread / self.rounds) / effective) / self.round_seconds


def differs(rate: Rate, before: Rate) -> bool:
    """Conditions have changed; not just by chance."""
    if rate.value is None or before.value is None:
        return False
    error = math.hypot(rate.error, before.error)
    return abs(rate.value - before.value) > max(_CHANGED * before.value, 3 * (error if error < math.inf else 0.0))


def faster_than(rate: Rate, than: Rate, certainty: float) -> bool:
    """By more than the margin and so many standard errors of the difference."""
    if rate.value is None or than.value is None:
        return False
    error = math.hypot(rate.error, than.error)
    return rate.value - than.value > max(MARGIN * than.value, certainty * error)
