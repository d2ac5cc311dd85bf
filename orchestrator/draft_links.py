"""The replicas of the draft as one: what the verifier asks, and who of them has to know what of it.

Every replica holds the whole draft model and the KV of every sequence, in the same blocks, and prepares its share of
the outcomes among those that are there (`shards`). A round goes to all of them, their answers are joined, and what is
verified is told to all, so that each can work ahead from it. A single one knows that by itself and is told nothing.

A replica that has missed a round the others had, because it was away or late, lacks KV that they have. All of them then
start anew from the tokens: rare, and simpler than to know of each block who holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from msgspec.structs import replace

from saguaro.orchestrator.draft_link import DraftLink, LinkCounts
from saguaro.orchestrator.protocol import Answer, AnswerRow, DraftRow, Hello, Span, Step
from saguaro.orchestrator.types import Backup, Speculation

_Told = TypeVar("_Told", Span, Step)


class DraftLinks:
    """As many places as there are replicas, each with the link to the one that is connected, if any."""

    def __init__(self, replicas: int = 1) -> None:
        self._links: list[DraftLink | None] = [None] * replicas
        self._past = [LinkCounts() for _ in range(replicas)]  # of links that have been replaced
        self._together: set[int] = set()  # replicas whose KV is what the verifier takes it for
        self._asked: list[tuple[int, DraftLink]] = []  # in the round under way
        self._rows: Sequence[DraftRow] = ()

    def put(self, replica: int, link: DraftLink) -> None:
        """A replica has connected, with an empty KV pool. `regroup` makes it take part."""
        self._past[replica] = self.counts[replica]
        self._links[replica] = link
        self._together.discard(replica)

    def regroup(self) -> bool:
        """Between rounds: let replicas take part that are there again, and notice those that are gone.

        True: what the draft holds of any sequence counts no more.
        """
        for link in filter(None, self._links):
            link.look()
        ready = {replica for replica, link in enumerate(self._links) if link and link.ready}
        if ready <= self._together:
            return False
        self._together = ready
        return True

    @property
    def connected(self) -> list[bool]:
        """Of each replica."""
        return [link is not None and not link.lost for link in self._links]

    @property
    def counts(self) -> list[LinkCounts]:
        """Of each replica, since the start."""
        return [past.plus(link.counts) if link else past for past, link in zip(self._past, self._links, strict=True)]

    @property
    def present(self) -> dict[int, Hello]:
        """What those are that can be asked, by replica."""
        links = {i: link for i, link in enumerate(self._links) if link and i in self._together and link.ready}
        return {replica: link.hello for replica, link in links.items()}

    def ask(
        self,
        rows: Sequence[DraftRow],
        present: Collection[int] = (0,),
        others: bool = False,
        backup: Backup | None = None,
    ) -> bool:
        """Send a round to those `present`, in which `others` are verified too. False when nobody is there to answer."""
        told = tuple(present)
        self._asked = [
            (replica, link)
            for replica in present
            if (link := self._links[replica]) and link.ask(rows, others, told, backup)
        ]
        self._rows = rows
        if self._asked:
            self._together = {replica for replica, _ in self._asked}
        return bool(self._asked)

    def answer(self, usable: Callable[[AnswerRow], bool]) -> Answer:
        """The answer to the round just asked, without rows that are not `usable`.

        Of several replicas none is waited for longer than a single one would be. A row that none of them has answered,
        because the one that should is gone or late, is verified without a speculation like any other.
        """
        deadline = time.monotonic() + max((link.timeout for _, link in self._asked), default=0.0)
        rows: dict[int, AnswerRow] = {}
        spans: list[Span] = []
        steps: list[Step] = []
        branches, sequences, report = 0, 0, None
        for replica, link in self._asked:
            answer = link.answer(deadline)
            for row in filter(usable, answer.rows):
                rows.setdefault(row.sequence, row)
            spans += _of(replica, answer.spans)
            steps += _of(replica, answer.steps)
            branches += answer.branches
            sequences = max(sequences, answer.sequences)  # they share out each one's branches
            report = report or answer.report  # all see the same outcomes: one stands for all
        if len(self._links) > 1:
            for asked in self._rows:
                if not asked.prefill:
                    rows.setdefault(asked.sequence, AnswerRow(asked.sequence, False, Speculation()))
            for _, link in self._asked:
                link.tell(tuple(rows.values()))
        return Answer(tuple(rows.values()), tuple(spans), branches, sequences, tuple(steps), report)

    def close(self) -> None:
        for link in self._links:
            if link:
                link.close()


def _of(replica: int, told: Sequence[_Told]) -> Sequence[_Told]:
    """What a speculator tells of itself, which knows not of others: the first one's is as it is."""
    return [replace(each, replica=replica) for each in told] if replica else told
