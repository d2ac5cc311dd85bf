"""The target: what verifies. Here any engine with our own acceptance rules; `executor_target` is another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import Metric
from torch import Tensor

from saguaro.engines.base import CausalRows, Engine, Sizes
from saguaro.errors import ConfigError, SaguaroError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.logprobs import token_logprobs
from saguaro.orchestrator.scores import near_ties
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Mode, Outcome, Rule, SamplingParams, Speculation
from saguaro.plugins.transfers import to_host


def nothing() -> None:
    """What there is to do meanwhile for whoever has nothing to do."""


class Target(Sizes, Protocol):
    """The model that decides. Its KV pool is counted by the leader, wherever it lies."""

    def admit(self, params: SamplingParams, mode: Mode) -> Mode:
        """The mode a request can run in, at most `mode`. Raises ConfigError naming what cannot be honoured."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether `verify` has time for something else while its forward runs."""
        ...

    def expect(self, sequences: Rows[Sequence], drafted: Rows[int]) -> None:
        """What will probably be verified next, and how many draft tokens of each; called while those are on the way."""
        ...

    def verify(
        self, sequences: Rows[Sequence], speculations: Rows[Speculation], meanwhile: Callable[[], None] = nothing
    ) -> list[Outcome | SaguaroError | None]:
        """Each sequence's outcome, or why that sequence cannot go on; None for one that stops at its `chunk_end`.

        `meanwhile` is called once if the target is asynchronous, else not at all.
        """
        ...

    def settle(self) -> None:
        """Complete what the sequences say of their last verification. To be called when nobody waits."""
        ...

    def metrics(self) -> Iterable[Metric]:
        """What only this kind of target knows, read when somebody asks."""
        ...


class EngineTarget:
    """An engine whose logits are turned into outcomes by `sampling.Trials`."""

    def __init__(self, engine: Engine, rule: Rule) -> None:
        self._engine = engine
        self._rule: Rule = rule
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.block_size = engine.block_size
        self.num_blocks = engine.num_blocks
        self.asynchronous = engine.asynchronous
        # Of the next verification, as far as it is known before the speculations are.
        self._expected: tuple[Rows[Sequence], Rows[int]] | None = None
        self._wanted: list[int] = []  # logits of each sequence
        self._rows = CausalRows((), (), (), (), engine.block_size)
        # Of the last verification, what `settle` looks through: sequences, their lengths, rows of the logits.
        self._logits: Tensor | None = None
        self._greedy: list[tuple[Sequence, int, range]] = []

    def admit(self, params: SamplingParams, mode: Mode) -> Mode:
        return mode

    def metrics(self) -> Iterable[Metric]:
        return ()

    def expect(self, sequences: Rows[Sequence], drafted: Rows[int]) -> None:
        self._expected = (sequences, drafted)
        self._wanted = [n + 1 if s.chunk_end is None else 0 for s, n in zip(sequences, drafted, strict=True)]
        self._rows = CausalRows(
            tuple((s.chunk_end or s.length) - s.target_length + n for s, n in zip(sequences, drafted, strict=True)),
            [sequence.target_length for sequence in sequences],
            [sequence.target_table.blocks for sequence in sequences],
            self._wanted,
            self.block_size,
        )

    def verify(
        self, sequences: Rows[Sequence], speculations: Rows[Speculation], meanwhile: Callable[[], None] = nothing
    ) -> list[Outcome | SaguaroError | None]:
        """One forward over all trunks, then each sequence's outcome, or why that sequence cannot go on.

        Rows start at the first position without valid KV, so that a prefill is the verification of an empty
        speculation behind a long context. A sequence that stops at its `chunk_end` decides nothing yet: None.
        """
        drafted = [len(speculation.tokens) for speculation in speculations]
        if self._expected != (sequences, drafted):
            self.expect(sequences, drafted)
        tokens = [
            [*sequence.tokens[sequence.target_length : sequence.chunk_end], *speculation.tokens]
            for sequence, speculation in zip(sequences, speculations, strict=True)
        ]
        self._expected = None
        output = self._engine.forward(self._rows.batch(tokens))
        if self.asynchronous:
            meanwhile()
        self.settle()  # if nobody has asked for it
        outcomes: list[Outcome | SaguaroError | None] = [None] * len(sequences)
        trials: dict[int, sampling.Trial] = {}
        for index, (sequence, speculation) in enumerate(zip(sequences, speculations, strict=True)):
            if sequence.chunk_end is None:
                try:
                    trials[index] = _trial(sequence, speculation, self.vocab_size)
                except ConfigError as error:
                    outcomes[index] = error
        undecided = sampling.Trials(list(trials.values()), self._rule, self.vocab_size)
        ends = list(accumulate(self._wanted))
        rows = {index: range(ends[index] - self._wanted[index], ends[index]) for index in trials}  # of the logits
        (logits,) = to_host(output.logits)  # the one wait for a device: all that follows is here
        tried = logits[[row for its in rows.values() for row in its]] if any(outcomes) else logits
        for index, outcome in zip(trials, undecided.decide(tried), strict=True):
            outcomes[index] = outcome
            sequence, speculation = sequences[index], speculations[index]
            if not isinstance(outcome, Outcome):
                continue
            if (count := sequence.request.params.logprobs) is not None:
                emitted = [*speculation.tokens[: outcome.accepted], outcome.bonus]
                sequence.logprobs.extend(token_logprobs(logits[rows[index].start :], emitted, count))
            if sequence.request.params.temperature == 0:  # rows up to the bonus token decided something
                self._greedy.append((sequence, sequence.length, rows[index][: outcome.accepted + 1]))
        self._logits = logits if self._greedy else None
        return outcomes

    def settle(self) -> None:
        """Where a greedy choice was a near thing in this precision: another batch might not share it."""
        if self._logits is not None:
            close = set(near_ties(self._logits, self._engine.logit_tolerance))
            for sequence, start, rows in self._greedy:
                sequence.near_ties += [start + k for k, row in enumerate(rows) if row in close]
            self._logits, self._greedy = None, []


def _trial(sequence: Sequence, speculation: Speculation, vocab_size: int) -> sampling.Trial:
    """Raises ConfigError when the sequence's grammar cannot be followed."""
    tokens, allowed = speculation.tokens, None
    if sequence.grammar:
        tails = [tokens[:k] for k in range(len(tokens) + 1)]
        allowed = sequence.grammar.masks(tails, vocab_size)
    return sampling.Trial(sequence.request, sequence.tokens, speculation, allowed)
