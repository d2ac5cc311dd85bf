"""When speculation has stopped paying."""

from __future__ import annotations

import logging
from collections import deque

_log = logging.getLogger(__name__)


class CollapseAlarm:
    """Whether speculation has stopped paying: next to none of the last speculations had a token accepted.

    Goes off at 2% of `window` speculations and stays on until it is above 5% again.
    """

    def __init__(self, window: int = 100) -> None:
        self._fruitful: deque[bool] = deque(maxlen=window)
        self._count = 0
        self.on = False

    def add(self, accepted: int) -> None:
        """A speculation was verified and so many of its tokens were accepted."""
        if len(self._fruitful) == self._fruitful.maxlen:
            self._count -= self._fruitful[0]
        self._fruitful.append(accepted > 0)
        self._count += accepted > 0
        window = self._fruitful.maxlen or 1
        was_on, self.on = self.on, len(self._fruitful) == window and self._count <= window * (0.05 if self.on else 0.02)
        if self.on and not was_on:
            _log.warning(
                "acceptance has collapsed: of the last %d speculations %d had a token accepted. Answers stay right, "
                "but drafting costs more than it gives: does the draft fit the target?",
                window,
                self._count,
            )
