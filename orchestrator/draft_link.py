"""The verifier's end of the link to a speculator: one request and one answer a round, and nothing that can hang.

A speculator that is late is *suspect*: rounds go on without it and nothing more is asked until its answer has come,
which is then dropped and counted. A speculator that is gone stays gone; another one gets a link of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from saguaro.errors import LinkError, ProtocolError
from saguaro.orchestrator.channels import Channel
from saguaro.orchestrator.protocol import (
    Answer,
    AnswerRow,
    Bye,
    DraftRow,
    Hello,
    Message,
    Round,
    Verified,
    decode,
    encode,
)
from saguaro.orchestrator.types import Backup

_log = logging.getLogger(__name__)
NO_ANSWER = Answer((), (), 0, 0)


@dataclass
class LinkCounts:
    """What has happened on a link since it was made."""

    stale_answers: int = 0  # late or foreign, and dropped
    draft_timeouts: int = 0  # rounds whose answer did not come in time
    branches_prepared: int = 0

    def plus(self, other: LinkCounts) -> LinkCounts:
        return LinkCounts(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))


class DraftLink:
    """Raises LinkError or ProtocolError from the constructor when the speculator does not introduce itself in time."""

    def __init__(self, channel: Channel, *, deployment: int, timeout: float, hello_timeout: float = 10.0) -> None:
        self._channel = channel
        self._deployment = deployment
        self.timeout = timeout  # seconds a round waits for its answer
        self._round = 0
        self._suspect = False
        self._answered = False  # since it was looked at last
        self.lost = False
        self.counts = LinkCounts()
        data = channel.receive(hello_timeout)
        if data is None:
            raise LinkError(f"the speculator connected but did not introduce itself within {hello_timeout:.0f} s")
        hello = decode(data).body
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the speculator's first message is a {type(hello).__name__}, not a Hello")
        self.hello = hello

    @property
    def ready(self) -> bool:
        """Whether a round may ask. A suspect link is looked at, without waiting, for the answer it owes."""
        if self._suspect and not self.lost and self._receive(0) is not None:
            self.counts.stale_answers += 1
            self._suspect = False
            _log.warning("the draft answered round %d late; speculation resumes", self._round)
        return not self.lost and not self._suspect

    def look(self) -> None:
        """Between rounds, notice that the speculator is gone: when nothing is asked nothing else would say so.

        One that has answered since the last look is taken to be there, until the next round asks.
        """
        answered, self._answered = self._answered, False
        if not answered and not self.lost and not self._suspect and self._receive(0) is not None:
            self.counts.stale_answers += 1  # the same once more: nobody waits for one now

    def ask(
        self,
        rows: Sequence[DraftRow],
        others: bool = False,
        present: tuple[int, ...] = (0,),
        backup: Backup | None = None,
    ) -> bool:
        """Send a round, in which `others` are verified too and the replicas `present` are asked.

        False when the speculator turns out to be gone.
        """
        self._round += 1
        return self._send(Round(tuple(rows), others, present, backup))

    def tell(self, rows: tuple[AnswerRow, ...]) -> None:
        """What is verified in the round just asked, to one of several replicas."""
        self._send(Verified(rows))

    def answer(self, deadline: float | None = None) -> Answer:
        """The answer to the round just asked; an empty one when it does not come in time.

        `deadline` is on the monotonic clock; None: `timeout` from now.
        """
        answer = self._receive(self.timeout if deadline is None else max(0.0, deadline - time.monotonic()))
        if answer is None:
            if not self.lost:
                self._suspect = True
                self.counts.draft_timeouts += 1
                _log.warning(
                    "the draft did not answer round %d within %.1f s; decoding goes on without speculation",
                    self._round,
                    self.timeout,
                )
            return NO_ANSWER
        self._answered = True
        self.counts.branches_prepared += max(0, answer.branches)
        return answer

    def close(self) -> None:
        if not self.lost:
            try:
                self._channel.send(encode(Message(self._round, self._deployment, Bye())))
            except LinkError:
                self.lost = True  # leaving anyway: the peer was faster
            self._channel.close()

    def _send(self, body: Round | Verified) -> bool:
        if not self.lost:
            try:
                self._channel.send(encode(Message(self._round, self._deployment, body)))
            except LinkError as error:
                self._lose(error)
        return not self.lost

    def _receive(self, timeout: float) -> Answer | None:
        """The answer to the current round. Whatever else arrives is dropped and counted."""
        deadline = time.monotonic() + timeout
        try:
            while (data := self._channel.receive(max(0.0, deadline - time.monotonic()))) is not None:
                message = decode(data)
                if (message.round, message.deployment) == (self._round, self._deployment) and isinstance(
                    message.body, Answer
                ):
                    return message.body
                self.counts.stale_answers += 1
        except (LinkError, ProtocolError) as error:
            self._lose(error)
        return None

    def _lose(self, error: Exception) -> None:
        self.lost = True
        _log.warning("the draft is lost (%s); decoding goes on without speculation", error)
