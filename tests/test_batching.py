"""Many requests at once on pools that are too small: each one's tokens are those of its solo run."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness import Pair
from saguaro.engines.base import Engine, ForwardBatch, ForwardOutput
from saguaro.engines.pytorch import PytorchEngine
from saguaro.engines.scripted import ScriptedEngine
from saguaro.errors import ConfigError
from saguaro.orchestrator.protocol import Round, decode
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Backup, Mode, SamplingParams
from tiny_models import tiny_model

ROWS = [[50, 20, 15, 10, 5], [5, 60, 15, 10, 10], [10, 10, 10, 30, 40], [25, 25, 20, 20, 10], [1, 2, 3, 4, 90]]


def scripted(*, draft: bool = False, blocks: int = 400, block_size: int = 4, max_model_len: int = 200) -> Engine:
    """Every token of a context matters, so that another request's KV is noticed; the draft is often right."""

    def table(context: tuple[int, ...]) -> list[float]:
        key = zlib.crc32(bytes(context))
        return [weight / 100 for weight in ROWS[(key + (draft and key % 4 == 0)) % len(ROWS)]]

    return ScriptedEngine(table, len(ROWS), max_model_len, block_size, blocks)


@cache
def _alone(prompt: tuple[int, ...], seed: int, temperature: float, max_tokens: int) -> list[int]:
    p = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    return Pair(scripted(), scripted(draft=True)).run(prompt, p, "ar")


def alone(sequence: Sequence) -> list[int]:
    """What the request emits when nothing else runs: plain decoding, one forward for the prompt, roomy pools."""
    p = sequence.request.params
    prompt = tuple(sequence.tokens[: sequence.request.prompt_length])
    return _alone(prompt, sequence.request.seed, p.temperature, p.max_tokens)


def emitted(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.request.prompt_length :]


@dataclass
class Loop:
    """The service's loop without its socket."""

    pair: Pair
    max_sequences: int = 4
    max_queue: int = 1000
    live: list[Sequence] = field(default_factory=list)
    all: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.pair.target_pool,
            max_sequences=self.max_sequences,
            max_model_len=self.pair.target.max_model_len,
            max_batch_tokens=self.pair.max_batch_tokens,
            max_queue=self.max_queue,
        )

    def submit(
        self, prompt: list[int], p: SamplingParams, mode: Mode = "ssd", lookahead: int | None = None, priority: int = 0
    ) -> Sequence:
        sequence = self.pair.sequence(prompt, p, mode, lookahead)
        sequence.priority = priority
        self.scheduler.add(sequence)
        self.live.append(sequence)
        self.all.append(sequence)
        return sequence

    def round(self) -> dict[int, list[int]]:
        """Tokens by sequence; nothing for those that took no part."""
        batch = self.scheduler.schedule()
        result = self.pair.verifier.step(batch) if batch else None
        for sequence in batch:
            if sequence.finish_reason:
                self.leave(sequence)
        return {s.id: tokens for s, tokens in zip(batch, result.tokens, strict=True)} if result else {}

    def leave(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)

    def run(self) -> None:
        for _ in range(10_000):
            if not self.live:
                break
            self.round()
        assert self.scheduler.running == []
        assert self.scheduler.waiting == 0
        assert self.pair.target_pool.free_blocks == self.pair.target_pool.num_blocks
        assert self.pair.draft_pool.free_blocks == self.pair.draft_pool.num_blocks


