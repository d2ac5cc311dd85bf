"""What work takes: times by rows, and mean durations of spans. Decayed, so that they follow what changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from saguaro.orchestrator.protocol import Span, Step

_DECAY = 0.99
_SPAN_DECAY = 0.95
_PRIOR_SLOPE = 0.03  # of a row, as a share of the first one's time, until rows of different numbers were seen
_PRIOR_WEIGHT = 4.0  # squared rows
_TYPICAL_ROWS = 8
_DRAFTS = ("prepare", "backup")  # spans of a speculator


class StepTime:
    """Seconds of a forward by its rows: a line through what was measured, by least squares, that never falls.

    Where all forwards had the same number of rows nothing says what another number takes; the prior slope does then.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0
        self._rows_squared = self._product = 0.0

    def observe(self, rows: float, seconds: float) -> None:
        self._weight = self._weight * _DECAY + 1
        self._rows = self._rows * _DECAY + rows
        self._seconds = self._seconds * _DECAY + seconds
        self._rows_squared = self._rows_squared * _DECAY + rows * rows
        self._product = self._product * _DECAY + rows * seconds

    def observe_steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.observe(step.rows, step.nanoseconds / 1e9)

    @property
    def known(self) -> bool:
        return self._weight > 0

    @property
    def slope(self) -> float:
        """Seconds of one more row."""
        if not self.known:
            return 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = max(0.0, self._rows_squared - self._weight * rows * rows)
        joint = self._product - self._weight * rows * seconds
        prior = _PRIOR_SLOPE * seconds / (1 + _PRIOR_SLOPE * max(0.0, rows - 1))
        fitted = (joint + _PRIOR_WEIGHT * prior) / (spread + _PRIOR_WEIGHT)
        return min(max(0.0, fitted), seconds / rows if rows else 0.0)

    def __call__(self, rows: float) -> float:
        """Seconds of a forward over so many rows; 0 while nothing was measured."""
        if not self.known:
            return 0.0
        return max(0.0, self._seconds / self._weight + self.slope * (rows - self._rows / self._weight))


class Pace:
    """How fast one speculator is."""

    def __init__(self) -> None:
        self.draft = StepTime()  # by rows of a draft step
        self.trunk = StepTime()  # of the draft's forward over trunks
        self.overhead = 0.0  # seconds that it works in a round beside its steps

    @property
    def typical(self) -> float:
        """By which one is slower than another."""
        return self.trunk(_TYPICAL_ROWS) + self.draft(_TYPICAL_ROWS) + self.overhead


class Costs:
    """Times of the work of both roles, and from them T_p and T_b.

    Of several replicas of the draft a round waits for the slowest; `present` are those that count, and all if empty.
    """

    def __init__(self) -> None:
        self.verify = StepTime()  # by rows of the verification
        self.present: Collection[int] = ()
        self._paces: dict[int, Pace] = defaultdict(Pace)  # by replica
        self._sums: dict[tuple[str, int], tuple[float, float]] = {}  # span, replica -> decayed nanoseconds and spans

    def observe_draft(self, steps: Iterable[Step], *, calibrating: bool = False) -> None:
        """`calibrating`: plain forwards, from which both kinds of steps are guessed at first."""
        for step in steps:
            pace = self._paces[step.replica]
            for time, meant in ((pace.trunk, step.trunk), (pace.draft, not step.trunk)):
                if meant or calibrating:
                    time.observe(step.rows, step.nanoseconds / 1e9)

    def observe_work(self, spans: Iterable[Span], steps: Iterable[Step]) -> None:
        """What each speculator did in one round, of which its steps are a part."""
        beside: dict[int, int] = defaultdict(int)
        for span in spans:
            if span.name in _DRAFTS:
                beside[span.replica] += span.end - span.start
        for step in steps:
            beside[step.replica] -= step.nanoseconds
        for replica, nanoseconds in beside.items():
            pace = self._paces[replica]
            pace.overhead += (1 - _SPAN_DECAY) * (max(0.0, nanoseconds / 1e9) - pace.overhead)

    def observe(self, spans: Iterable[Span]) -> None:
        for span in spans:
            total, count = self._sums.get((span.name, span.replica), (0.0, 0.0))
            self._sums[span.name, span.replica] = (
                total * _SPAN_DECAY + span.end - span.start,
                count * _SPAN_DECAY + 1,
            )

    @property
    def slowest(self) -> Pace:
        """Of the replicas that count."""
        counting = [pace for replica, pace in self._paces.items() if self._counts(replica)]
        return max(counting, key=lambda pace: pace.typical, default=Pace())

    def seconds(self, name: str) -> float | None:
        """Mean duration of a span, at the replica where it takes longest; None for one that was never seen."""
        means = [
            total / count / 1e9
            for (each, replica), (total, count) in self._sums.items()
            if each == name and (name not in _DRAFTS or self._counts(replica))
        ]
        return max(means, default=None)

    @property
    def t_p(self) -> float | None:
        """Preparing a round's branches, in verifications."""
        return self._in_verifications("prepare")

    @property
    def t_b(self) -> float | None:
        """Drafting after a miss, in verifications."""
        return self._in_verifications("backup")

    def _counts(self, replica: int) -> bool:
        return not self.present or replica in self.present

    def _in_verifications(self, name: str) -> float | None:
        work, verify = self.seconds(name), self.seconds("verify")
        return work / verify if work is not None and verify else None
