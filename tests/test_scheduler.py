from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.errors import CapacityError, ConfigError
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import RequestSampling, SamplingParams


@dataclass
class Bench:
    """A scheduler over a pool, and a target of which only the bookkeeping is real: every token is its own position."""

    blocks: int = 10
    block_size: int = 4
    max_sequences: int = 8
    max_model_len: int = 10_000
    max_batch_tokens: int = 1000
    max_queue: int = 100
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, self.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=self.max_sequences,
            max_model_len=self.max_model_len,
            max_batch_tokens=self.max_batch_tokens,
            max_queue=self.max_queue,
        )

    def add(self, prompt: int, max_tokens: int, *, priority: int = 0, mode: str = "ar", lookahead: int = 1) -> Sequence:
        """Prompts share no prefix: each starts with the number of its sequence."""
        number = len(self.sequences)
        sequence = Sequence(
            number,
            RequestSampling(SamplingParams(max_tokens=max_tokens), 0, prompt),
            [number] * prompt,
            mode,  # type: ignore[arg-type]
            lookahead,
            BlockTable(self.pool),
            BlockTable(self.pool),
            priority,
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def round(self) -> dict[int, int]:
        """One round; the tokens each sequence computed."""
        computed = {}
        for sequence in self.scheduler.schedule():
            end = sequence.chunk_end or sequence.length
            assert sequence.target_table.columns >= end
            computed[sequence.id] = end - sequence.target_length
            assert computed[sequence.id] > 0
            if sequence.chunk_end is None:
                sequence.commit([sequence.length], self.max_model_len)
            sequence.target_length = end
            sequence.publish()
            sequence.target_table.truncate(end)
            if sequence.finish_reason:
                self.scheduler.remove(sequence)
        return computed


def test_first_come_first_served_up_to_the_limit() -> None:
    bench = Bench(max_sequences=2)
    for _ in range(3):
        bench.add(2, 2)
    assert list(bench.round()) == [0, 1]
    assert bench.scheduler.waiting == 1
    bench.scheduler.remove(bench.sequences[0])
    assert list(bench.round()) == [1, 2]


def test_priority_goes_before_arrival() -> None:
    bench = Bench(max_sequences=2)
    for priority in (1, 0, -1, 0):
        bench.add(2, 2, priority=priority)
    assert list(bench.round()) == [2, 1]
    bench.round()
    assert list(bench.round()) == [3, 0]


def test_a_sequence_is_admitted_when_its_prompt_fits_beside_what_is_promised() -> None:
    bench = Bench(max_batch_tokens=4)
    big, small, other = bench.add(20, 4), bench.add(8, 4), bench.add(4, 4)  # 6, 3 and 2 of 10 blocks
    assert bench.scheduler.schedule() == [big]
    assert bench.scheduler.running == [big, small]  # `other` waits, although nothing else has been taken yet
    bench.scheduler.remove(small)
    bench.scheduler.schedule()
    assert bench.scheduler.running == [big, other]


def test_a_long_prompt_delays_running_streams_by_one_chunk() -> None:
    """4,000 tokens amid 8 streams with 4 draft tokens: all take part in every round, beside at most 256 tokens."""
    bench = Bench(blocks=400, block_size=16, max_sequences=9, max_batch_tokens=256)
    for _ in range(8):
        bench.add(5, 100, mode="ssd", lookahead=4)
    bench.round()
    long = bench.add(4000, 10)
    chunks = []
    while not long.emitted:
        computed = bench.round()
        assert [computed[i] for i in range(8)] == [1] * 8
        chunks.append(computed[long.id])
    assert chunks == [256 - 8 * 5] * 18 + [4000 - 18 * 216]
    assert bench.round()[long.id] == 1


def test_chunks_go_to_prompts_in_order_and_the_rest_of_a_round_to_the_next() -> None:
    bench = Bench(blocks=30, max_batch_tokens=10)
    for prompt in (13, 9, 2):
        bench.add(prompt, 5)
    assert bench.round() == {0: 10}
    assert bench.round() == {0: 3, 1: 7}
    assert bench.round() == {0: 1, 1: 2, 2: 2}  # 10 - 1 for the one that decodes


def test_prompts_do_not_starve_when_decoding_takes_every_token() -> None:
    bench = Bench(blocks=40, max_batch_tokens=4)
    for _ in range(4):
        bench.add(1, 30)
    bench.round()
    bench.add(9, 2)
    assert [bench.round()[4] for _ in range(3)] == [4, 4, 1]  # a block each


def test_the_last_in_rank_gives_way_and_keeps_what_it_has() -> None:
    bench = Bench(blocks=6)
    first, second = bench.add(8, 16), bench.add(7, 12)
    while bench.scheduler.preemptions == 0:
        bench.round()
    assert bench.scheduler.running == [first]
    kept = list(second.tokens)
    assert len(kept) > 7
    assert (second.target_length, second.target_table.blocks, second.outcome) == (0, [], None)
    third = bench.add(1, 1)
    bench.scheduler.remove(first)
    bench.round()
    assert bench.scheduler.running[0] is second  # at the front of the queue
    assert second.tokens[: len(kept)] == kept
    while not second.finish_reason:
        bench.round()
    assert (second.emitted, second.finish_reason) == (12, "length")
    assert third.finish_reason == "length"
    assert bench.pool.free_blocks == 6


def test_a_preempted_sequence_starts_from_what_is_still_cached() -> None:
    bench = Bench(blocks=12)
    sequence = bench.add(10, 9)
    bench.round()
    bench.scheduler._preempt(sequence)
    assert bench.round() == {0: 3}  # 8 of 11 tokens lie in two full blocks


def test_a_fully_cached_prompt_computes_its_last_block() -> None:
    bench = Bench()
    bench.add(8, 1)
    bench.round()
    again = bench.add(8, 1)
    again.tokens = [0] * 8
    assert bench.round() == {1: 4}


def test_a_full_queue_refuses_at_once() -> None:
    bench = Bench(max_sequences=2, max_queue=1)
    for _ in range(3):  # two that can start and one that waits
        bench.add(2, 2)
    with pytest.raises(CapacityError, match=r"the queue is full: 3 requests wait and serving.max_queue is 1"):
        bench.add(2, 2)
    bench.round()
    with pytest.raises(CapacityError, match="the queue is full: 1 requests"):
        bench.add(2, 2)
    bench.round()
    bench.add(2, 2)


def test_a_waiting_sequence_can_be_removed() -> None:
    bench = Bench(max_sequences=1)
    a, b = bench.add(1, 2), bench.add(1, 2)
    bench.round()
    bench.scheduler.remove(b)
    bench.scheduler.remove(a)
    assert bench.round() == {}


def test_what_can_never_run_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="need 11 KV blocks and the pool has 10: lower max_tokens"):
        Bench().add(21, 20)
    with pytest.raises(ConfigError, match="the prompt has 8 tokens and the context holds 8"):
        Bench(max_model_len=8).add(8, 1)
    Bench(max_model_len=8).add(7, 1000)  # ends with the context, whatever max_tokens says


