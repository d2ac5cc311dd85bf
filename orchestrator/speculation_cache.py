"""The speculation cache: what was prepared for each outcome of the verification now under way."""

from __future__ import annotations

from collections.abc import Iterable

from saguaro.orchestrator.types import Outcome, Speculation


class SpeculationCache:
    """Outcome -> speculation, per sequence, for one round.

    A round replaces the last one wholesale, so that nothing of round T can be served in round T+1.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, Outcome], Speculation] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def put_all(self, prepared: Iterable[tuple[int, Outcome, Speculation]]) -> None:
        """Forget the last round and hold what this one prepared: (sequence, outcome, speculation)."""
        self._prepared = {(sequence, outcome): speculation for sequence, outcome, speculation in prepared}

    def take(self, sequence: int, outcome: Outcome) -> Speculation | None:
        """The speculation prepared for this outcome, or None: a miss."""
        return self._prepared.pop((sequence, outcome), None)
