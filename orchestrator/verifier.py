"""The verifier's role: one round for one batch of sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from contextlib import nullcontext

import msgspec
from msgspec.structs import replace

from saguaro.errors import ProtocolError, SaguaroError
from saguaro.orchestrator import sampling, shards
from saguaro.orchestrator.draft_link import NO_ANSWER, DraftLink
from saguaro.orchestrator.draft_links import DraftLinks
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.prospects import FRUITLESS
from saguaro.orchestrator.protocol import Answer, AnswerRow, DraftRow, GrammarRef, Report, Span, Step
from saguaro.orchestrator.sequence import RoundRecord, Sequence
from saguaro.orchestrator.target import Target, nothing
from saguaro.orchestrator.types import Outcome, Setting, Speculation

_log = logging.getLogger(__name__)
_NOTHING = Speculation()


class RoundResult(msgspec.Struct, frozen=True):
    """Tokens each sequence of the batch emitted, in its order, and what the round took."""

    tokens: list[list[int]]
    spans: tuple[Span, ...]  # of both roles
    deferred: int = 0  # sequences that sat the round out
    seconds: float = 0.0
    decoding: bool = True  # no sequence was prefilling
    settled: bool = True  # nor was the draft catching up, or not to be asked
    asked: bool = True  # it was given something to do
    steps: tuple[Step, ...] = ()  # of the draft, since its last answer
    branches: float | None = None  # mean number prepared for a sequence in a round, since then; None: for nobody
    report: Report | None = None


class Verifier:
    """Owns the outcome of every round. `link` leads to the speculators that are connected, of `replicas`."""

    def __init__(
        self,
        target: Target,
        setting: Setting,
        *,
        max_model_len: int,
        max_batch_tokens: int,
        replicas: int = 1,
        timeline: Timeline | None = None,
    ) -> None:
        self.target = target
        self._max_batch_tokens = max_batch_tokens  # what the draft may have to catch up with in one round
        self._max_model_len = max_model_len
        self._timeline = timeline or Timeline()
        self.setting = setting  # of the next round
        self.link = DraftLinks(replicas)

    def step(self, batch: Rows[Sequence], meanwhile: Callable[[], None] = nothing) -> RoundResult:
        """Send the last outcomes, take the speculations, verify them in one forward, commit.

        `meanwhile` is called once, where nobody waits for it: while the target's forward runs on a device, and for a
        target that computes here as soon as the speculator has been asked.

        Each sequence has the blocks for the tokens it is to compute. Without a speculator, or when it is late, a row
        simply carries no speculation: plain decoding. A row for which the speculator still has to draft may sit the
        round out: nothing of it changes but the time.
        """
        start = self._timeline.clock()
        asked = self._ask(batch)
        if not self.target.asynchronous:
            meanwhile()
        # What can be done while the speculations are on their way costs no time.
        decoding = not any(sequence.prefilling for sequence in batch)
        settled = self.setting.mode == "ar" or (bool(asked) and not any(row.prefill for row in asked.values()))
        self.target.expect(batch, [_drafted(asked.get(sequence.id)) for sequence in batch])
        answer = self._answer(asked, len(batch))
        answers = {row.sequence: row for row in answer.rows}
        deferred = [s for s in batch if s.id in answers and answers[s.id].speculation is None]
        verified = [s for s in batch if s not in deferred]
        speculations = [(s.id in answers and answers[s.id].speculation) or _NOTHING for s in verified]
        sitting_out = self._timeline.span("deferred", [s.id for s in deferred]) if deferred else nullcontext()
        with self._timeline.span("verify", [s.id for s in verified]), sitting_out:
            outcomes = self.target.verify(verified, speculations, meanwhile)
        tokens = {
            sequence.id: self._commit(sequence, speculation, outcome, asked.get(sequence.id), answers.get(sequence.id))
            for sequence, speculation, outcome in zip(verified, speculations, outcomes, strict=True)
        }
        for sequence in deferred:
            self._defer(sequence)
        return RoundResult(
            [tokens.get(sequence.id, []) for sequence in batch],
            self._timeline.drain() + answer.spans,
            len(deferred),
            (self._timeline.clock() - start) / 1e9,
            decoding,
            settled,
            bool(asked),
            answer.steps,
            answer.branches / answer.sequences if answer.sequences > 0 else None,
            answer.report,
        )

    def attach(self, link: DraftLink, running: Iterable[Sequence], replica: int = 0) -> None:
        """Work with a newly connected speculator, whose KV pool is empty."""
        self.link.put(replica, link)
        self.regroup(running)

    def regroup(self, running: Iterable[Sequence]) -> bool:
        """Let speculators take part that can. True: nothing in the draft's pool counts any more."""
        changed = self.link.regroup()
        for sequence in running if changed else ():
            sequence.draft_table.truncate(0)
            sequence.draft_length = 0
            sequence.outcome = None
        return changed

    def _ask(self, batch: Rows[Sequence]) -> dict[int, DraftRow]:
        present = self.link.present
        if not present:
            return {}
        longest = min(hello.max_model_len for hello in present.values())
        rows: dict[int, DraftRow] = {}
        left = self._max_batch_tokens
        for sequence in batch:
            if row := self._draft_row(sequence, longest, left, len(present)):
                rows[sequence.id] = row
                left -= len(row.tokens)
        others = len(rows) < len(batch)
        asked = rows and self.link.ask(list(rows.values()), present, others, self.setting.backup)
        return rows if asked else {}

    def _draft_row(self, sequence: Sequence, draft_model_len: int, left: int, replicas: int) -> DraftRow | None:
        """What to ask for this sequence. None when a speculation cannot help or has no room in either model.

        A draft that is more than `left` tokens behind catches up by one chunk of them and is asked for nothing else.
        """
        # Nothing is drafted beyond the end of the request or of the target's context, and the branches of this round
        # (a trunk of K, then K more) have to fit into the draft's. Each replica has columns for its own branches only.
        length, prefilling, prospects = sequence.length, sequence.prefilling, sequence.prospects
        end = min(self._max_model_len, sequence.request.prompt_length + sequence.request.params.max_tokens)
        setting = self.setting.for_request(sequence.mode, sequence.lookahead)
        lookahead = min(setting.lookahead, end - length - 1)
        if prospects.plain and not prospects.returning:
            return None
        if setting.mode == "ar" or lookahead < 1 or length + 2 * setting.lookahead > draft_model_len:
            return None
        branches = shards.largest(setting.budget, setting.lookahead, replicas)
        columns = length + setting.lookahead * (1 + max(1, branches))
        if not sequence.draft_table.can_grow(columns):
            return None
        if not prefilling:
            # The target's room for it is taken now; no answer longer than that is used.
            lookahead = sequence.target_table.stretch(length + lookahead) - length
        start = sequence.draft_length
        stop = min(sequence.chunk_end or length, start + max(left, 1 + setting.lookahead))
        if lookahead < 1 or stop <= start:
            return None
        whole = stop == length
        sequence.draft_table.grow(columns if whole else stop)
        return DraftRow(
            sequence=sequence.id,
            start=start,
            tokens=tuple(sequence.tokens[start:stop]),
            outcome=sequence.outcome,
            prefill=prefilling or not whole or prospects.returning,
            lookahead=lookahead,
            budget=setting.budget if whole else 0,
            table=tuple(sequence.draft_table.blocks),
            request=sequence.request,
            grammar=_grammar(sequence) if whole else None,
            deferred=sequence.deferred,
        )

    def _answer(self, asked: dict[int, DraftRow], batch: int) -> Answer:
        if all(row.prefill for row in asked.values()):
            return NO_ANSWER
        with self._timeline.span("wait"):
            answer = self.link.answer(lambda row: self._usable(row, asked.get(row.sequence)))
        if sum(row.speculation is None for row in answer.rows) == batch:
            _log.warning("a speculator would have every row of a round sit it out: they are verified as they are")
            return replace(answer, rows=())
        return answer

    def _usable(self, answer: AnswerRow, asked: DraftRow | None) -> bool:
        """An answer to what was not asked, or one that cannot be, is no reason to fail a request: it is not used."""
        try:
            if asked is None or asked.prefill or len((answer.speculation or _NOTHING).tokens) > asked.lookahead:
                raise ProtocolError(f"sequence {answer.sequence} was not asked about, or not for that many tokens")
            if answer.speculation is None and asked.deferred:
                raise ProtocolError(f"sequence {answer.sequence} has sat out one round already")
            sampling.check_speculation(answer.speculation or _NOTHING, self.target.vocab_size)
        except ProtocolError as error:
            _log.warning("a speculation is not used: %s", error)
            return False
        return True

    def _commit(
        self,
        sequence: Sequence,
        speculation: Speculation,
        outcome: Outcome | SaguaroError | None,
        asked: DraftRow | None,
        answer: AnswerRow | None,
    ) -> list[int]:
        """Make the outcome the truth. The KV of rejected tokens is dropped by counting it as not valid."""
        sequence.deferred = False
        if isinstance(outcome, SaguaroError):
            sequence.finish_reason, sequence.error = "error", outcome
            return []
        before = sequence.length
        committed: list[int] = []
        if outcome:
            emitted = [*speculation.tokens[: outcome.accepted], outcome.bonus]
            committed = sequence.commit(emitted, self._max_model_len)
            accepted = min(outcome.accepted, len(committed))  # an end inside the block cuts the rest off
            hit = answer.hit if answer else None
            mode = self.setting.for_request(sequence.mode, sequence.lookahead).mode if asked else "ar"
            places = asked.lookahead if asked else 0
            sequence.rounds.append(RoundRecord(len(committed), hit, len(speculation.tokens), accepted, mode, places))
            if sequence.prospects.observe(len(speculation.tokens), accepted):
                _log.info(
                    "request %d decodes plainly for now: none of its last %d speculations had a token accepted",
                    sequence.id,
                    FRUITLESS,
                )
        sequence.target_length = sequence.chunk_end or sequence.length - 1
        if asked and asked.length == before and (asked.prefill or answer):
            # The speculator holds this very trunk, so its KV follows the outcome and its branches stand for it.
            sequence.draft_length = sequence.length - 1
            sequence.outcome = outcome
        else:
            sequence.draft_length = asked.length if asked and asked.prefill else sequence.draft_length
            sequence.outcome = None
        _let_go(sequence, drafting=asked is not None)
        return committed

    def _defer(self, sequence: Sequence) -> None:
        """The speculator catches up with all but the last token before it drafts from there."""
        sequence.deferred = True
        sequence.draft_length = sequence.length - 1
        _let_go(sequence, drafting=True)


def _drafted(asked: DraftRow | None) -> int:
    """Draft tokens that the answer to this row has, as a rule."""
    return asked.lookahead if asked and not asked.prefill else 0


def _let_go(sequence: Sequence, *, drafting: bool) -> None:
    """Offer what a round has computed to others, and give back the room it took for what is not committed.

    While it is drafted for, the room for branches is kept: the next round wants as much again.
    """
    sequence.publish()
    sequence.target_table.truncate(sequence.target_length)
    if not drafting:
        sequence.draft_table.truncate(sequence.draft_length)


def _grammar(sequence: Sequence) -> GrammarRef | None:
    """A speculator whose branches stand for the last outcome has had a row of this sequence, and with it the text."""
    grammar = sequence.grammar
    return GrammarRef(grammar.digest, None if sequence.outcome else grammar.text) if grammar else None
