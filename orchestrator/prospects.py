"""Whether speculating for one request is worth while: a text that no draft can guess is decoded plainly.

Each request is judged by its own speculations alone, so that none takes anything from another one.
"""

from __future__ import annotations

FRUITLESS = 40  # speculations in a row: with 95% certainty fewer than 8 in 100 have a token accepted
PROBE = 4  # speculations after a pause, before the next one
FIRST_PAUSE, LONGEST_PAUSE = 32, 256  # plain rounds; never more than what was fruitless before them


class Prospects:
    """Collapsed when none of `FRUITLESS` speculations in a row had a token accepted, until one has again.

    Then plain rounds alternate with short probes, after pauses that double. Rounds without a draft token say nothing.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.collapsed = False
        self._patience = FRUITLESS  # fruitless speculations until the next pause
        self._pause = FIRST_PAUSE
        self._resting = 0  # plain rounds still to come

    @property
    def plain(self) -> bool:
        """The next round asks for no speculation."""
        return self._resting > 0

    @property
    def returning(self) -> bool:
        """The next round is the last one of a pause: the draft may catch up, and nobody waits for it."""
        return self._resting == 1

    def observe(self, drafted: int, accepted: int) -> bool:
        """A round verified so many draft tokens. True: the request has collapsed just now."""
        if self._resting:
            self._resting -= 1
        elif accepted:
            self._begin()
        elif drafted:
            self._patience -= 1
            if not self._patience:
                was, self.collapsed = self.collapsed, True
                self._resting, self._patience = self._pause, PROBE
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                return not was
        return False