class Batching(RuleBasedStateMachine):
    """Arrivals, leaves, preemptions, cache hits, and a draft that is late or replaced, in any order."""

    @initialize(
        target_blocks=st.integers(8, 24),
        draft_blocks=st.sampled_from([3, 20, 40, 90]),
        tokens=st.integers(1, 12),
        places=st.integers(1, 5),
        backup=st.sampled_from(["primary", "defer"]),
    )
    def begin(self, target_blocks: int, draft_blocks: int, tokens: int, places: int, backup: Backup) -> None:
        self.draft_blocks = draft_blocks
        self.backup = backup
        self.loop = Loop(
            Pair(
                scripted(blocks=target_blocks, max_model_len=40),
                scripted(draft=True, blocks=draft_blocks),
                max_batch_tokens=tokens,
                backup=backup,
            ),
            max_sequences=places,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=22),
        seed=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 1.0]),
        max_tokens=st.sampled_from([1, 7, 18]),
        mode=st.sampled_from(["ar", "sd", "ssd", "ssd"]),
        lookahead=st.integers(1, 6),
        priority=st.integers(0, 1),
    )
    def submit(
        self,
        prompt: list[int],
        seed: int,
        temperature: float,
        max_tokens: int,
        mode: Mode,
        lookahead: int,
        priority: int,
    ) -> None:
        p = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        pool = self.loop.pair.target_pool
        if pool.blocks_for(min(40, len(prompt) + max_tokens)) > pool.num_blocks:
            with pytest.raises(ConfigError, match="need .* KV blocks and the pool has"):
                self.loop.submit(prompt, p, mode, lookahead, priority)
        else:
            self.loop.submit(prompt, p, mode, lookahead, priority)

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 1), max_size=5))
    def follow_up(self, which: int, more: list[int]) -> None:
        """The next turn of a talk: a prompt that ends in what was generated."""
        if which < len(self.loop.all) and not (sequence := self.loop.all[which]).error:
            self.submit([*sequence.tokens, *more][-30:], 1, 1.0, 7, "ssd", 3, 0)

    @rule(count=st.integers(1, 12))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.loop.round()

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if which < len(self.loop.live):
            sequence = self.loop.live[which]
            sequence.finish_reason = "cancelled"
            self.loop.leave(sequence)

    @rule(late=st.integers(0, 1))
    def delay(self, late: int) -> None:
        self.loop.pair.channel.delay = late

    @precondition(lambda self: self.loop.pair.link.ready)
    @rule()
    def replace_the_draft(self) -> None:
        pair = self.loop.pair
        fresh = Pair(scripted(), scripted(draft=True, blocks=self.draft_blocks), backup=self.backup)
        fresh.speculator._channel = pair.speculator._channel
        pair.speculator = pair.channel.speculator = fresh.speculator
        pair.channel.forget_requests()  # what was on its way to the old one never reaches the new one
        pair.verifier.attach(pair.link, self.loop.live)
        pair.draft_pool.forget()

    @invariant()
    def what_was_emitted_is_the_beginning_of_the_solo_run(self) -> None:
        for sequence in self.loop.live:
            assert emitted(sequence) == alone(sequence)[: sequence.emitted]

    @invariant()
    def the_first_in_rank_is_never_kept_waiting(self) -> None:
        assert self.loop.scheduler.running or not self.loop.scheduler.waiting or self.loop.round() != {}

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run()
            for sequence in self.loop.all:
                assert emitted(sequence) == alone(sequence)[: sequence.emitted]
                assert sequence.finish_reason == "cancelled" or emitted(sequence) == alone(sequence)


TestBatching = Batching.TestCase
TestBatching.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_tiny_pair_in_float64_emits_in_any_company_what_it_emits_alone() -> None:
    """Real attention over shared, evicted and recomputed blocks, prompts in chunks."""
    draft_model = tiny_model("qwen2", seed=0, dtype=torch.float64)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft_model.parameters():
            scale = 0.1 * parameter.std() if parameter.dim() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    options = {"vocab_size": 512, "max_model_len": 128, "block_size": 4}
    target = PytorchEngine(tiny_model("qwen2", seed=0, dtype=torch.float64), num_blocks=18, **options)
    draft = PytorchEngine(draft_model, num_blocks=120, **options)
    draw = random.Random(0)
    system = [draw.randrange(512) for _ in range(17)]
    loop = Loop(Pair(target, draft, lookahead=4, max_batch_tokens=9))
    adopted = 0
    for _ in range(16):
        prompt = [*system[: draw.choice([0, 8, 16, 17])], *(draw.randrange(512) for _ in range(draw.randint(1, 12)))]
        temperature = draw.choice([0.0, 0.8])
        p = SamplingParams(temperature=temperature, seed=draw.getrandbits(32), max_tokens=draw.randint(5, 25))
        loop.submit(prompt, p, draw.choice(["ar", "sd", "ssd"]))
        for _ in range(draw.randint(0, 4)):
            loop.round()
        adopted += sum(s.target_length > 0 for s in loop.live)
    loop.run()
    assert loop.scheduler.preemptions >= 2
    assert adopted > 0
    for sequence in loop.all:
        prompt = sequence.tokens[: sequence.request.prompt_length]
        assert emitted(sequence) == Pair(target, draft).run(prompt, sequence.request.params, "ar")


