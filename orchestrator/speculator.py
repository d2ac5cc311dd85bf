"""The speculator's role: answer the last round's outcomes, then prepare for this round's while the target verifies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saguaro.orchestrator import shards
from saguaro.orchestrator.channels import Channel
from saguaro.orchestrator.drafters.base import Drafter, Guess, Trunk
from saguaro.orchestrator.drafters.shadows import Shadows
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
    Report,
    Round,
    Verified,
    decode,
    encode,
)
from saguaro.orchestrator.speculation_cache import SpeculationCache
from saguaro.orchestrator.types import Backup, Outcome, Speculation
from saguaro.plugins.fan_out import FanOut

_log = logging.getLogger(__name__)
_IDLE = 1.0  # seconds between two looks at whether the verifier still exists
_REPORT = 32  # rounds between two reports


@dataclass(frozen=True)
class _Prepared:
    """What was guessed about the speculation that is being verified, so that its outcome can be learned from."""

    situation: Situation
    lookahead: int  # tokens of that speculation
    guesses: Sequence[Outcome]  # best first for each acceptance length, those that other replicas prepare included
    owners: Sequence[int]  # which replica that was of each

    def observed(self, outcome: Outcome, estimators: Estimators) -> None:
        counts = [0] * (self.lookahead + 1)
        for guess in self.guesses:
            counts[guess.accepted] += 1
        ranked = [guess.bonus for guess in self.guesses if guess.accepted == outcome.accepted]
        rank = ranked.index(outcome.bonus) if outcome.bonus in ranked else None
        estimators.of(self.situation).observe(self.lookahead, outcome, FanOut(tuple(counts)), rank)


class Speculator:
    """Keeps no sequence state: only the drafter's KV pool and the branches of the last round.

    `backup` drafts after a miss; None: the drafter itself. A round may name another one, of `others`; where it says
    `defer`, that is done while the others are verified, and the missing row sits that out. `estimators` learn from
    every outcome. All `replicas` guess the same outcomes, and each that is there drafts a share of them.
    """

    def __init__(
        self,
        drafter: Drafter,
        channel: Channel,
        policy: FanOutPolicy,
        hello: Hello,
        *,
        backup: Drafter | None = None,
        others: Mapping[Backup, Drafter] | None = None,
        shadows: Shadows | None = None,
        estimators: Estimators | None = None,
        timeline: Timeline | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._drafter = drafter
        self._backup = backup or drafter
        self._others = others or {}
        self._shadows = shadows
        # Those that have to follow the text without having drafted it.
        self._followers = {id(each): each for each in (self._backup, *self._others.values()) if each is not drafter}
        self._answers = 0
        self._replica = replica
        self._replicas = replicas
        self._present: tuple[int, ...] = ()  # replicas that are asked in the round under way
        self._open: tuple[int, Sequence[DraftRow]] | None = None  # a round of which the others' answers are to come
        self._channel = channel
        self._policy = policy
        self.estimators = estimators or Estimators()
        self._prepared: dict[int, _Prepared] = {}  # by sequence, of the last round
        self._cache = SpeculationCache()
        self._timeline = timeline or Timeline()  # the drafter adds its steps to it
        self._branches = self._sequences = 0  # prepared since the last answer, and for how many, round by round
        self._early: bytes | None = None  # what came before it was waited for
        channel.send(encode(Message(0, 0, hello)))

    def run(self) -> None:
        """Serve rounds until the verifier says goodbye. Raises LinkError when it is gone without one."""
        while True:
            data, self._early = self._early or self._channel.receive(_IDLE), None
            if data is None:
                continue
            message = decode(data)
            if isinstance(message.body, Bye):
                return
            self.take(message)

    def _awaited(self) -> bool:
        """Whether the verifier has sent something while this one works ahead: it waits now."""
        self._early = self._early or self._channel.receive(0)
        return self._early is not None

    def take(self, message: Message) -> None:
        """Do what a message of the verifier asks for."""
        match message.body:
            case Round():
                self.round(message.round, message.deployment, message.body)
            case Verified(rows):
                self._verified(message.round, rows)
            case _:
                _log.warning("ignored a %s message", type(message.body).__name__)

    def round(self, number: int, deployment: int, body: Round) -> None:
        """One round: answer at once, then work ahead while the verifier is busy."""
        rows, self._present, self._open = body.rows, body.present, None
        asked = [row for row in rows if not row.prefill]
        answers: list[AnswerRow] = []
        if asked:
            backup = self._others.get(body.backup, self._backup) if body.backup else self._backup
            answers = self._answer(asked, backup, body.backup == "defer", body.others or len(asked) < len(rows))
            timeline = self._timeline
            reply = Answer(
                tuple(answers),
                timeline.drain(),
                self._branches,
                self._sequences,
                timeline.drain_steps(),
                self._perhaps_report(),
            )
            self._branches = self._sequences = 0
            self._channel.send(encode(Message(number, deployment, reply)))
        if asked and self._replicas > 1:
            self._open = number, rows
        else:
            self._work_ahead(rows, answers)

    def _verified(self, number: int, answers: Sequence[AnswerRow]) -> None:
        """What all replicas together have answered: from here on as if one of them had."""
        if self._open is None or self._open[0] != number:
            _log.warning("ignored what is verified in round %d, which was not asked about or is over", number)
            return
        (_, rows), self._open = self._open, None
        self._work_ahead(rows, answers)

    def _work_ahead(self, rows: Sequence[DraftRow], answers: Sequence[AnswerRow]) -> None:
        with self._timeline.span("prepare"):
            self._learn(rows)
            self._prepare(rows, {answer.sequence: answer for answer in answers})

    def _perhaps_report(self) -> Report | None:
        self._answers += 1
        if self._answers % _REPORT:
            return None
        return Report(self.estimators.curves(), self._shadows.acceptance if self._shadows else {})

    def _answer(self, rows: Sequence[DraftRow], backup: Drafter, defer: bool, others: bool) -> list[AnswerRow]:
        """What was prepared here, from the cache; for the missing rows, and for them only, the backup.

        Rows that another replica answers are left out.
        """
        answers: dict[int, AnswerRow] = {}
        for row in rows:
            outcome = _happened(row) if row.deferred else row.outcome
            if outcome and (prepared := self._cache.take(row.sequence, outcome)):
                answers[row.sequence] = AnswerRow(row.sequence, not row.deferred, prepared.first(row.lookahead))
        missing = [row for row in rows if row.sequence not in answers and not self._elsewhere(row)]
        mine = [row for row in missing if self._is_home(row)]
        if defer and _may_sit_out(missing, others or len(missing) < len(rows)):
            answers |= {row.sequence: AnswerRow(row.sequence, False, None) for row in mine}
        elif mine:
            with self._timeline.span("backup", [row.sequence for row in mine]):
                backup.catch_up(mine)
                drafted = backup.draft(*_decided(mine))
            for row, (speculation,) in zip(mine, drafted, strict=True):
                answers[row.sequence] = AnswerRow(row.sequence, False, speculation.first(row.lookahead))
        return [answers[row.sequence] for row in rows if row.sequence in answers]

    def _elsewhere(self, row: DraftRow) -> bool:
        """Whether another replica that is there has this row's speculation."""
        if row.deferred:
            return not self._is_home(row)
        prepared = self._prepared.get(row.sequence)
        if prepared is None or row.outcome not in prepared.guesses:
            return False
        owner = prepared.owners[prepared.guesses.index(row.outcome)]
        return owner != self._replica and owner in self._present

    def _is_home(self, row: DraftRow) -> bool:
        """Whether this replica drafts for a row for which nothing was prepared."""
        return shards.home(row.sequence, self._present, self._replicas) == self._replica

    def _learn(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            prepared = self._prepared.get(row.sequence)
            if prepared and row.outcome and row.outcome.accepted <= prepared.lookahead:
                prepared.observed(row.outcome, self.estimators)

    def _prepare(self, rows: Sequence[DraftRow], answers: dict[int, AnswerRow]) -> None:
        """Fill the cache with a speculation for each of the likeliest outcomes of the round under way.

        Rows that sit it out get one for their last outcome, in the same forwards.
        """
        trunks: list[Trunk] = []
        situations: list[Situation] = []
        deferred: list[DraftRow] = []
        for row in rows:
            answer = answers.get(row.sequence)
            speculation = answer.speculation if answer else Speculation()
            if speculation is None:
                deferred.append(row)
                continue
            trunks.append(Trunk.under_verification(row, speculation))
            situations.append(Situation(answer is None or answer.hit, row.request.params.temperature))
        fan_outs = [
            self._policy(trunk.row.budget, len(trunk.draft_tokens), situation)
            for trunk, situation in zip(trunks, situations, strict=True)
        ]
        for follower in self._followers.values():
            follower.catch_up(rows)  # now, while the verifier is busy, rather than when it waits
        if self._shadows:
            self._shadows.follow(rows)
        guesses = self._drafter.predict(trunks, fan_outs) if trunks else []
        outcomes = [[guess.outcome for guess in guessed] for guessed in guesses]
        owners = [shards.owners(guessed, self._present) for guessed in outcomes]
        share = [
            [guess for guess, owner in zip(guessed, owned, strict=True) if owner == self._replica]
            for guessed, owned in zip(guesses, owners, strict=True)
        ]
        self._drafter.catch_up(deferred)
        late, happened = _decided([row for row in deferred if self._is_home(row)])
        prepared = self._drafter.draft([*trunks, *late], [*share, *happened], self._awaited)
        self._branches += sum(map(len, share))
        self._sequences += sum(map(bool, outcomes))
        self._cache.put_all(
            (trunk.row.sequence, guess.outcome, speculation)
            for trunk, guessed, drafted in zip([*trunks, *late], [*share, *happened], prepared, strict=True)
            for guess, speculation in zip(guessed, drafted, strict=True)
        )
        self._prepared = {
            trunk.row.sequence: _Prepared(situation, len(trunk.draft_tokens), guessed, owned)
            for trunk, situation, guessed, owned in zip(trunks, situations, outcomes, owners, strict=True)
        }


def _may_sit_out(missing: Sequence[DraftRow], others: bool) -> bool:
    """Whether all of them do: there must be a verification to draft behind. When one has to be drafted for now,
    because it sat out last time or because nothing is ever prepared for it, the round waits anyway.
    """
    return others and all(row.budget and not row.deferred for row in missing)


def _happened(row: DraftRow) -> Outcome:
    """A row's last outcome, of the trunk in which it is decided."""
    return Outcome(0, row.tokens[-1])


def _decided(rows: Sequence[DraftRow]) -> tuple[list[Trunk], list[list[Guess]]]:
    """What to draft from for rows whose outcome was not foreseen."""
    return [Trunk.decided(row) for row in rows], [[Guess(_happened(row))] for row in rows]
