"""Which sequences take part in the next round."""

from __future__ import annotations

from collections import deque

from saguaro.errors import CapacityError, ConfigError
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.sequence import Sequence


class Scheduler:
    """First come, first served. A sequence is admitted when its whole length fits beside those that run.

    Reserving the whole length at admission means that a running sequence never runs out of blocks.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, max_model_len: int) -> None:
        self._pool = pool
        self._max_sequences = max_sequences
        self._max_model_len = max_model_len
        self._waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ConfigError or CapacityError for one that could never run."""
        if sequence.length >= self._max_model_len:
            raise ConfigError(
                f"the prompt has {sequence.length} tokens and the context holds {self._max_model_len}, of which at "
                "least one is for the answer: shorten the prompt or raise max_model_len in the target's recipe"
            )
        if self._blocks(sequence) > self._pool.num_blocks:
            raise CapacityError(
                f"prompt and max_tokens need {self._blocks(sequence)} KV blocks and the pool has "
                f"{self._pool.num_blocks}: lower max_tokens or raise target.kv_tokens in the deployment"
            )
        self._waiting.append(sequence)

    def schedule(self) -> list[Sequence]:
        """The batch of the next round."""
        reserved = sum(self._blocks(sequence) for sequence in self.running)
        while self._waiting and len(self.running) < self._max_sequences:
            reserved += self._blocks(self._waiting[0])
            if reserved > self._pool.num_blocks:
                break
            self.running.append(self._waiting.popleft())
        return list(self.running)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.release()

    def _blocks(self, sequence: Sequence) -> int:
        end = sequence.request.prompt_length + sequence.request.params.max_tokens
        return self._pool.blocks_for(min(end, self._max_model_len))