def test_twenty_draft_tokens_over_blocks_of_four() -> None:
    """I-27: a speculation spans six blocks. 30 prompts as in `ar`, and once more from the prefix cache."""
    draw = random.Random(1)
    loop = Loop(Pair(scripted(), scripted(draft=True, blocks=2000), lookahead=20, budget=4))
    prompts = [[draw.randrange(5) for _ in range(draw.randint(1, 11))] for _ in range(30)]
    for index, prompt in enumerate(prompts):
        p = SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=draw.getrandbits(32), max_tokens=24)
        sequence = loop.submit(prompt, p, "ssd" if index % 5 == 0 else "sd")
        loop.run()
        assert emitted(sequence) == alone(sequence)
        # What was generated comes back as a prompt: its blocks were verified in jumps over several edges.
        again = loop.submit(sequence.tokens[:-3], SamplingParams(temperature=0, seed=0, max_tokens=3), "sd")
        loop.round()
        assert again.target_length >= sequence.length - 3 - 4
        loop.run()
        assert emitted(again) == alone(again)


def test_a_prompt_served_from_the_cache_is_not_computed_again() -> None:
    """Its length is a multiple of the block size: the last block is, because the last token's logits are needed."""
    both = Pair(scripted(), scripted(draft=True))
    loop = Loop(both)
    rows: list[int] = []
    forward = both.target.forward
    both.target.forward = lambda batch: (rows.append(len(batch.token_ids)), forward(batch))[1]  # type: ignore[method-assign]
    prompt = [0, 1] * 8
    results = []
    for _ in range(2):
        results.append(loop.submit(prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=20)))
        loop.round()
        loop.run()
    assert rows[0] == 16
    assert rows[len(rows) // 2] == 4
    assert emitted(results[0]) == emitted(results[1]) == alone(results[0])
    rounds = [m.body.rows[0] for m in map(decode, both.channel.sent) if isinstance(m.body, Round)]
    prefills = [row for row in rounds if row.prefill]
    assert [row.start for row in prefills] == [0, 12]  # the draft's pool keeps it as well


def test_a_long_prompt_stalls_neither_role() -> None:
    """Streams emit in every round while 150 tokens arrive in chunks of 24, and the draft is sent no more at a time."""
    both = Pair(scripted(), scripted(draft=True, blocks=2000), max_batch_tokens=40)
    loop = Loop(both, max_sequences=9)
    for seed in range(8):
        loop.submit([seed % 5], SamplingParams(temperature=1.0, seed=seed, max_tokens=150), lookahead=1)
    loop.round()
    long = loop.submit([0, 1, 2] * 50, SamplingParams(temperature=1.0, seed=9, max_tokens=20))
    both.channel.sent.clear()
    rounds = 0
    while not long.emitted:
        tokens = loop.round()
        assert all(tokens[i] for i in range(1, 9))
        rounds += 1
    assert rounds == 7  # 150 tokens, 24 at a time
    sent = [message.body for message in map(decode, both.channel.sent) if isinstance(message.body, Round)]
    chunks = [row for body in sent for row in body.rows if row.sequence == long.id]
    assert [len(row.tokens) for row in chunks] == [24] * 6 + [6]
    assert [row.budget for row in chunks] == [0] * 6 + [6]
    assert all(row.prefill for row in chunks)
    loop.round()
    assert long.rounds[-1].hit is not None  # its first speculation was prepared right after the last chunk
    loop.run()
    assert [emitted(s) for s in loop.all] == [alone(s) for s in loop.all]


def test_a_new_draft_catches_up_in_chunks_while_the_text_goes_on() -> None:
    both = Pair(scripted(), scripted(draft=True), max_batch_tokens=16)
    loop = Loop(both)
    sequence = loop.submit([0, 1] * 30, SamplingParams(temperature=1.0, seed=3, max_tokens=60))
    while sequence.emitted < 5:
        loop.round()
    both.verifier.attach(both.link, loop.live)
    both.draft_pool.forget()
    before = len(sequence.rounds)
    both.channel.sent.clear()
    loop.run()
    assert [record.hit for record in sequence.rounds[before : before + 4]] == [None] * 4
    assert sequence.rounds[before + 4].hit is False
    assert True in [record.hit for record in sequence.rounds[before:]]
    assert max(len(m.body.rows[0].tokens) for m in map(decode, both.channel.sent) if isinstance(m.body, Round)) == 16
    assert emitted(sequence) == alone(sequence)


def test_a_preempted_request_keeps_text_budget_and_random_stream() -> None:
    both = Pair(scripted(blocks=14), scripted(draft=True))
    loop = Loop(both)
    requests = [loop.submit([seed], SamplingParams(temperature=1.0, seed=seed, max_tokens=40)) for seed in range(3)]
    loop.run()
    assert loop.scheduler.preemptions >= 2
    for sequence in requests:
        assert (sequence.emitted, sequence.finish_reason) == (40, "length")
        assert emitted(sequence) == alone(sequence)
        assert sum(record.tokens for record in sequence.rounds) == 40


def test_a_lone_request_that_just_fits_uses_the_pool_to_its_last_slot() -> None:
    """Near the end there is no room for a whole speculation: a shorter one, no preemption, no livelock."""
    loop = Loop(Pair(scripted(blocks=10, max_model_len=40), scripted(draft=True), lookahead=8))
    sequence = loop.submit([0] * 5, SamplingParams(temperature=1.0, seed=1, max_tokens=1000))
    loop.run()
    assert sequence.length == 40
    assert loop.scheduler.preemptions == 0
    assert emitted(sequence) == Pair(scripted(max_model_len=40), scripted()).run([0] * 5, sequence.request.params, "ar")


def test_a_greedy_request_beside_seeded_ones() -> None:
    """I-08."""
    loop = Loop(Pair(scripted(), scripted(draft=True, blocks=2000)), max_sequences=9)
    greedy = loop.submit([0, 1], SamplingParams(temperature=0, seed=0, max_tokens=60))
    for seed in range(8):
        loop.submit([0, 1], SamplingParams(temperature=1.0, seed=seed, max_tokens=60))
    loop.run()
    assert [emitted(s) for s in loop.all] == [alone(s) for s in loop.all]
    assert len({tuple(emitted(s)) for s in loop.all}) == 9
    assert greedy.finish_reason == "length"


def test_a_batch_that_shrinks() -> None:
    """I-24: 8, 5, 3, 1 rows, ending in different rounds."""
    loop = Loop(Pair(scripted(), scripted(draft=True, blocks=2000)), max_sequences=8)
    for index, length in enumerate((10, 11, 12, 25, 26, 45, 46, 90)):
        loop.submit([index % 5], SamplingParams(temperature=1.0, seed=index, max_tokens=length))
    sizes = []
    while loop.live:
        sizes.append(len(loop.round()))
    assert sizes == sorted(sizes, reverse=True)
    assert {8, 5, 3, 1} <= set(sizes)
    assert [emitted(s) for s in loop.all] == [alone(s) for s in loop.all]


def test_a_thousand_requests_leave_the_pools_as_they_were() -> None:
    """I-19."""
    draw = random.Random(2)
    loop = Loop(Pair(scripted(blocks=40), scripted(draft=True, blocks=100), lookahead=2, budget=2), max_sequences=6)
    for index in range(1000):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 20))]
        loop.submit(
            prompt,
            SamplingParams(temperature=1.0, seed=draw.getrandbits(9), max_tokens=draw.randint(1, 9)),
            ("ar", "sd", "ssd")[index % 3],
        )
        if draw.random() < 0.1:
            draw.choice(loop.live).finish_reason = "cancelled"
            loop.leave(next(s for s in loop.live if s.finish_reason))
    loop.run()
    assert {s.finish_reason for s in loop.all} == {"length", "cancelled"}


