"""The target: what verifies. Here any engine with our own acceptance rules; `executor_target` is another one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from prometheus_client.core import Metric
from torch import Tensor

from saguaro.engines.base import Engine, Sizes, causal_batch
from saguaro.errors import ConfigError, SaguaroError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.logprobs import token_logprobs
from saguaro.orchestrator.scores import near_ties
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Mode, Outcome, Rule, SamplingParams, Speculation
from saguaro.plugins.transfers import to_host


class Target(Sizes, Protocol):
    """The model that decides. Its KV pool is counted by the leader, wherever it lies."""

    def admit(self, params: SamplingParams, mode: Mode) -> Mode:
        """The mode a request can run in, at most `mode`. Raises ConfigError naming what cannot be honoured."""
        ...

    def verify(self, sequences: Rows[Sequence], speculations: Rows[Speculation]) -> list[Outcome | SaguaroError | None]:
        """Each sequence's outcome, or why that sequence cannot go on; None for one that stops at its `chunk_end`."""
        ...

    def metrics(self) -> Iterable[Metric]:
        """What only this kind of target knows, read when somebody asks."""
        ...


class EngineTarget:
    """An engine whose logits are turned into outcomes by `sampling.verify`."""

    def __init__(self, engine: Engine, rule: Rule) -> None:
        self._engine = engine
        self._rule: Rule = rule
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.block_size = engine.block_size
        self.num_blocks = engine.num_blocks

    def admit(self, params: SamplingParams, mode: Mode) -> Mode:
        return mode

    def metrics(self) -> Iterable[Metric]:
        return ()

    def verify(self, sequences: Rows[Sequence], speculations: Rows[Speculation]) -> list[Outcome | SaguaroError | None]:
        """One forward over all trunks, then each sequence's outcome, or why that sequence cannot go on.

        Rows start at the first position without valid KV, so that a prefill is the verification of an empty
        speculation behind a long context. A sequence that stops at its `chunk_end` decides nothing yet: None.
        """
        wanted = [
            len(speculation.tokens) + 1 if sequence.chunk_end is None else 0
            for sequence, speculation in zip(sequences, speculations, strict=True)
        ]
        batch = causal_batch(
            [
                [*sequence.tokens[sequence.target_length : sequence.chunk_end], *speculation.tokens]
                for sequence, speculation in zip(sequences, speculations, strict=True)
            ],
            [sequence.target_length for sequence in sequences],
            [sequence.target_table.blocks for sequence in sequences],
            wanted,
            self.block_size,
        )
        (logits,) = to_host(self._engine.forward(batch).logits)  # the one wait for a device: all that follows is here
        outcomes: dict[int, Outcome | SaguaroError | None] = dict.fromkeys(range(len(sequences)))
        trials: dict[int, sampling.Trial] = {}
        for index, (sequence, speculation) in enumerate(zip(sequences, speculations, strict=True)):
            if sequence.chunk_end is None:
                try:
                    trials[index] = _trial(sequence, speculation, logits)
                except ConfigError as error:
                    outcomes[index] = error
        parts = dict(enumerate(logits.split(wanted)))
        if any(outcomes.values()):
            logits = torch.cat([logits[:0], *(parts[index] for index in trials)])
        outcomes |= zip(trials, sampling.verify(logits, list(trials.values()), self._rule), strict=True)
        close = self._near_ties(logits, [sequences[index] for index in trials])
        first = 0
        for index in trials:
            sequence, speculation, outcome = sequences[index], speculations[index], outcomes[index]
            if isinstance(outcome, Outcome):
                if (count := sequence.request.params.logprobs) is not None:
                    emitted = [*speculation.tokens[: outcome.accepted], outcome.bonus]
                    sequence.logprobs.extend(token_logprobs(parts[index], emitted, count))
                if sequence.request.params.temperature == 0:  # rows up to the bonus token decided something
                    sequence.near_ties += [
                        sequence.length + k for k in range(outcome.accepted + 1) if first + k in close
                    ]
            first += wanted[index]
        return [outcomes[index] for index in range(len(sequences))]

    def _near_ties(self, logits: Tensor, sequences: Rows[Sequence]) -> Collection[int]:
        """Rows in which a greedy choice was a near thing in this precision: another batch might not share it."""
        if not any(sequence.request.params.temperature == 0 for sequence in sequences):
            return ()
        return set(near_ties(logits, self._engine.logit_tolerance))


def _trial(sequence: Sequence, speculation: Speculation, logits: Tensor) -> sampling.Trial:
    """Raises ConfigError when the sequence's grammar cannot be followed."""
    tokens, allowed = speculation.tokens, None
    if sequence.grammar:
        tails = [tokens[:k] for k in range(len(tokens) + 1)]
        allowed = sequence.grammar.masks(tails, logits.shape[1])
    return sampling.Trial(sequence.request, sequence.tokens, speculation, allowed)
