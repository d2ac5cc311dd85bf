"""Which of ar, sd and ssd runs: the one measured to emit most tokens a second at the current batch size.

Pure: it is told what each round took, and says what the next one is to be. Modes that do not run are probed for a few
rounds now and then. What probes lose against the running mode is paid from an allowance of `SHARE` of all time: one
that lost much is not repeated until that is earned again. So whatever the draft does, the whole stays within a few per
cent of plain decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from saguaro.orchestrator.rates import FEWEST, MARGIN, Rate, differs, faster_than
from saguaro.orchestrator.types import Mode

Reason = Literal["faster", "slower", "batch", "draft_lost", "draft_back"]

SHARE = 0.02  # of all time may be lost to probes
BURST = 20  # rounds of the running mode that may be lost at once after a quiet time
SETTLING = 2  # rounds after a change that are not counted: the draft catches up, and nothing is prepared yet
LEAST = 8  # rounds that a probe counts
MOST = 64  # while it is not slower and not yet certainly faster
PATIENCE = 40  # rounds in which a probe has to have come to its end
HOPELESS = 0.6  # of the running mode's speed: the probe ends at once
FIRST_PAUSE, LONGEST_PAUSE = 64, 512  # rounds between two probes of a mode
STEADY = 4  # rounds that another batch size has to last
_DECAY = 1 - 1 / 128  # of what was measured of the running mode, with each round
_WINDOW = 12  # latest rounds of the running mode, for a sudden change: half of what was known, or less
_NEWEST = 4  # of them, from which it is then known anew


@dataclass(frozen=True)
class Change:
    before: Mode
    after: Mode
    reason: Reason
    batch: int
    rate_before: float | None  # tokens per second of a sequence, as far as measured
    rate_after: float | None


@dataclass(frozen=True)
class Measured:
    """A round without prompts."""

    mode: Mode  # that it was meant to run in
    rows: int  # sequences
    tokens: int
    seconds: float
    settled: bool  # it did run in that mode: no sequence is still catching up


@dataclass
class _Arm:
    """What is known of a mode at one batch size."""

    rate: Rate = field(default_factory=Rate)
    pause: int = FIRST_PAUSE
    due: int = 0  # rounds of this batch size until the next probe
    lost: float = 0.0  # seconds its last probe lost


@dataclass
class _Bucket:
    """One band of batch sizes."""

    current: Mode
    arms: dict[Mode, _Arm]
    settling: int = SETTLING
    rounds: int = 0  # counted since the last change
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # tokens, seconds
    chosen_rate: float | None = None  # of the running mode soon after it was chosen


@dataclass
class _Probe:
    mode: Mode
    settling: int = SETTLING
    rounds: int = 0
    counted: int = 0
    lost: float = 0.0
    rate: Rate = field(default_factory=Rate)  # of this probe alone
    total: Rate = field(default_factory=Rate)  # with what was known before


class ModeControl:
    """`modes` may run; the first is where it starts. Not `auto`: that one runs."""

    def __init__(self, modes: Sequence[Mode], *, auto: bool, on_change: Callable[[Change], None]) -> None:
        self._modes = tuple(modes)
        self._auto = auto
        self._on_change = on_change
        self._buckets: dict[int, _Bucket] = {}
        self._bucket = self._add_bucket(0, modes[0])
        self._key = 0
        self._batch = 1
        self._elsewhere = 0  # rounds in a row that belong to another bucket
        self._probe: _Probe | None = None
        self._allowance = 0.0  # seconds
        self.drafting = True  # a draft is there
        self._shown: Mode = modes[0]
        self.probes: dict[Mode, int] = dict.fromkeys(modes, 0)

    @property
    def effective(self) -> Mode:
        """What the deployment runs now, probes aside."""
        return self._bucket.current if self.drafting else "ar"

    def rates(self) -> dict[tuple[int, Mode], float]:
        """Measured tokens per second of a sequence, by largest batch of the band and mode."""
        return {
            (2**key, mode): arm.rate.value
            for key, bucket in self._buckets.items()
            for mode, arm in bucket.arms.items()
            if arm.rate.value is not None
        }

    def start(self, mode: Mode) -> None:
        """Where to begin, as long as nothing has been measured. No change: nothing ran before."""
        if not any(arm.rate.rounds for arm in self._bucket.arms.values()):
            self._bucket.current = mode
            self._shown = self.effective

    def draft(self, there: bool) -> None:
        """A draft has come or gone. What was measured with the last one still counts, but not for much."""
        if there == self.drafting:
            return
        self.drafting = there
        self._abandon_probe()
        for bucket in self._buckets.values():
            bucket.settling, bucket.rounds = SETTLING, 0
            for mode, arm in bucket.arms.items():
                if mode != "ar":
                    arm.rate.fade(0.1)
                    arm.pause, arm.due = FIRST_PAUSE, min(arm.due, LEAST)
        self._show("draft_back" if there else "draft_lost")

    def mode(self, batch: int) -> Mode:
        """For the next round, of so many sequences."""
        self._batch = batch
        key = max(0, batch - 1).bit_length()
        self._elsewhere = 0 if key == self._key else self._elsewhere + 1
        if self._elsewhere >= STEADY or (self._elsewhere and key not in self._buckets and not self._measured):
            self._abandon_probe()
            self._elsewhere, self._key = 0, key
            if key not in self._buckets:
                self._add_bucket(key, self._bucket.current)
            self._bucket = self._buckets[key]
            self._bucket.settling = SETTLING
            self._show("batch")
        if not self.drafting:
            return "ar"
        return self._probe.mode if self._probe else self._bucket.current

    def observe(self, round: Measured) -> None:
        """What the round took that `mode` was asked for."""
        if self._elsewhere or not self.drafting:
            return  # of another batch size
        self._account(round)
        if self._probe:
            self._observe_probe(self._probe, round)
        elif round.settled and self._bucket.settling:
            self._bucket.settling -= 1
        elif round.settled:
            self._learn(self._bucket, round)
        if self._auto and self._probe is None and self._bucket.rounds >= LEAST:
            self._reconsider()
            self._perhaps_probe()

    @property
    def _measured(self) -> bool:
        return any(arm.rate.rounds for arm in self._bucket.arms.values())

    def _add_bucket(self, key: int, mode: Mode) -> _Bucket:
        # Plain decoding first: everything is measured against it.
        arms = {each: _Arm() for each in sorted({*self._modes, "ar"}, key=("ar", "ssd", "sd").index)}
        self._buckets[key] = _Bucket(mode, arms)
        return self._buckets[key]

    def _account(self, round: Measured) -> None:
        """Earn, and pay what the round lost: a probe against the running mode, others against plain decoding."""
        current = self._bucket.arms[self._bucket.current].rate
        against = current if self._probe else self._bucket.arms["ar"].rate
        self._allowance += SHARE * round.seconds
        lost = round.seconds - round.tokens / round.rows / against.value if against.value else 0.0
        most = BURST * current.round_seconds
        if self._probe:
            self._probe.lost += lost
        elif round.mode != "ar":
            # A running mode that has become slow is left soon; what it lost may hold up probes for a while only.
            self._allowance = max(self._allowance - lost, min(self._allowance, -most / 2))
        self._allowance = min(self._allowance, most)

    def _learn(self, bucket: _Bucket, round: Measured) -> None:
        """A round of the running mode. A sudden change makes worthless what was known, of the other modes too."""
        arm = bucket.arms[bucket.current]
        bucket.rounds += 1
        known = arm.rate.value
        arm.rate.fade(_DECAY)
        arm.rate.add(round.tokens / round.rows, round.seconds)
        bucket.recent.append((round.tokens / round.rows, round.seconds))
        for other in bucket.arms.values():
            other.due -= 1
        tokens, seconds = map(sum, zip(*bucket.recent, strict=True))
        if known and len(bucket.recent) == _WINDOW and tokens < known * seconds / 2:
            arm.rate = Rate()
            for newest in list(bucket.recent)[-_NEWEST:]:
                arm.rate.add(*newest)
            bucket.recent.clear()
            for other in bucket.arms.values():
                other.due, other.pause = min(other.due, LEAST), FIRST_PAUSE
        if bucket.rounds == MOST:
            bucket.chosen_rate = arm.rate.value

    def _abandon_probe(self) -> None:
        if self._probe:
            self._allowance -= max(0.0, self._probe.lost)
            self._probe = None

    def _perhaps_probe(self) -> None:
        running = self._bucket.arms[self._bucket.current].rate.value or 0.0
        for mode, arm in self._bucket.arms.items():
            # What was faster than the running mode when it was last seen is expected to lose nothing.
            affordable = arm.lost <= self._allowance or (arm.rate.value or 0.0) > running
            if mode != self._bucket.current and arm.due <= 0 and affordable:
                self._probe = _Probe(mode, total=copy(arm.rate))
                self._probe.total.fade(0.5)
                self.probes[mode] = self.probes.get(mode, 0) + 1
                return

    def _observe_probe(self, probe: _Probe, round: Measured) -> None:
        probe.rounds += 1
        arm, current = self._bucket.arms[probe.mode], self._bucket.arms[self._bucket.current].rate
        if round.settled and probe.settling:
            probe.settling -= 1
        elif round.settled:
            probe.counted += 1
            for rate in (probe.rate, probe.total):
                rate.add(round.tokens / round.rows, round.seconds)
        now, against = probe.rate.value, current.value
        hopeless = probe.lost > BURST * current.round_seconds > 0
        if now is not None and against and probe.counted >= FEWEST:
            hopeless |= now < HOPELESS * against
        if not hopeless and probe.rounds < PATIENCE and probe.counted < LEAST:
            return
        if not probe.counted or now is None:
            self._end_probe(probe, arm)
            return
        known = probe.rate if differs(probe.rate, arm.rate) else probe.total
        faster = not hopeless and faster_than(known, current, _certainty(probe.mode))
        promising = not hopeless and against is not None and now >= (1 - MARGIN) * against
        if promising and not faster and probe.counted < MOST and probe.rounds < PATIENCE + MOST:
            return
        self._end_probe(probe, arm)
        if faster:
            self._switch(probe.mode, "faster")

    def _end_probe(self, probe: _Probe, arm: _Arm) -> None:
        self._abandon_probe()
        if differs(probe.rate, arm.rate):
            arm.pause, arm.rate = FIRST_PAUSE, probe.rate  # what was known no longer holds
        else:
            arm.pause, arm.rate = min(2 * arm.pause, LONGEST_PAUSE), probe.total
        arm.due = arm.pause
        # What the next one is expected to lose; more than the allowance can hold is never asked for.
        arm.lost = min(max(0.0, probe.lost), BURST * self._bucket.arms[self._bucket.current].rate.round_seconds)
        self._bucket.settling = SETTLING

    def _reconsider(self) -> None:
        """Whether another mode is faster by what is known already: because the running one has become slow."""
        current = self._bucket.arms[self._bucket.current].rate
        others = [(mode, arm.rate) for mode, arm in self._bucket.arms.items() if mode != self._bucket.current]
        better = [(rate.value or 0.0, mode) for mode, rate in others if faster_than(rate, current, _certainty(mode))]
        if better:
            was, now = self._bucket.chosen_rate, current.value
            slower = was is not None and now is not None and now < 0.9 * was
            self._switch(max(better)[1], "slower" if slower else "faster")

    def _switch(self, mode: Mode, reason: Reason) -> None:
        bucket = self._bucket
        if mode == bucket.current:
            return
        left = bucket.arms[bucket.current]
        # What the mode that is left can do was measured just now: it is looked at again after a while, not at once.
        left.due, left.pause, left.lost = FIRST_PAUSE, FIRST_PAUSE, 0.0
        # What was known of the new one may be old: it has to prove itself.
        arm = bucket.arms[mode]
        if reason == "slower" and arm.rate.rounds:
            arm.rate.fade(min(1.0, FEWEST / arm.rate.rounds))
        bucket.current, bucket.settling, bucket.rounds, bucket.chosen_rate = mode, SETTLING, 0, None
        bucket.recent.clear()
        self._show(reason)

    def _show(self, reason: Reason) -> None:
        before, after = self._shown, self.effective
        if before == after:
            return
        self._shown = after
        rates = [self._bucket.arms[mode].rate.value if mode in self._bucket.arms else None for mode in (before, after)]
        self._on_change(Change(before, after, reason, self._batch, *rates))


def _certainty(mode: Mode) -> float:
    """Standard errors by which a mode has to be faster. Plain decoding is what must never be fallen short of."""
    return 1.0 if mode == "ar" else 2.0