requests = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 24), st.integers(1, 16), st.integers(0, 2), st.integers(0, 9)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 5), st.integers(1, 12), st.integers(10, 20))
def test_everything_ends_whole_and_in_order(arrivals: list, places: int, tokens: int, blocks: int) -> None:
    """Requests (round of arrival, prompt, max_tokens, priority, round of leaving or 0), on a pool that is too small."""
    bench = Bench(blocks=blocks, max_sequences=places, max_batch_tokens=tokens)
    left: list[Sequence] = []
    for now in range(2000):
        for arrival, prompt, max_tokens, priority, _ in arrivals:
            if arrival == now:
                bench.add(prompt, max_tokens, priority=priority)
        ended = {s.id for s in bench.sequences if s.finish_reason}
        for sequence, (*_, leave) in zip(bench.sequences, sorted(arrivals, key=lambda a: a[0]), strict=False):
            if leave and leave == now and sequence.id not in ended:
                sequence.finish_reason = "cancelled"
                bench.scheduler.remove(sequence)
                left.append(sequence)
        computed = bench.round()
        prompts = sum(count for number, count in computed.items() if bench.sequences[number].emitted <= 1)
        assert prompts <= max(tokens, 4) + len(computed)
        if now > 9 and not bench.scheduler.running and not bench.scheduler.waiting:
            break
    for sequence in bench.sequences:
        assert sequence.finish_reason == ("cancelled" if sequence in left else "length")
        prompt_length = sequence.request.prompt_length
        assert sequence.tokens[prompt_length:] == list(range(prompt_length, sequence.length))
        if sequence not in left:
            assert sequence.emitted == sequence.request.params.max_tokens
    assert bench.pool.free_blocks == blocks
