"""How often, and after which pauses, a part of a deployment is started again."""

from __future__ import annotations

import time
from collections.abc import Callable

_SETTLED = 300.0  # seconds after which a part has run well: what it needed before is forgotten
_LONGEST_PAUSE = 60.0


class Restarts:
    """The budget of one part: `limit` restarts in a row, the first at once, the next after 1, 3, 7 … seconds.

    A part that has run for `settled` seconds since it was last started has its whole budget back, so that one death a
    day never adds up to the end of a deployment.
    """

    def __init__(self, limit: int, *, settled: float = _SETTLED, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._settled = settled
        self._clock = clock
        self._recent = 0
        self._since = clock()
        self.total = 0

    def started(self) -> None:
        """The part has just been started: from now on it is running."""
        self._since = self._clock()

    def take(self) -> float | None:
        """Seconds to wait before it is started again; None when the budget is used up."""
        if self._clock() - self._since >= self._settled:
            self._recent = 0
        if self._recent >= self._limit:
            return None
        pause = min(2.0**self._recent - 1, _LONGEST_PAUSE)
        self._recent += 1
        self.total += 1
        return pause
