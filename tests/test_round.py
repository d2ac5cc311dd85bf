"""The two roles together: what is emitted never depends on how it was speculated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness import Pair
from saguaro.engines.base import Engine, ForwardBatch, ForwardOutput
from saguaro.engines.pytorch import PytorchEngine
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import ConfigError, LinkError
from saguaro.orchestrator.fan_out_policy import Lists
from saguaro.orchestrator.protocol import Answer, Round, decode
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Mode, Outcome, SamplingParams, Speculation
from saguaro.plugins.fan_out import FanOut
from tiny_models import tiny_model

# Next-token tables over five tokens: the draft is right often, and wrong often enough.
TARGET = [[50, 20, 15, 10, 5], [5, 60, 15, 10, 10], [10, 10, 10, 30, 40], [25, 25, 20, 20, 10], [1, 2, 3, 4, 90]]
DRAFT = [[40, 30, 10, 10, 10], [10, 40, 30, 10, 10], [10, 10, 10, 50, 20], [0, 50, 20, 20, 10], [10, 10, 10, 10, 60]]


def scripted(rows: Rows[Rows[int]], *, blocks: int = 200, block_size: int = 4, max_model_len: int = 200) -> Engine:
    table = markov_table([[Fraction(weight, sum(row)) for weight in row] for row in rows])
    return ScriptedEngine(table, len(rows), max_model_len, block_size, blocks)


def pair(**options: object) -> Pair:
    return Pair(scripted(TARGET), scripted(DRAFT), **options)  # type: ignore[arg-type]


class Recorded:
    """An engine that says when it is asked for a forward and when its logits are read."""

    def __init__(self, engine: Engine, asynchronous: bool) -> None:
        self.engine, self.asynchronous = engine, asynchronous
        self.events: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, batch: ForwardBatch) -> Any:
        self.events.append("launched")
        return _Output(self.engine.forward(batch).logits, self.events)


class _Output(ForwardOutput):
    def __init__(self, logits: torch.Tensor, events: list[str]) -> None:
        vars(self).update(computed=logits, events=events)

    @property
    def logits(self) -> torch.Tensor:
        vars(self)["events"].append("read")
        return vars(self)["computed"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_done_meanwhile_is_done_while_nobody_waits(asynchronous: bool) -> None:
    target = Recorded(scripted(TARGET), asynchronous)
    both = Pair(target, scripted(DRAFT))
    send = both.channel.send
    both.channel.send = lambda data: (target.events.append("asked"), send(data))[1]  # type: ignore[method-assign]
    sequence = both.sequence([0, 1], SamplingParams(temperature=0, max_tokens=20))
    while not sequence.finish_reason:
        target.events.clear()
        sequence.target_table.grow(sequence.length)
        both.verifier.step([sequence], lambda: target.events.append("meanwhile"))
        order = ["launched", "meanwhile"] if asynchronous else ["meanwhile", "launched"]
        asked = sequence.rounds[-1].mode != "ar"  # not for the last token
        assert target.events == ["asked"] * asked + [*order, "read"]
    assert sequence.tokens[2:] == pair().run([0, 1], SamplingParams(temperature=0, max_tokens=20), "ar")


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 2, 4]),
    top_p=st.sampled_from([1.0, 1.0, 0.7, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.3]),
    logit_bias=st.sampled_from([{}, {}, {1: 1.5, 3: -2.0}]),
    bad_words=st.sampled_from([(), (), ((4,), (0, 1))]),
    stop_token_ids=st.sampled_from([(), (), (2,)]),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 24),
    seed=st.integers(0, 2**64 - 1),
)
prompts = st.lists(st.integers(0, 4), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None)
@given(params, prompts, st.integers(1, 6), st.integers(0, 9))
def test_coupled_emits_the_same_tokens_in_every_mode(p: SamplingParams, prompt: list[int], k: int, budget: int) -> None:
    plain = pair(lookahead=k, budget=budget).run(prompt, p, "ar")
    assert pair(lookahead=k, budget=budget).run(prompt, p, "sd") == plain
    assert pair(lookahead=k, budget=budget).run(prompt, p, "ssd") == plain


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(params, prompts, st.sampled_from(["ar", "sd", "ssd"]), st.integers(1, 4)), min_size=2, max_size=5
    )
)
def test_a_batch_of_anything_emits_what_each_emits_alone(requests: list[tuple]) -> None:
    """Unequal K, modes, lengths and ends in one verification; rows leave in different rounds."""
    together = pair(lookahead=4)
    sequences = [together.sequence(prompt, p, mode, k) for p, prompt, mode, k in requests]
    assert together.finish(sequences) == [pair().run(prompt, p, "ar") for p, prompt, _, _ in requests]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tiny_models_in_float64(family: str) -> None:
    """204 draws of (prompt, K, F, parameters, seed) in all: ar = sd = ssd token for token, greedy = HF generate."""
    # The last is untouched by our attention.
    target_model, draft_model, oracle = (tiny_model(family, torch.float64, num_hidden_layers=2) for _ in range(3))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a draft that agrees with its target often, but not always
        for parameter in draft_model.parameters():
            scale = 0.1 * parameter.std() if parameter.dim() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    vocab = target_model.config.vocab_size
    options = {"vocab_size": vocab, "max_model_len": 128, "block_size": 8}
    target = PytorchEngine(target_model, num_blocks=256, **options)
    draft = PytorchEngine(draft_model, num_blocks=1024, **options)
    draw = random.Random(family)
    draws = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.3, 1.0, 1.5]),
            top_k=draw.choice([0, 0, 5, 40]),
            top_p=draw.choice([1.0, 0.9, 0.5]),
            min_p=draw.choice([0.0, 0.05]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.3]),
            seed=draw.getrandbits(64),
            max_tokens=10,
        )
        for _ in range(68)
    ]
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, 12))] for _ in draws]
    ks = [draw.randint(1, 5) for _ in draws]

    def run(mode: Mode, which: range, budget: int = 6) -> list[Sequence]:
        """Together, because a forward costs little more than it does for one."""
        both = Pair(target, draft, budget=budget)
        sequences = [both.sequence(prompts[i], draws[i], mode, ks[i]) for i in which]
        both.finish(sequences)
        return sequences

    plain = run("ar", range(68))
    assert [s.tokens for s in run("sd", range(68))] == [s.tokens for s in plain]
    figures: Counter[bool | None] = Counter()
    for group, budget in enumerate((1, 2, 4, 7, 10)):
        which = range(group, 68, 5)
        for i, sequence in zip(which, run("ssd", which, budget)):
            assert sequence.tokens == plain[i].tokens
            figures.update(record.hit for record in sequence.rounds)
    assert min(figures[True], figures[False]) > 30  # the draws exercised hits and misses
    greedy = 0
    for prompt, p, sequence in zip(prompts, draws, plain):
        penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        if p.temperature == 0 and not penalised:
            ids = torch.tensor([prompt])  # the mask, or a token 0 would pass for padding
            expected = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=None
            )[0].tolist()
            assert sequence.tokens == expected
            greedy += 1
    assert greedy


def test_ratio_keeps_the_targets_law_over_hits_and_misses() -> None:
    """Chi-square of the first three tokens against the closed form, fixed seeds; the draft is far off on purpose."""
    count = 2000
    law = np.array(TARGET, dtype=float) / 100
    joint = np.einsum("a,ab,bc->abc", law[0], law, law).ravel()
    seen: Counter[tuple[int, ...]] = Counter()
    hits: Counter[bool | None] = Counter()
    for start in range(0, count, 100):
        both = Pair(
            scripted(TARGET, blocks=2000), scripted(DRAFT, blocks=4000), rule="ratio", lookahead=2, budget=2, width=4
        )
        batch = [both.sequence([0], SamplingParams(max_tokens=3, seed=start + i)) for i in range(100)]
        seen.update(tuple(tokens) for tokens in both.finish(batch))
        hits.update(record.hit for sequence in batch for record in sequence.rounds)
    observed = [seen[(a, b, c)] for a in range(5) for b in range(5) for c in range(5)]
    assert stats.chisquare(observed, joint * count).pvalue > 1e-4
    assert hits[True] > 200
    assert hits[False] > 200


def test_a_perfect_draft_always_hits_and_emits_k_plus_one() -> None:
    both = Pair(
        scripted(TARGET),
        scripted(TARGET),
        lookahead=3,
        policy=Lists(lambda budget, k: FanOut((0,) * k + (budget,))),
        budget=2,
    )
    sequence = both.sequence([0], SamplingParams(temperature=1.0, seed=3, max_tokens=41))
    both.finish([sequence])
    decoding = sequence.rounds[1:]
    assert [record.hit for record in decoding] == [True] * 10  # the very first speculation is prepared, not missed
    assert [record.tokens for record in decoding] == [4] * 10


def test_only_the_rows_that_missed_are_drafted_again() -> None:
    """Feature-matrix 1.1, row 33: rows that hit keep the speculation prepared for them."""
    both = pair(lookahead=2, budget=3)
    drafter, cache = both.speculator._drafter, both.speculator._cache
    original, take = drafter.draft, cache.take
    redrafted: list[set[int]] = []
    served: dict[int, Speculation] = {}

    def draft(trunks: Any, outcomes: Any, *enough: Any) -> Any:
        if all(trunk.prefix == trunk.row.length - 2 for trunk in trunks):  # what has happened, not what may happen
            redrafted.append({trunk.row.sequence for trunk in trunks})
        return original(trunks, outcomes, *enough)

    def remember(sequence: int, outcome: Outcome) -> Speculation | None:
        found = take(sequence, outcome)
        if found:
            served[sequence] = found
        return found

    drafter.draft, cache.take = draft, remember  # type: ignore[method-assign]
    batch = [both.sequence([0], SamplingParams(temperature=1.0, seed=s, max_tokens=30)) for s in range(6)]
    mixed = 0
    while not any(sequence.finish_reason for sequence in batch):
        served.clear()
        redrafted.clear()
        both.step(batch)
        hits = {sequence.id for sequence in batch if sequence.rounds[-1].hit}
        misses = {sequence.id for sequence in batch if sequence.rounds[-1].hit is False}
        assert set(served) == hits
        assert redrafted == ([misses] if misses else [])
        mixed += bool(hits and misses)
    assert mixed > 3


def test_sd_never_hits_and_ar_never_asks() -> None:
    both = pair()
    plain, plain_speculation = (
        both.sequence([0], SamplingParams(max_tokens=20, seed=1), mode) for mode in ("ar", "sd")
    )
    both.finish([plain])
    assert len(both.channel.sent) == 0
    both.finish([plain_speculation])
    assert {record.hit for record in plain.rounds} == {None}
    assert {record.hit for record in plain_speculation.rounds[1:]} == {False}


def test_one_exchange_a_round_in_order() -> None:
    """A round number rises by one with each request, the answer repeats it, outcomes are those of the round before."""
    both = pair()
    answers: list[Answer] = []
    original = both.channel.answer
    both.channel.answer = lambda data: (answers.append(decode(data)), original(data))[1]  # type: ignore[method-assign, assignment]
    sequence = both.sequence([0, 1], SamplingParams(temperature=1.0, seed=5, max_tokens=20))
    both.finish([sequence])
    requests = [decode(data) for data in both.channel.sent]
    assert [message.round for message in requests] == list(range(1, len(requests) + 1))
    assert [message.round for message in answers] == [m.round for m in requests if not m.body.rows[0].prefill]  # type: ignore[union-attr, attr-defined]
    assert len(requests) in (len(sequence.rounds), len(sequence.rounds) - 1)  # the last round may need no draft
    first, *rest = [message.body.rows[0] for message in requests if isinstance(message.body, Round)]
    assert first.prefill
    assert first.tokens == (0, 1)
    assert first.outcome is None
    position = 2
    for row, record in zip(rest, sequence.rounds):
        assert row.outcome == Outcome(record.tokens - 1, row.tokens[0])
        assert row.start == position + record.tokens - 1
        position += record.tokens


class DyingChannel:
    """Passes everything on until it is told that the peer is gone."""

    def __init__(self, inner: object, lives: int) -> None:
        self._inner = inner
        self.lives = lives

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def receive(self, timeout: float) -> bytes | None:
        self.lives -= 1
        if self.lives < 0:
            raise LinkError("killed")
        return self._inner.receive(timeout)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("lives", range(6))
def test_a_draft_that_dies_costs_nothing_but_speed(lives: int, caplog: pytest.LogCaptureFixture) -> None:
    p = SamplingParams(temperature=1.0, seed=11, max_tokens=30)
    both = pair()
    both.link._channel = DyingChannel(both.channel, lives)  # type: ignore[assignment]
    assert both.run([0, 3], p) == pair().run([0, 3], p, "ar")
    assert both.link.lost
    assert "decoding goes on without speculation" in caplog.text


def test_a_late_draft_is_dropped_counted_and_used_again(caplog: pytest.LogCaptureFixture) -> None:
    p = SamplingParams(temperature=1.0, seed=12, max_tokens=60)
    both = pair()
    sequence = both.sequence([0, 3], p)
    for _ in range(3):
        both.step([sequence])
    both.channel.delay = 1
    both.step([sequence])
    assert sequence.rounds[-1].hit is None
    both.step([sequence])
    assert sequence.rounds[-1].hit is None  # suspect: not even asked
    both.channel.delay = 0
    before = len(sequence.rounds)
    assert both.finish([sequence])[0] == pair().run([0, 3], p, "ar")
    assert both.link.counts.stale_answers == 1
    assert {record.hit for record in sequence.rounds[before:]} >= {True}
    assert "did not answer round" in caplog.text
    assert "speculation resumes" in caplog.text


def test_a_restarted_draft_starts_from_an_empty_pool() -> None:
    p = SamplingParams(temperature=1.0, seed=13, max_tokens=40)
    both = pair()
    sequence = both.sequence([0, 3], p)
    for _ in range(4):
        both.step([sequence])
    fresh = pair()
    both.channel.speculator = fresh.speculator
    fresh.speculator._channel = both.speculator._channel
    both.verifier.attach(both.link, [sequence])
    before = len(sequence.rounds)
    assert both.finish([sequence])[0] == pair().run([0, 3], p, "ar")
    assert sequence.rounds[before].hit is False  # nothing prepared, but drafted after catching up
    assert True in {record.hit for record in sequence.rounds[before:]}


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_ends(mode: str) -> None:
    chain = [[1, 9, 1, 1, 1], [1, 1, 9, 1, 1], [1, 1, 1, 9, 1], [1, 1, 1, 1, 9], [9, 1, 1, 1, 1]]  # 0 1 2 3 4 0 …
    both = Pair(scripted(chain, max_model_len=16), scripted(chain), stop_ids=(3,), lookahead=3)
    stop = both.sequence([0], SamplingParams(temperature=0, max_tokens=50), mode)  # type: ignore[arg-type]
    assert both.finish([stop]) == [[1, 2, 3]]  # the end lies inside a block, and nothing follows it
    assert stop.finish_reason == "stop"
    one = both.sequence([4], SamplingParams(temperature=0, max_tokens=1), mode)  # type: ignore[arg-type]
    assert both.finish([one]) == [[0]]
    assert one.finish_reason == "length"
    full = both.sequence([0] * 15, SamplingParams(temperature=0, max_tokens=50), mode)  # type: ignore[arg-type]
    assert both.finish([full]) == [[1]]  # the context is usable to its last token
    assert full.finish_reason == "length"
    later = both.sequence([0], SamplingParams(temperature=0, min_tokens=4, max_tokens=9), mode)  # type: ignore[arg-type]
    tokens = both.finish([later])[0]
    assert tokens == [1, 2, 0, 1, 2, 3]  # the lowest of the tokens that may follow 2 while 3 may not


def test_a_draft_with_a_shorter_context_switches_itself_off_beyond_it() -> None:
    p = SamplingParams(temperature=1.0, seed=21, max_tokens=60)
    short = Pair(scripted(TARGET), scripted(DRAFT, max_model_len=30), lookahead=3)
    sequence = short.sequence([0], p)
    assert short.finish([sequence])[0] == pair().run([0], p, "ar")
    assert sequence.rounds[1].hit is not None
    assert sequence.rounds[-1].hit is None


def test_a_draft_pool_that_is_too_small_means_plain_decoding() -> None:
    p = SamplingParams(temperature=1.0, seed=22, max_tokens=20)
    small = Pair(scripted(TARGET), scripted(DRAFT, blocks=3), lookahead=3)
    sequence = small.sequence([0], p)
    assert small.finish([sequence])[0] == pair().run([0], p, "ar")
    assert {record.hit for record in sequence.rounds} == {None}


def test_a_row_that_cannot_go_on_fails_alone() -> None:
    """All tokens after 2 are bad words: an error for that request, and only when it gets there."""
    chain = [[1, 9, 1, 1, 1], [1, 1, 9, 1, 1], [1, 1, 1, 9, 1], [1, 1, 1, 1, 9], [9, 1, 1, 1, 1]]
    both = Pair(scripted(chain), scripted(chain), lookahead=3)
    dead_end = tuple((2, token) for token in range(5))
    stuck = both.sequence([0], SamplingParams(temperature=0, max_tokens=9, bad_words=dead_end))
    fine = both.sequence([0], SamplingParams(temperature=0, max_tokens=9))
    emitted = both.finish([stuck, fine])
    assert emitted[0] == [1, 2][: len(emitted[0])]
    assert emitted[1] == [1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert stuck.finish_reason == "error"
    assert "no token may follow at position 3" in str(stuck.error)
    assert fine.finish_reason == "length"


def test_an_impossible_draft_is_not_used_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    p = SamplingParams(temperature=1.0, seed=31, max_tokens=20)
    both = pair()
    drafter = both.speculator._drafter
    original, predict = drafter.draft, drafter.predict

    def nonsense(trunks: Any, outcomes: Any, *enough: Any) -> Any:
        return [[Speculation((999,) * len(s.tokens)) for s in row] for row in original(trunks, outcomes, *enough)]

    drafter.draft = nonsense  # type: ignore[method-assign]
    # Fed to the draft model as a trunk, nonsense would break it: another matter than what the verifier makes of it.
    drafter.predict = lambda trunks, fan_outs: predict(  # type: ignore[method-assign]
        [replace(trunk, draft_tokens=(0,) * len(trunk.draft_tokens)) for trunk in trunks], fan_outs
    )
    assert both.run([0], p) == pair().run([0], p, "ar")
    assert "draft token 0 is 999" in caplog.text


@pytest.mark.parametrize(("rule", "cache_aware"), [("coupled", 1.0), ("ratio", 1.0), ("ratio", 0.3)])
def test_a_seed_fixes_the_text_whatever_runs_beside_it(rule: str, cache_aware: float) -> None:
    def run(*others: int) -> list[int]:
        both = Pair(scripted(TARGET), scripted(DRAFT), rule=rule, cache_aware=cache_aware)  # type: ignore[arg-type]
        batch = [both.sequence([0], SamplingParams(temperature=2.0, seed=s, max_tokens=20)) for s in (42, *others)]
        return both.finish(batch)[0]

    assert run() == run() == run(1, 2, 3)
    assert run() != Pair(scripted(TARGET), scripted(DRAFT), rule=rule).run(  # type: ignore[arg-type]
        [0], SamplingParams(temperature=2.0, seed=43, max_tokens=20)
    )


class Unfollowable:
    """A grammar that has become too ambiguous for the library."""

    digest = b""
    complete = False

    def masks(self, tails: object, vocab_size: int) -> None:
        raise ConfigError("the grammar cannot be followed any further")


@pytest.mark.parametrize("neighbours", [0, 2])
def test_a_grammar_that_cannot_be_followed_ends_its_own_request_alone(neighbours: int) -> None:
    both = Pair(scripted(TARGET), scripted(DRAFT))
    greedy = SamplingParams(temperature=0, max_tokens=5)
    failing, *others = (both.sequence([0], greedy, "ar") for _ in range(1 + neighbours))
    failing.grammar = Unfollowable()  # type: ignore[assignment]
    tokens = both.finish([failing, *others])
    assert failing.finish_reason == "error"
    assert "cannot be followed any further" in str(failing.error)
    assert tokens == [[]] + [both.run([0], greedy, "ar")] * neighbours
