"""One request while it runs: the only mutable thing the verifier, the scheduler and the service share."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from saguaro.errors import SaguaroError
from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.grammar import GrammarState
from saguaro.orchestrator.kv_blocks import BlockTable
from saguaro.orchestrator.prospects import Prospects
from saguaro.orchestrator.types import FinishReason, Mode, Outcome, RequestSampling, TokenLogprobs


class RoundRecord(msgspec.Struct, frozen=True):
    """What one round did for one sequence."""

    tokens: int  # emitted, bonus included
    hit: bool | None  # None: nothing was asked of the speculator
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # of these
    mode: Mode = "ar"  # in which it was asked
    asked: int = 0  # draft tokens it was to have at most


@dataclass(eq=False)
class Sequence:
    """`tokens` is the truth: prompt and everything committed. The KV of both models follows it.

    `target_length` and `draft_length` count the leading positions whose KV is valid in each model's pool. `id` rises
    in order of arrival. `mode` and `lookahead` are the most that its request allows.
    """

    id: int
    request: RequestSampling
    tokens: list[int]
    mode: Mode
    lookahead: int
    target_table: BlockTable
    draft_table: BlockTable
    priority: int = 0  # lower goes first
    delivered: int = 0  # tokens an earlier service had emitted
    text: TextStream | None = None  # if stop strings may end it
    grammar: GrammarState | None = None
    target_length: int = 0
    draft_length: int = 0
    chunk_end: int | None = None  # where this round's part of a prompt ends; None: the round computes all there is
    outcome: Outcome | None = None  # of the last round, while the speculator's branches still stand for it
    prospects: Prospects = field(default_factory=Prospects)  # of speculating for it
    deferred: bool = False  # it sat out the last round, while a speculation was drafted for it
    finish_reason: FinishReason | None = None
    error: SaguaroError | None = None  # why it cannot go on, with finish_reason "error"
    rounds: list[RoundRecord] = field(default_factory=list)
    near_ties: list[int] = field(default_factory=list)  # positions whose greedy choice another batch might not share
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of every emitted token, if asked for

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.tokens)

    @property
    def emitted(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.request.prompt_length

    @property
    def prefilling(self) -> bool:
        """Whether the target lacks more than the last token: a prompt, or what a preemption has taken away."""
        return self.target_length < self.length - 1 or self.emitted == 0

    def adopt_prefix(self) -> None:
        """Start from what the pools still hold of these tokens, computed for this sequence or another one."""
        self.target_length = self.target_table.adopt(self.tokens)
        if self.mode != "ar":
            self.draft_length = self.draft_table.adopt(self.tokens)

    def publish(self) -> None:
        """Offer the KV of committed tokens to others. What is only speculated lies behind both lengths."""
        self.target_table.publish(self.tokens, self.target_length)
        self.draft_table.publish(self.tokens, self.draft_length)

    def commit(self, tokens: list[int], max_model_len: int) -> list[int]:
        """Append what a round emitted, up to and including the token that ends the request; returns that part.

        Ends apply in token order: nothing after an end is committed, counted or streamed.
        """
        request, text, grammar = self.request, self.text, self.grammar
        room = min(request.params.max_tokens - self.emitted, max_model_len - self.length)
        committed: list[int] = []
        for token in tokens:
            committed.append(token)
            if text:
                text.push(token)
            if grammar:
                grammar.advance([token])
            if token in request.stop_ids or (text and text.stopped) or (grammar and grammar.complete):
                self.finish_reason = "stop"
                break
            if len(committed) >= room:
                self.finish_reason = "length"
                break
        self.tokens += committed
        del self.logprobs[self.emitted - self.delivered :]
        return committed

    def resume(self, tokens: list[int]) -> None:
        """Go on after tokens that an earlier service had emitted for this request."""
        self.tokens.extend(tokens)
        self.delivered = len(tokens)
        if self.text:
            for token in tokens:
                self.text.push(token)
        if self.grammar:
            self.grammar.advance(tokens)

    def release(self) -> None:
        """Give every block back. Tokens, the budget they leave and the random stream stay: it can be run again."""
        self.target_table.truncate(0)
        self.draft_table.truncate(0)
        self.target_length = self.draft_length = 0
        self.chunk_end = None
        self.outcome = None
        self.deferred = False
