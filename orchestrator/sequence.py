"""One request while it runs: the only mutable thing the verifier, the scheduler and the service share."""

from __future__ import annotations

from dataclasses import dataclass, field

from saguaro.errors import ConfigError
from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.grammar import GrammarState
from saguaro.orchestrator.kv_blocks import BlockTable
from saguaro.orchestrator.types import FinishReason, Mode, Outcome, RequestSampling, TokenLogprobs


@dataclass(frozen=True)
class RoundRecord:
    """What one round did for one sequence."""

    tokens: int  # emitted, bonus included
    hit: bool | None  # None: nothing was asked of the speculator


@dataclass
class Sequence:
    """`tokens` is the truth: prompt and everything committed. The KV of both models follows it.

    `target_length` and `draft_length` count the leading positions whose KV is valid in each model's pool.
    """

    id: int
    request: RequestSampling
    tokens: list[int]
    mode: Mode
    lookahead: int
    target_table: BlockTable
    draft_table: BlockTable
    text: TextStream | None = None  # if stop strings may end it
    grammar: GrammarState | None = None
    target_length: int = 0
    draft_length: int = 0
    outcome: Outcome | None = None  # of the last round, while the speculator's branches still stand for it
    finish_reason: FinishReason | None = None
    error: ConfigError | None = None  # why it cannot go on, with finish_reason "error"
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

    def commit(self, tokens: list[int], max_model_len: int) -> list[int]:
        """Append what a round emitted, up to and including the token that ends the request; returns that part.

        Ends apply in token order: nothing after an end is committed, counted or streamed.
        """
        committed: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            committed.append(token)
            if self.text:
                self.text.push(token)
            if self.grammar:
                self.grammar.advance([token])
            if token in self.request.stop_ids or (self.text and self.text.stopped) or self._grammar_complete:
                self.finish_reason = "stop"
            elif self.emitted == self.request.params.max_tokens or self.length >= max_model_len:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        del self.logprobs[self.emitted :]
        return committed

    @property
    def _grammar_complete(self) -> bool:
        return self.grammar is not None and self.grammar.complete

    def release(self) -> None:
        """Give every block back."""
        self.target_table.truncate(0)
        self.draft_table.truncate(0)
