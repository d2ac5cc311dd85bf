"""Which sequences take part in the next round, and how far each goes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from saguaro.errors import CapacityError, ConfigError
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.sequence import Sequence


@dataclass
class PrefixCounts:
    """Tokens of admitted sequences, and those of them whose KV a pool still held."""

    asked: int = 0
    found: int = 0

    def add(self, asked: int, found: int) -> None:
        self.asked += asked
        self.found += found


class Scheduler:
    """Continuous batching by rank: priority first, arrival within one.

    Sequences that decode take part in every round. A prompt is cut into chunks that share, in order of rank, what they
    leave of the round's tokens. Blocks are taken as a sequence grows. When the pool runs out, the last in rank is
    preempted: it gives its blocks back, keeps its tokens, and is computed again when there is room. The first in rank
    therefore always goes on, and what fits the pool alone always ends.
    """

    def __init__(
        self, pool: BlockPool, *, max_sequences: int, max_model_len: int, max_batch_tokens: int, max_queue: int
    ) -> None:
        self._pool = pool
        self._max_sequences = max_sequences
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._max_queue = max_queue
        self._waiting: list[Sequence] = []  # both in order of rank
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_cache = {"target": PrefixCounts(), "draft": PrefixCounts()}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, *, resumed: bool = False) -> None:
        """Queue a sequence. Raises ConfigError for one that could never run, CapacityError when the queue is full.

        Those that the next round can start do not count as queued. One that is `resumed` had its place before.
        """
        if sequence.length >= self._max_model_len:
            raise ConfigError(
                f"the prompt has {sequence.length} tokens and the context holds {self._max_model_len}, of which at "
                "least one is for the answer: shorten the prompt or raise max_model_len in the target's recipe"
            )
        blocks = self._pool.blocks_for(self._end(sequence))
        if blocks > self._pool.num_blocks:
            raise ConfigError(
                f"prompt and max_tokens need {blocks} KV blocks and the pool has "
                f"{self._pool.num_blocks}: lower max_tokens or raise target.kv_tokens in the deployment"
            )
        if not resumed and self.waiting >= self._max_queue + max(0, self._max_sequences - len(self.running)):
            raise CapacityError(
                f"the queue is full: {self.waiting} requests wait and serving.max_queue is {self._max_queue}. Try "
                "again later, or raise it in the deployment"
            )
        insort(self._waiting, sequence, key=_rank)

    def schedule(self, lookahead: int | None = None) -> list[Sequence]:
        """The batch of the next round, in order of rank. Each has the blocks for the tokens it is to compute.

        `lookahead`: the most draft tokens that the round will verify for a sequence, if fewer than requests allow.
        """
        self._admit()
        running = [(sequence, sequence.prefilling) for sequence in self.running]
        decoding = sum(_verified(sequence, lookahead) for sequence, prefilling in running if not prefilling)
        left = max(self._pool.block_size, self._max_batch_tokens - decoding)  # prompts never starve
        batch: list[Sequence] = []
        for sequence, prefilling in running:
            missing = sequence.length - sequence.target_length
            chunk = min(missing, left) if prefilling else missing
            if chunk and self._reserve(sequence, sequence.target_length + chunk):
                left -= chunk if prefilling else 0
                sequence.chunk_end = sequence.target_length + chunk if chunk < missing else None
                batch.append(sequence)
        return batch

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.release()

    def _admit(self) -> None:
        """Start the first in the queue as long as what it has to compute first fits beside what is promised."""
        while self._waiting and len(self.running) < self._max_sequences:
            sequence = self._waiting[0]
            sequence.adopt_prefix()
            if not sequence.target_table.can_grow(self._start(sequence), beside=sum(map(self._owed, self.running))):
                sequence.release()
                return
            insort(self.running, self._waiting.pop(0), key=_rank)
            self.prefix_cache["target"].add(sequence.length, sequence.target_length)
            if sequence.mode != "ar":
                self.prefix_cache["draft"].add(sequence.length, sequence.draft_length)

    def _reserve(self, sequence: Sequence, columns: int) -> bool:
        """Room for `columns` columns, at the expense of those behind in rank. False: it had to give way itself."""
        if sequence.target_table.columns >= columns:
            return True  # as in most rounds
        while sequence in self.running:
            if sequence.target_table.can_grow(columns):
                sequence.target_table.grow(columns)
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.release()
        insort(self._waiting, sequence, key=_rank)
        self.preemptions += 1

    def _owed(self, sequence: Sequence) -> int:
        """Blocks that a running sequence will take before it emits another token."""
        return max(0, self._pool.blocks_for(self._start(sequence)) - len(sequence.target_table.blocks))

    def _start(self, sequence: Sequence) -> int:
        """Columns for all it has and one speculation."""
        return min(sequence.length + 1 + sequence.lookahead, self._end(sequence))

    def _end(self, sequence: Sequence) -> int:
        return min(sequence.request.prompt_length + sequence.request.params.max_tokens, self._max_model_len)


def _verified(sequence: Sequence, lookahead: int | None) -> int:
    """The most rows of a sequence that decodes."""
    if sequence.mode == "ar":
        return 1
    return 1 + (sequence.lookahead if lookahead is None else min(sequence.lookahead, lookahead))


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.id
