"""What is measured: spans of work on the host's monotonic clock, and the figures of one request."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from saguaro.orchestrator.protocol import Span, Step

if TYPE_CHECKING:  # a client needs the figures, not the leader's torch
    from saguaro.orchestrator.sequence import Sequence


class _Open:
    """A span from entering to leaving it. Rounds wait for it to begin and end, for which `contextmanager` and its
    generator take twice as long."""

    def __init__(self, name: str, sequences: Rows[int], clock: Callable[[], int], spans: list[Span]) -> None:
        self._name = name
        self._sequences = sequences
        self._clock = clock
        self._spans = spans

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *error: object) -> None:
        self._spans.append(Span(self._name, self._start, self._clock(), tuple(self._sequences)))


class Timeline:
    """Collects spans, and the steps of a model, until somebody fetches them. `clock` counts nanoseconds."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._spans: list[Span] = []
        self._steps: list[Step] = []

    def span(self, name: str, sequences: Rows[int] = ()) -> _Open:
        return _Open(name, sequences, self.clock, self._spans)

    @contextmanager
    def step(self, rows: int, *, trunk: bool = False) -> Iterator[None]:
        start = self.clock()
        yield
        self._steps.append(Step(rows, self.clock() - start, trunk))

    def drain(self) -> tuple[Span, ...]:
        """Every span since the last call."""
        spans = tuple(self._spans)
        self._spans.clear()
        return spans

    def drain_steps(self) -> tuple[Step, ...]:
        """Every step since the last call."""
        steps, self._steps = tuple(self._steps), []
        return steps


@dataclass(frozen=True)
class RequestStats:
    """The figures of one request. A figure without data (no hit yet, none possible as in sd) is None, never a zero."""

    mode: str  # of most of its rounds
    rounds: int
    tokens: int
    tokens_per_second: float | None  # of decoding: tokens after the first, over the time after the first
    acceptance_length: float | None  # tokens per round of decoding, bonus included
    hit_rate: float | None
    e_hit: float | None  # acceptance length of rounds whose speculation was a hit
    e_miss: float | None
    t_p: float | None  # preparing a round's branches, in units of one verification
    t_b: float | None  # drafting after a miss, in the same units
    wait_ms: float | None  # mean time the verifier waited for the speculator in a round
    idle_ms: float | None  # mean time in a round in which no speculator had anything to do
    branches: float | None  # mean number prepared for a sequence of its batch in a round
    verify_ms: float | None  # mean time of a verification
    ttft_ms: float | None  # from submission to the first token
    draft_tokens: int  # verified
    accepted_draft_tokens: int
    near_ties: tuple[int, ...]  # greedy tokens (index in the answer) that another forward shape might choose otherwise


def _mean(values: Iterable[float]) -> float | None:
    data = list(values)
    return sum(data) / len(data) if data else None


class RoundWork(NamedTuple):
    """What both roles did in a round."""

    spans: Rows[Span]
    branches: float | None = None  # prepared for a sequence in a round, since the speculator's last answer


def busiest(spans: Iterable[Span]) -> float | None:
    """Seconds of work of the speculator that has worked most, by the answers in a round's spans; None without any."""
    worked: defaultdict[int, float] = defaultdict(float)  # by replica
    for span in spans:
        if span.name in ("prepare", "backup"):
            worked[span.replica] += _seconds(span)
    return max(worked.values(), default=None)


