"""How the next round is run: what was measured goes in, mode, lookahead, budget and backup come out.

The leader asks before each round, says after it what it took, and while the next one runs all that can be learned from
it. Nothing here changes what is emitted: under `coupled` no token depends on a setting, and under `ratio` a setting
depends on nothing but outcomes that are decided and times.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as Rows

from msgspec.structs import replace

from saguaro.orchestrator.analysis import overall_hit_rate
from saguaro.orchestrator.collapse_alarm import CollapseAlarm
from saguaro.orchestrator.config import SpeculationConfig
from saguaro.orchestrator.costs import Costs
from saguaro.orchestrator.estimators import DECAY, Counts
from saguaro.orchestrator.fan_out_policy import Curve, MissCurve
from saguaro.orchestrator.mode_control import Change, Measured, ModeControl, Reason
from saguaro.orchestrator.protocol import Report, Step
from saguaro.orchestrator.sequence import RoundRecord, Sequence
from saguaro.orchestrator.speed_model import Choices, Outlook, Planner, best
from saguaro.orchestrator.types import MODES, Backup, Mode, Setting
from saguaro.orchestrator.verifier import RoundResult

_log = logging.getLogger(__name__)
_WHY: dict[Reason, str] = {
    "faster": "it was measured to be faster",
    "slower": "the other has become slower",
    "batch": "the batch has another size",
    "draft_lost": "the draft is away",
    "draft_back": "the draft is back",
}


class RoundControl:
    """`max_budget`: branches of a sequence that the pool of one of the draft's `replicas` has room for."""

    def __init__(
        self, config: SpeculationConfig, *, max_budget: int, replicas: int = 1, verify_steps: Rows[Step] = ()
    ) -> None:
        self.costs = Costs()
        self.costs.verify.observe_steps(verify_steps)
        self.alarm = CollapseAlarm()
        self.report = Report()
        self.changes: Counter[tuple[Mode, Mode, Reason]] = Counter()
        self._why = "as configured"
        self._config = config
        self._max_budget = max_budget
        self._replicas = replicas
        self._present: set[int] = set()  # replicas of the draft
        self._plan_anew()
        modes = MODES[: MODES.index(config.limit) + 1]
        self._auto = auto = config.mode == "auto"
        self._started = False  # until the first draft has connected nothing has run that could change
        self._modes = ModeControl(modes[::-1] if auto else (config.limit,), auto=auto, on_change=self._changed)
        self._modes.draft(False)  # none has connected yet
        self._accepted = {made: Counts(DECAY) for made in ("hit", "miss", "sd")}  # by place, of what drafted it
        self._after_prompt = False
        self._lookups = {after_hit: Counts(DECAY) for after_hit in (True, False)}
        self._latest = self._planner.setting(self._outlook, config.limit, 1)

    # For the leader's loop

    def setting(self, batch: int) -> Setting:
        """Of the next round, of so many sequences."""
        mode = self._modes.mode(batch)
        self._latest = self._planner.setting(self._outlook, mode, batch, anew=mode != self._latest.mode)
        return self._latest

    def observe(self, batch: Rows[Sequence], result: RoundResult) -> None:
        """What the round took that was run with the latest setting: the next round's mode may depend on it."""
        if self._auto:
            self._measure(batch, result, self._latest)

    def learn(self, batch: Rows[Sequence], result: RoundResult, setting: Setting) -> None:
        """Acceptance, hits and times of a round that was run with `setting`. This may come while the next one runs."""
        if not self._auto:
            self._measure(batch, result, setting)
        self.costs.observe_draft(result.steps)
        self.report = result.report or self.report
        drafted = 0
        for sequence, tokens in zip(batch, result.tokens, strict=True):
            if tokens and len(sequence.rounds) > 1:  # the first token comes from the prompt alone
                drafted += sequence.rounds[-1].drafted
                self._learn(sequence.rounds[-2], sequence.rounds[-1], setting.backup)
        after_prompt, self._after_prompt = self._after_prompt, not result.decoding
        if not result.decoding:
            return
        if result.steps and not after_prompt:  # what the speculator reports is of the round before
            self.costs.observe_work(result.spans, result.steps)
        self.costs.observe(result.spans)
        for span in result.spans:
            if span.name == "verify":
                self.costs.verify.observe(len(batch) + drafted, (span.end - span.start) / 1e9)

    def _measure(self, batch: Rows[Sequence], result: RoundResult, setting: Setting) -> None:
        if result.decoding:  # a prompt's round says nothing of what decoding takes
            tokens = sum(map(len, result.tokens))
            self._modes.observe(Measured(setting.mode, len(batch), tokens, result.seconds, result.settled))

    def _learn(self, before: RoundRecord, record: RoundRecord, backup: Backup) -> None:
        if record.drafted:
            self.alarm.add(record.accepted)
        if record.hit is None:
            return
        if record.mode == before.mode == "ssd" and before.hit is not None:
            self._lookups[before.hit].add(1, 0 if record.hit else None)
        made = "sd" if record.mode == "sd" else "hit" if record.hit else "miss"
        if made != "hit" and _drafting(backup) != _drafting(self._choices.backups[0]):
            return  # what others draft is judged by the speculator's report
        # Only places that were decided count: what else had been drafted must not matter.
        self._accepted[made].add_each(min(record.accepted + 1, record.asked), range(record.accepted))

    def draft(self, there: bool, steps: Rows[Step] = (), replica: int = 0) -> None:
        """A speculator has connected, with what it measured of its model, or is gone."""
        self.costs.observe_draft([replace(step, replica=replica) for step in steps], calibrating=True)
        if there != (replica in self._present):
            self._present ^= {replica}
            self.costs.present = self._present
            self._plan_anew()
        if there and not self._started and self._config.mode == "auto":
            outlook = self._outlook()
            fastest = max(MODES[::-1], key=lambda mode: best(outlook, self._choices, mode, 1).tokens_per_second)
            self._modes.start(fastest)
            self._why = "predicted to be the fastest"
        self._modes.draft(bool(self._present))
        self._started |= there

    # For whoever wants to know

    @property
    def mode(self) -> Mode:
        """What new requests get now."""
        return self._modes.effective

    @property
    def reason(self) -> str:
        """Why that mode."""
        return self._why if self._modes.drafting or self._config.limit == "ar" else _WHY["draft_lost"]

    @property
    def latest(self) -> Setting:
        """Of the last round, probes included."""
        return self._latest

    @property
    def lookahead(self) -> int:
        """The most draft tokens that the next round may verify for a sequence."""
        return 0 if self._latest.mode == "ar" else self._latest.lookahead

    @property
    def probes(self) -> dict[Mode, int]:
        """Probes of each mode so far."""
        return self._modes.probes

    def best_settings(self) -> list[Setting]:
        """Of each mode that may run, for one sequence, by what is measured so far."""
        outlook = self._outlook()
        return [best(outlook, self._choices, mode, 1).setting for mode in MODES[: MODES.index(self._config.limit) + 1]]

    def rates(self) -> dict[tuple[int, Mode], float]:
        """Measured tokens per second of a sequence, by largest batch of the band and mode."""
        return self._modes.rates()

    def acceptance(self, made: str) -> list[float]:
        """Of each place, given that the ones before were accepted: after a `hit`, a `miss`, or in `sd`."""
        places = len(self._accepted[made].trials)
        return self._accepted[made].rates(self._pooled(places))

    def hit_rate(self, after_hit: bool) -> float | None:
        """p_hit after a round that hit, and after one that missed; None while nothing was looked up."""
        counts = self._lookups[after_hit]
        return float(counts.successes[0] / counts.trials[0]) if len(counts.trials) else None

    @property
    def p_hit(self) -> float | None:
        """Over all (Theorem 7)."""
        after_hit, after_miss = self.hit_rate(True), self.hit_rate(False)
        if after_hit is None or after_miss is None:
            return after_hit if after_miss is None else after_miss
        return overall_hit_rate(after_hit, after_miss)

    # Inside

    def _plan_anew(self) -> None:
        """With the replicas that are there; before the first one has come and after the last one is gone, all."""
        config, present = self._config, len(self._present) or self._replicas
        # What one replica has to prepare at most (`shards.largest`) has to fit into its pool.
        most = max(self._max_budget, present * self._max_budget - (present - 1) * (config.max_lookahead + 1))
        self._choices = Choices(config.lookaheads, config.budgets(most, present, self._replicas), config.backups)
        self._planner = Planner(self._choices)

    def _outlook(self) -> Outlook:
        places = max(self._choices.lookaheads)
        pooled = self._pooled(places)
        of = {made: counts.rates(pooled) for made, counts in self._accepted.items()}
        rejected, accepted = self._curve(False), self._curve(True)
        backups: dict[Backup, Rows[float]] = {}
        in_turn: dict[Backup, Rows[float]] = {}
        for name in self._choices.backups:
            drafted = _drafting(name) == "primary" or len(self._choices.backups) == 1  # its own figures are measured
            backups[name] = of["miss"] if drafted else self._of_text(name, places)
            in_turn[name] = of["sd"] if drafted else backups[name]
        pace = self.costs.slowest
        return Outlook(
            verify=self.costs.verify,
            draft=pace.draft,
            trunk=pace.trunk,
            overhead=pace.overhead,
            written=self._config.fan_out.written,
            replicas=len(self._present) or self._replicas,
            least_probability=self._config.fan_out.ranked_from or 0.0,
            prepared=of["hit"],
            backups=backups,
            in_turn=in_turn,
            rejected=rejected,
            accepted=accepted,
        )

    def _pooled(self, places: int) -> list[float]:
        """Acceptance by place over everything; beyond what was seen, that of the last places seen."""
        prior = self._config.fan_out.acceptance
        trials = sum(float(counts.trials.sum()) for counts in self._accepted.values())
        successes = sum(float(counts.successes.sum()) for counts in self._accepted.values())
        return [(successes + 10 * prior) / (trials + 10)] * places

    def _of_text(self, name: Backup, places: int) -> list[float]:
        """Of a backup without a model, from what the speculator says it would have had accepted."""
        if name == "none":
            return []
        known = list(self.report.acceptance.get(name, ()))
        prior = known[-1] if known else self._config.prior_after(name)
        return [*known, *[prior] * places][:places]

    def _curve(self, accepted: bool) -> Curve:
        """The fits of all situations, by what each rests on; the prior where there is none."""
        fits = [fit for fit in self.report.curves if fit.accepted == accepted]
        rounds = sum(fit.rounds for fit in fits)
        if not rounds:
            return self._config.prior.accepted if accepted else self._config.prior.rejected
        scale = sum(fit.scale * fit.rounds for fit in fits) / rounds
        exponent = sum(fit.exponent * fit.rounds for fit in fits) / rounds
        return MissCurve(scale, exponent)

    def _changed(self, change: Change) -> None:
        if not self._started:
            return  # nothing ran before
        self._why = _WHY[change.reason]
        self.changes[change.before, change.after, change.reason] += 1
        figures = ", ".join(
            f"{name} {value:.3g}"
            for name, value in (
                (f"{change.after}, tokens/s of a sequence", change.rate_after),
                (f"{change.before}", change.rate_before),
                ("T_p", self.costs.t_p),
                ("T_b", self.costs.t_b),
                ("hit rate", self.p_hit),
                ("acceptance", (self._pooled(1))[0]),
            )
            if value is not None
        )
        _log.log(
            logging.WARNING if MODES.index(change.after) < MODES.index(change.before) else logging.INFO,
            "mode %s instead of %s at batch %d: %s (%s)",
            change.after,
            change.before,
            change.batch,
            self._why,
            figures,
        )


def _drafting(backup: Backup) -> Backup:
    """What drafts: `defer` says only when."""
    return "primary" if backup == "defer" else backup
