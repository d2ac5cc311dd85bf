"""The speculator's role: answer the last round's outcomes, then prepare for this round's while the target verifies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.orchestrator.channels import Channel
from saguaro.orchestrator.drafters.base import Drafter, Trunk
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Situation
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.protocol import (
    Answer,
    AnswerRow,
    Bye,
    DraftRow,
    Hello,
    Message,
    Round,
    decode,
    encode,
)
from saguaro.orchestrator.speculation_cache import SpeculationCache
from saguaro.orchestrator.types import Outcome, Speculation
from saguaro.plugins.fan_out import FanOut

_log = logging.getLogger(__name__)
_IDLE = 1.0  # seconds between two looks at whether the verifier still exists


@dataclass(frozen=True)
class _Prepared:
    """What was guessed about the speculation that is being verified, so that its outcome can be learned from."""

    situation: Situation
    lookahead: int  # tokens of that speculation
    guesses: Sequence[Outcome]  # best first for each acceptance length

    def observed(self, outcome: Outcome, estimators: Estimators) -> None:
        counts = [0] * (self.lookahead + 1)
        for guess in self.guesses:
            counts[guess.accepted] += 1
        ranked = [guess.bonus for guess in self.guesses if guess.accepted == outcome.accepted]
        rank = ranked.index(outcome.bonus) if outcome.bonus in ranked else None
        estimators.of(self.situation).observe(self.lookahead, outcome, FanOut(tuple(counts)), rank)


class Speculator:
    """Keeps no sequence state: only the drafter's KV pool and the branches of the last round.

    `backup` drafts after a miss; None: the drafter itself. `estimators` learn from every outcome.
    """

    def __init__(
        self,
        drafter: Drafter,
        channel: Channel,
        policy: FanOutPolicy,
        hello: Hello,
        *,
        backup: Drafter | None = None,
        estimators: Estimators | None = None,
    ) -> None:
        self._drafter = drafter
        self._backup = backup or drafter
        self._channel = channel
        self._policy = policy
        self.estimators = estimators or Estimators()
        self._prepared: dict[int, _Prepared] = {}  # by sequence, of the last round
        self._cache = SpeculationCache()
        self._timeline = Timeline()
        self._branches = 0  # prepared since the last answer
        channel.send(encode(Message(0, 0, hello)))

    def run(self) -> None:
        """Serve rounds until the verifier says goodbye. Raises LinkError when it is gone without one."""
        while True:
            data = self._channel.receive(_IDLE)
            if data is None:
                continue
            message = decode(data)
            if isinstance(message.body, Bye):
                return
            if isinstance(message.body, Round):
                self.round(message.round, message.deployment, message.body.rows)
            else:
                _log.warning("ignored a %s message", type(message.body).__name__)

    def round(self, number: int, deployment: int, rows: Sequence[DraftRow]) -> None:
        """One round: answer at once, then work ahead while the verifier is busy."""
        asked = [row for row in rows if not row.prefill]
        answers: list[AnswerRow] = []
        if asked:
            answers = self._answer(asked)
            reply = Answer(tuple(answers), self._timeline.drain(), self._branches)
            self._branches = 0
            self._channel.send(encode(Message(number, deployment, reply)))
        with self._timeline.span("prepare"):
            self._learn(rows)
            self._prepare(rows, {answer.sequence: answer for answer in answers})

    def _answer(self, rows: Sequence[DraftRow]) -> list[AnswerRow]:
        """Hits from the cache; the backup drafts for the missing rows only."""
        hits: dict[int, Speculation] = {}
        for row in rows:
            if row.outcome and (prepared := self._cache.take(row.sequence, row.outcome)):
                hits[row.sequence] = prepared
        missing = [row for row in rows if row.sequence not in hits]
        drafted: dict[int, Speculation] = {}
        if missing:
            with self._timeline.span("backup"):
                self._backup.catch_up(missing)
                trunks = [Trunk.decided(row) for row in missing]
                actual = [[Outcome(0, row.tokens[-1])] for row in missing]
                for row, (speculation,) in zip(missing, self._backup.draft(trunks, actual), strict=True):
                    drafted[row.sequence] = speculation
        speculations = hits | drafted
        return [
            AnswerRow(row.sequence, row.sequence in hits, speculations[row.sequence].first(row.lookahead))
            for row in rows
        ]

    def _learn(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            prepared = self._prepared.get(row.sequence)
            if prepared and row.outcome and row.outcome.accepted <= prepared.lookahead:
                prepared.observed(row.outcome, self.estimators)

    def _prepare(self, rows: Sequence[DraftRow], answers: dict[int, AnswerRow]) -> None:
        """Fill the cache with a speculation for each of the likeliest outcomes of the round under way."""
        trunks: list[Trunk] = []
        situations: list[Situation] = []
        for row in rows:
            answer = answers.get(row.sequence)
            trunks.append(Trunk.under_verification(row, answer.speculation if answer else Speculation()))
            situations.append(Situation(answer is None or answer.hit, row.request.params.temperature))
        fan_outs = [
            self._policy(trunk.row.budget, len(trunk.draft_tokens), situation)
            for trunk, situation in zip(trunks, situations, strict=True)
        ]
        if self._backup is not self._drafter:
            self._backup.catch_up(rows)  # now, while the verifier is busy, rather than when it waits
        outcomes = self._drafter.predict(trunks, fan_outs)
        prepared = self._drafter.draft(trunks, outcomes)
        self._branches += sum(map(len, outcomes))
        self._cache.put_all(
            (row.sequence, outcome, speculation)
            for row, guessed, drafted in zip(rows, outcomes, prepared, strict=True)
            for outcome, speculation in zip(guessed, drafted, strict=True)
        )
        self._prepared = {
            trunk.row.sequence: _Prepared(situation, len(trunk.draft_tokens), guessed)
            for trunk, situation, guessed in zip(trunks, situations, outcomes, strict=True)
        }