def request_stats(sequence: Sequence, work: Rows[RoundWork], submitted: int, first: int, last: int) -> RequestStats:
    """The figures of a finished sequence. Its first round is the prefill, which emits the first token.

    Times are in nanoseconds; `first` and `last` are those of the first and the last token. `work` is that of the rounds
    it took part in, prefill left out.
    """
    rounds = sequence.rounds
    decoding = rounds[1:]
    looked_up = [r for r in decoding if r.hit is not None and r.mode == "ssd"]  # sd prepares nothing to find
    spans = list(chain.from_iterable(each.spans for each in work))
    verify = _mean(_named("verify", spans))
    wait = _mean(_named("wait", spans))
    prepare, idle, branches = _beside(work)

    def in_verifications(seconds: Rows[float]) -> float | None:
        mean = _mean(seconds)
        return mean / verify if mean is not None and verify else None

    tokens = sum(record.tokens for record in decoding)
    elapsed = (last - first) / 1e9
    idling = _mean(idle)
    return RequestStats(
        mode=Counter(record.mode for record in rounds).most_common(1)[0][0] if rounds else sequence.mode,
        rounds=len(rounds),
        tokens=sum(record.tokens for record in rounds),
        tokens_per_second=tokens / elapsed if elapsed > 0 else None,
        acceptance_length=_mean(record.tokens for record in decoding),
        hit_rate=_mean(float(bool(record.hit)) for record in looked_up),
        e_hit=_mean(record.tokens for record in looked_up if record.hit),
        e_miss=_mean(record.tokens for record in looked_up if not record.hit),
        t_p=in_verifications(prepare) if looked_up else None,
        t_b=in_verifications(_named("backup", spans)),
        wait_ms=wait * 1e3 if wait is not None else None,
        idle_ms=idling * 1e3 if idling is not None else None,
        branches=_mean(branches),
        verify_ms=verify * 1e3 if verify is not None else None,
        ttft_ms=(first - submitted) / 1e6,
        draft_tokens=sum(record.drafted for record in rounds),
        accepted_draft_tokens=sum(record.accepted for record in rounds),
        near_ties=tuple(
            position - sequence.request.prompt_length for position in sequence.near_ties if position < sequence.length
        ),
    )


def _beside(work: Iterable[RoundWork]) -> tuple[list[float], list[float], list[float]]:
    """By each answer but the first, what the speculator did since the one before: seconds it prepared, seconds it
    idled, branches for a sequence.

    The first answer is left out because it also tells of what came before: a prompt, and the last round of a request
    that had ended.
    """
    prepare: list[float] = []
    idle: list[float] = []
    branches: list[float] = []
    passed: float | None = None  # since the last answer
    for spans, prepared in work:
        waited, worked = sum(_named("wait", spans)), busiest(spans)
        if passed is not None:
            passed += waited
        if worked is not None:
            if passed is not None:
                prepare += _named("prepare", spans)
                idle.append(max(0.0, passed - worked))
                if prepared is not None:
                    branches.append(prepared)
            passed = 0.0
        if passed is not None:
            passed += sum(_named("verify", spans))
    return prepare, idle, branches


def _named(name: str, spans: Iterable[Span]) -> list[float]:
    """Seconds of each span of that name."""
    return [_seconds(span) for span in spans if span.name == name]


def _seconds(span: Span) -> float:
    # A speculator is not trusted with anything that could stop the service.
    return max(0, span.end - span.start) / 1e9


_ROLES = {"verify": 1, "wait": 1, "prepare": 2, "backup": 2}  # and what each of them does
_SEQUENCES = 3


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Spans as a Chrome trace (load it in chrome://tracing or Perfetto).

    A line for the verifier and each speculator, and one for each sequence with the verifications it took part in and
    those it sat out. Requests of one batch share spans: each is drawn once.
    """
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": pid, "args": {"name": name}}
        for pid, name in ((1, "verifier"), (2, "speculator"), (_SEQUENCES, "sequences"))
    ]
    for span in sorted(set(spans), key=lambda span: span.start):
        times = {"ph": "X", "name": span.name, "ts": span.start / 1e3, "dur": (span.end - span.start) / 1e3}
        if role := _ROLES.get(span.name):
            events.append({**times, "pid": role, "tid": role + span.replica, "args": {"sequences": span.sequences}})
        events.extend({**times, "pid": _SEQUENCES, "tid": sequence} for sequence in span.sequences)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
