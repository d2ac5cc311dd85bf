"""The service's Prometheus metrics. `docs/metrics.md` says how to read each of them.

Ratios (hit rate, E_hit, T_p, …) are left to the reader's window: everything they are made of is a counter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric

from saguaro.errors import CapacityError, DrainingError, SaguaroError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.estimates import Estimates
from saguaro.orchestrator.histogram import Histogram
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.levels import Levels
from saguaro.orchestrator.metrics import busiest
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import FinishReason, SamplingParams
from saguaro.orchestrator.verifier import RoundResult, Verifier

_ROUND_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GUIDES = ("json_schema", "regex", "grammar")


class _Registry(CollectorRegistry):
    """Without the time each counter was created, which nobody reads and which doubles the number of series."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Telemetry:
    """Counts what happens in the leader's loop; used by its thread alone."""

    def __init__(
        self,
        config: DeploymentConfig,
        scheduler: Scheduler,
        verifier: Verifier,
        control: RoundControl,
        *,
        target_pool: BlockPool,
        draft_pool: BlockPool,
        compiling: Callable[[], int],
    ) -> None:
        lookahead = config.speculation.max_lookahead
        registry = self._registry = _Registry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"saguaro_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, bounds: Rows[float], label: str = "", values: Rows[str] = ("",)
        ) -> Histogram:
            made = Histogram(f"saguaro_{name}", text, bounds, label, values)
            registry.register(made)
            return made

        pools = {"target": target_pool, "draft": draft_pool}
        registry.register(Estimates(control))
        registry.register(Levels(config, scheduler, verifier, control, pools))

        self._rounds = counter("rounds", "Verifications of a batch")
        self._spans = {
            name: histogram(f"{name}_seconds", text, _ROUND_BUCKETS)
            for name, text in (
                ("verify", "Time of a verification: one forward of the target and the outcomes"),
                ("wait", "Time a round waited for the speculator's answer"),
                ("prepare", "Time the speculator took for the branches of a round"),
                ("backup", "Time the speculator took to draft after misses, once for all missing rows of a round"),
            )
        }
        self._idle = counter("speculator_idle_seconds", "Time no speculator had anything to do while rounds went on")
        self._link = verifier.link
        self._asked = False  # in the last round, so that the speculator may still work ahead from it
        self._unaccounted = 0.0  # seconds of rounds since the speculator's last answer in which it may have worked

        self._lengths = histogram(
            "acceptance_length",
            "Tokens a round of decoding emitted for a sequence, bonus included",
            range(1, lookahead + 2),
            "speculation",
            ("hit", "miss", "sd", "none"),
        )
        lookups = counter("lookups", "Outcomes looked up in the speculation cache", "result", "after")
        self._lookups = {
            (hit, after): lookups.labels("hit" if hit else "miss", {True: "hit", False: "miss", None: "none"}[after])
            for hit in (True, False)
            for after in (True, False, None)
        }
        self._used = counter("branches_used", "Branches that became a speculation: hits")
        self._deferred = counter("deferred_rows", "Rounds a sequence sat out while its speculation was drafted")
        positions = range(1, lookahead + 1)
        drafted = counter("draft_tokens", "Draft tokens verified, by place in the speculation", "position")
        accepted = counter("accepted_tokens", "Draft tokens accepted, by place in the speculation", "position")
        self._drafted = [drafted.labels(str(position)) for position in positions]
        self._accepted = [accepted.labels(str(position)) for position in positions]
        Gauge(
            "saguaro_acceptance_collapsed", "1 while next to no draft token is accepted", registry=registry
        ).set_function(lambda: control.alarm.on)

        Gauge("saguaro_requests_compiling", "Requests whose grammar is being compiled", registry=registry).set_function(
            compiling
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self._generated_tokens = counter("generated_tokens", "Tokens emitted")
        self._queued = histogram("queue_seconds", "From submission to a request's first round", _REQUEST_BUCKETS)
        self._first_token = histogram(
            "time_to_first_token_seconds", "From submission to a request's first token", _REQUEST_BUCKETS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "From token to token, those of a round evenly spread", _ROUND_BUCKETS
        )
        self._duration = histogram("request_seconds", "From submission to a request's end", _REQUEST_BUCKETS)
        finished = counter("requests_finished", "Requests that have ended, by finish reason", "reason")
        self._finished = {reason: finished.labels(reason) for reason in get_args(FinishReason)}
        refused = counter("requests_refused", "Requests that were refused at once", "reason")
        self._refused = {reason: refused.labels(reason) for reason in ("invalid", "capacity", "draining")}
        self._resumed = counter("requests_resumed", "Requests taken over from a service that had died, tokens included")
        structured = counter("structured_requests", "Requests whose answer follows a grammar", "guide")
        self._structured = {guide: structured.labels(guide) for guide in _GUIDES}
        self._connections = counter("draft_connections", "Speculators that have connected")

    def text(self) -> str:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def submitted(self, params: SamplingParams, prompt: int, delivered: int) -> None:
        """A request of so many prompt tokens was accepted."""
        self._prompt_tokens.inc(prompt)
        if delivered:
            self._resumed.inc()
        for guide in _GUIDES:
            if getattr(params, guide) is not None:
                self._structured[guide].inc()

    def refused(self, error: SaguaroError) -> None:
        reasons = {CapacityError: "capacity", DrainingError: "draining"}
        self._refused[reasons.get(type(error), "invalid")].inc()

    def started(self, seconds: float) -> None:
        """A request takes part in a round for the first time, so long after its submission."""
        self._queued.add(seconds)

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self._finished[reason].inc()
        self._duration.add(seconds)

    def emitted(self, tokens: int, seconds: float, *, first: bool) -> None:
        """A request got tokens, so long after its submission (`first`) or after its last ones."""
        self._generated_tokens.inc(tokens)
        if first:
            self._first_token.add(seconds)
        else:
            self._inter_token.add(seconds / tokens, tokens)

    def draft_connected(self) -> None:
        self._connections.inc()
        self._unaccounted = 0.0

    def round(self, batch: Rows[Sequence], result: RoundResult) -> None:
        """One round. O(batch), plus the lookahead."""
        self._rounds.inc()
        self._deferred.inc(result.deferred)
        self._time(result)
        drafted = [0] * (len(self._drafted) + 1)  # speculations by length, and by tokens accepted
        accepted = [0] * (len(self._drafted) + 1)
        lookups: defaultdict[tuple[bool, bool | None], int] = defaultdict(int)
        for sequence, tokens in zip(batch, result.tokens, strict=True):
            if not tokens or len(sequence.rounds) == 1:
                continue  # a chunk of a prompt decides nothing, and the first token comes from the prompt alone
            record, before = sequence.rounds[-1], sequence.rounds[-2]
            made = "none" if record.hit is None else "hit" if record.hit else "miss" if record.mode == "ssd" else "sd"
            self._lengths.add(record.tokens, value=made)
            if record.hit is not None and record.mode == before.mode == "ssd":
                lookups[record.hit, before.hit] += 1
            if record.drafted:
                drafted[record.drafted] += 1
                accepted[record.accepted] += 1
        for (hit, after), count in lookups.items():
            self._lookups[hit, after].inc(count)
            self._used.inc(count if hit else 0)
        for counts, counters in ((drafted, self._drafted), (accepted, self._accepted)):
            reaching = 0
            for position in range(len(counters), 0, -1):
                reaching += counts[position]
                if reaching:
                    counters[position - 1].inc(reaching)

    def _time(self, result: RoundResult) -> None:
        """Spans of both roles. The speculator's come with its answer and cover everything since the last one: what the
        rounds took in that time and the speculator did not work, it was idle. In rounds that ask it nothing it is idle
        from the second one on; the first may still see it work ahead."""
        verifying = 0.0
        for span in result.spans:
            if span.name not in self._spans:
                continue  # a speculator is not trusted with anything that could stop the service
            seconds = max(0, span.end - span.start) / 1e9
            self._spans[span.name].add(seconds)
            if span.name == "verify":
                verifying = seconds
            elif span.name == "wait":
                self._unaccounted += seconds
        worked = busiest(result.spans)
        if worked is not None:
            self._idle.inc(max(0.0, self._unaccounted - worked))
            self._unaccounted = 0.0
        if result.asked or self._asked:
            self._unaccounted += verifying
        elif any(self._link.connected):
            self._idle.inc(verifying)
        self._asked = result.asked
