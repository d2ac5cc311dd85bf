"""The target: what verifies. Here, any engine and our own acceptance rules."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from torch import Tensor

from saguaro.engines.base import Engine, causal_batch
from saguaro.errors import ConfigError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.logprobs import token_logprobs
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Outcome, Rule, Speculation


class EngineTarget:
    """An engine whose logits are turned into outcomes by `sampling.verify`."""

    def __init__(self, engine: Engine, rule: Rule) -> None:
        self.engine = engine
        self._rule: Rule = rule
        self._tolerance = engine.logit_tolerance

    def verify(self, sequences: Rows[Sequence], speculations: Rows[Speculation]) -> list[Outcome | ConfigError | None]:
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
            self.engine.block_size,
        )
        logits = self.engine.forward(batch).logits.split(wanted)
        return [
            self._decide(rows, sequence, speculation) if sequence.chunk_end is None else None
            for rows, sequence, speculation in zip(logits, sequences, speculations, strict=True)
        ]

    def _decide(self, logits: Tensor, sequence: Sequence, speculation: Speculation) -> Outcome | ConfigError:
        tokens = speculation.tokens
        try:
            allowed = None
            if sequence.grammar:
                tails = [tokens[:k] for k in range(len(tokens) + 1)]
                allowed = sequence.grammar.masks(tails, logits.shape[1]).to(logits.device)
            outcome = sampling.verify(logits, sequence.request, self._rule, sequence.tokens, speculation, allowed)
        except ConfigError as error:
            return error
        if (count := sequence.request.params.logprobs) is not None:
            emitted = [*speculation.tokens[: outcome.accepted], outcome.bonus]
            sequence.logprobs.extend(token_logprobs(logits, emitted, count))
        if sequence.request.params.temperature == 0:
            # Rows up to the bonus token decided something; in low precision some of it may have been a near thing.
            best, second = logits[: outcome.accepted + 1].topk(2).values.unbind(-1)
            close = (best - second <= self._tolerance).nonzero().flatten().tolist()
            sequence.near_ties.extend(sequence.length + row for row in close)
        return outcome