def test_a_prompt_of_4000_tokens_delays_eight_streams_by_one_chunk_at_most() -> None:
    """Every stream emits in every round, and no round computes more than its budget, on the target or the draft."""
    options = {"vocab_size": 512, "max_model_len": 4200, "block_size": 16}
    models = (tiny_model("qwen2", max_position_embeddings=4200) for _ in range(2))
    target, draft = (PytorchEngine(model, num_blocks=700, **options) for model in models)
    both = Pair(target, draft, lookahead=2, budget=3, max_batch_tokens=256)
    loop = Loop(both, max_sequences=9)
    for seed in range(8):
        loop.submit([seed, 9], SamplingParams(temperature=1.0, seed=seed, max_tokens=100))
    loop.round()
    largest = [0, 0]
    for which, engine in enumerate((target, draft)):
        forward = engine.forward

        def counted(batch: ForwardBatch, which: int = which, forward: Any = forward) -> ForwardOutput:
            largest[which] = max(largest[which], len(batch.token_ids))
            return forward(batch)  # type: ignore[no-any-return]

        engine.forward = counted  # type: ignore[method-assign]
    draw = random.Random(4)
    long = loop.submit([draw.randrange(512) for _ in range(4000)], SamplingParams(temperature=0, max_tokens=3))
    rounds = 0
    while not long.emitted:
        tokens = loop.round()
        assert all(tokens[sequence.id] for sequence in loop.all[:8] if not sequence.finish_reason)
        rounds += 1
    speculations = 8 * (2 + 1)
    assert rounds <= 4000 // (256 - speculations) + 2
    assert max(largest) <= 256 + speculations


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_a_seed_fixes_the_text_in_every_company_mode_and_lookahead_and_after_a_restart(temperature: float) -> None:
    p = SamplingParams(temperature=temperature, seed=77, max_tokens=30)
    expected = Pair(scripted(), scripted(draft=True)).run([0, 1], p, "ar")
    for lookahead in range(1, 9):
        for mode in ("sd", "ssd"):
            pair = Pair(scripted(), scripted(draft=True, blocks=2000), lookahead=lookahead)
            assert pair.run([0, 1], p, mode) == expected  # type: ignore[arg-type]
    crowd = Loop(Pair(scripted(), scripted(draft=True)), max_sequences=8)
    others = [crowd.submit([seed % 5], replace(p, seed=seed)) for seed in range(7)]
    among = crowd.submit([0, 1], p)
    crowd.run()
    assert emitted(among) == expected
    assert len({tuple(emitted(other)) for other in others}) > 1
    narrow = Loop(Pair(scripted(blocks=12), scripted(draft=True)))
    preempted = [narrow.submit([seed % 5], replace(p, seed=seed)) for seed in range(2)]
    last = narrow.submit([0, 1], p)
    narrow.run()
    assert narrow.scheduler.preemptions > 0
    assert emitted(last) == expected
    assert [emitted(s) for s in preempted] == [alone(s) for s in preempted]
    for delivered in (1, 13, 29):  # what a client has when the service is started again
        again = Loop(Pair(scripted(), scripted(draft=True)))
        resumed = again.pair.sequence([0, 1], p)
        resumed.resume(expected[:delivered])
        again.scheduler.add(resumed)
        again.live.append(resumed)
        again.run()
        assert emitted(resumed) == expected
