"""The speculator's role: answer the last round's outcomes, then prepare for this round's while the target verifies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from saguaro.orchestrator.channels import Channel
from saguaro.orchestrator.drafters.base import Drafter, Trunk
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


class Speculator:
    """Keeps no sequence state: only the drafter's KV pool and the branches of the last round."""

    def __init__(self, drafter: Drafter, channel: Channel, policy: Callable[[int, int], FanOut], hello: Hello) -> None:
        self._drafter = drafter
        self._channel = channel
        self._policy = policy
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
        speculations: dict[int, Speculation] = {}
        if asked:
            answers = self._answer(asked)
            speculations = {answer.sequence: answer.speculation for answer in answers}
            reply = Answer(tuple(answers), self._timeline.drain(), self._branches)
            self._branches = 0
            self._channel.send(encode(Message(number, deployment, reply)))
        with self._timeline.span("prepare"):
            self._prepare(rows, speculations)

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
                self._drafter.catch_up(missing)
                trunks = [Trunk.decided(row) for row in missing]
                actual = [[Outcome(0, row.tokens[-1])] for row in missing]
                for row, (speculation,) in zip(missing, self._drafter.draft(trunks, actual), strict=True):
                    drafted[row.sequence] = speculation
        speculations = hits | drafted
        return [
            AnswerRow(row.sequence, row.sequence in hits, speculations[row.sequence].first(row.lookahead))
            for row in rows
        ]

    def _prepare(self, rows: Sequence[DraftRow], speculations: dict[int, Speculation]) -> None:
        """Fill the cache with a speculation for each of the likeliest outcomes of the round under way."""
        trunks = [Trunk.under_verification(row, speculations.get(row.sequence, Speculation())) for row in rows]
        fan_outs = [self._policy(trunk.row.budget, len(trunk.draft_tokens)) for trunk in trunks]
        outcomes = self._drafter.predict(trunks, fan_outs)
        prepared = self._drafter.draft(trunks, outcomes)
        self._branches += sum(map(len, outcomes))
        self._cache.put_all(
            (row.sequence, outcome, speculation)
            for row, guessed, drafted in zip(rows, outcomes, prepared, strict=True)
            for outcome, speculation in zip(guessed, drafted, strict=True)
        )
