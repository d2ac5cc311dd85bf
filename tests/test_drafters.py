"""Every drafter keeps the contract of `Drafter`, says what its method says, and changes nothing but speed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Pair
from oracles import assert_lossless_over_texts
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.orchestrator.drafters.backups import backup_drafter
from saguaro.orchestrator.drafters.base import Drafter, Guess, Trunk
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.drafters.ngram import NgramDrafter
from saguaro.orchestrator.drafters.random_tokens import RandomDrafter
from saguaro.orchestrator.drafters.suffix import SuffixDrafter
from saguaro.orchestrator.drafters.suffix_automaton import SuffixAutomaton
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.fan_out_policy import Lists, uniform
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.sampling import accept_ratio
from saguaro.orchestrator.types import Backup, Outcome, RequestSampling, Rule, SamplingParams, Speculation
from saguaro.plugins.fan_out import FanOut
from test_losslessness import OUTCOMES, V, random_table
from test_round import DRAFT, TARGET, pair, params, prompts, scripted

BACKUPS: tuple[Backup, ...] = ("primary", "ngram", "suffix", "random", "none")
WORDLESS: tuple[Backup, ...] = ("ngram", "suffix", "random", "none")
BLOCK = 4


def row(
    text: Sequence[int], *, lookahead: int = 3, start: int = 0, sequence: int = 1, temperature: float = 0.0
) -> DraftRow:
    table = tuple(range(sequence * 20, sequence * 20 + 20))
    request = RequestSampling(SamplingParams(temperature=temperature, seed=5), 5, 1)
    return DraftRow(sequence, start, tuple(text[start:]), None, False, lookahead, 8, table, request)


def drafter(name: Backup, rule: Rule = "coupled") -> Drafter:
    table = markov_table([[Fraction(weight, sum(weights)) for weight in weights] for weights in DRAFT])
    engine = ScriptedEngine(table, len(DRAFT), 80, BLOCK, 200)
    return backup_drafter(name, ModelDrafter(engine, rule, Lists(uniform)), rule, range(len(DRAFT)))


def after_miss(found: Drafter, text: Sequence[int], **options: int) -> tuple[int, ...]:
    missing = row(text, **options)
    found.catch_up([missing])
    [[speculation]] = found.draft([Trunk.decided(missing)], [[Guess(Outcome(0, text[-1]))]])
    return speculation.tokens


# The contract


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("name", BACKUPS)
def test_contract(name: Backup, rule: Rule) -> None:
    draw = random.Random(name)
    for temperature in (0.0, 1.0):
        for _ in range(6):
            one = drafter(name, rule)
            text = [draw.randrange(5) for _ in range(draw.randint(2, 12))]
            sent = tuple(draw.randrange(5) for _ in range(draw.randint(0, 3)))
            asked = row(text, lookahead=draw.randint(1, 3), temperature=temperature)
            trunk = Trunk.under_verification(asked, Speculation(sent))
            fan_out = FanOut(tuple(draw.randint(0, 3) for _ in range(len(sent) + 1)))
            one.catch_up([asked])
            [guessed] = one.predict([trunk], [fan_out])
            for k, count in enumerate(fan_out.counts):
                bonus = [guess.outcome.bonus for guess in guessed if guess.outcome.accepted == k]
                assert len(bonus) == len(set(bonus)) <= count
                assert k == len(sent) or sent[k] not in bonus  # it cannot be the bonus token there
                assert all(0 <= token < 5 for token in bonus)
            assert [g.outcome.accepted for g in guessed] == sorted(g.outcome.accepted for g in guessed)
            [drafted] = one.draft([trunk], [guessed])
            assert len(drafted) == len(guessed)
            for speculation in drafted:
                assert len(speculation.tokens) <= asked.lookahead
                assert all(0 <= token < 5 for token in speculation.tokens)
                if name != "primary" or rule == "coupled" or temperature == 0:
                    assert speculation.draft_probs is None  # a point mass
            assert one.draft([trunk], [guessed]) == [drafted]


@pytest.mark.parametrize("name", ["primary", "ngram", "random", "none"])
def test_what_may_happen_and_what_happened_are_drafted_alike(name: Backup) -> None:
    text, sent = [0, 1, 2, 0, 1, 2, 3], (0, 1)
    may = drafter(name)
    may.catch_up([row(text)])
    trunk = Trunk.under_verification(row(text), Speculation(sent))
    may.predict([trunk], [FanOut((1, 1, 1))])
    [prepared] = may.draft([trunk], [[Guess(Outcome(0, 3)), Guess(Outcome(1, 3)), Guess(Outcome(2, 2))]])
    for accepted, bonus, speculation in zip(range(3), (3, 3, 2), prepared):
        assert after_miss(drafter(name), [*text, *sent[:accepted], bonus]) == speculation.tokens


# Prompt lookup


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([10, 11, 12, 10, 11], (12, 10, 11)),
        ([1, 2, 3, 4], ()),  # nothing occurred before
        ([1, 2, 7, 1, 2, 8, 1, 2], (8, 1, 2)),  # the latest
        ([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], (7, 9, 2)),  # the longest before the latest
        ([5, 6, 5, 6], (5, 6, 5)),  # repeats itself beyond the end
        ([5, 5], (5, 5, 5)),
        ([5], ()),
    ],
)
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_lookup(name: str, text: list[int], expected: tuple[int, ...]) -> None:
    memory = TokenMemory(200, BLOCK)
    found: Drafter = NgramDrafter(memory) if name == "ngram" else SuffixDrafter(memory, shared=True)
    if name == "suffix" and text[:3] == [1, 2, 7]:
        expected = (7, 1, 2)  # of equally frequent ones the lower id
    assert after_miss(found, text) == expected


def test_lookup_guesses_longer_matches_first() -> None:
    found = NgramDrafter(TokenMemory(200, BLOCK))
    asked = row([1, 2, 7, 9, 2, 8, 1, 2])
    [guessed] = found.predict([Trunk.under_verification(asked, Speculation((5,)))], [FanOut((3, 1))])
    assert guessed == [
        Guess(Outcome(0, 7)),
        Guess(Outcome(0, 8)),
    ]  # after (1, 2), then after 2; nothing ever followed 5
    [guessed] = found.predict([Trunk.under_verification(asked, Speculation((7,)))], [FanOut((3, 1))])
    assert guessed == [Guess(Outcome(0, 8)), Guess(Outcome(1, 9))]


# Suffixes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=3), st.randoms())
def test_the_automaton_knows_every_substring_and_its_count(texts: list[list[int]], order: random.Random) -> None:
    """Also when several texts grow side by side."""
    automaton = SuffixAutomaton()
    states, read = [0] * len(texts), [0] * len(texts)
    while open_texts := [i for i, text in enumerate(texts) if read[i] < len(text)]:
        i = order.choice(open_texts)
        states[i] = automaton.extend(states[i], texts[i][read[i]])
        read[i] += 1
    assert len(automaton.next) <= 2 * sum(map(len, texts)) + 1
    seen = {tuple(t[i : i + n]) for t in texts for n in range(1, 6) for i in range(len(t) - n + 1)}
    for words in seen:
        state, length = automaton.match(words)
        assert length == len(words)
        ends = [(t, i + len(words)) for t in texts for i in range(len(t)) if tuple(t[i : i + len(words)]) == words]
        assert automaton.count[state] == len(ends)
        assert set(automaton.followers(state)) == {t[end] for t, end in ends if end < len(t)}
    for words in ((0, 1, 2, 2, 1), (2, 2, 2, 2)):
        assert (automaton.match(words)[1] == len(words)) == (words in seen)


def test_frequent_continuations_first_and_other_requests_help() -> None:
    found = SuffixDrafter(TokenMemory(400, BLOCK), shared=True)
    assert after_miss(found, [1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2], lookahead=1) == (8,)
    assert after_miss(found, [3, 1, 2], sequence=2, lookahead=2) == (8, 1)  # it never said so itself
    alone = SuffixDrafter(TokenMemory(400, BLOCK), shared=False)
    assert after_miss(alone, [1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2], lookahead=1) == (8,)
    assert after_miss(alone, [3, 1, 2], sequence=2, lookahead=2) == ()


def test_memory_stays_below_its_cap_and_works_after_forgetting() -> None:
    memory = TokenMemory(400, BLOCK)
    found = SuffixDrafter(memory, shared=True, max_tokens=60)
    draw = random.Random(0)
    for sequence in range(1, 19):
        text = [draw.randrange(50) for _ in range(draw.randint(1, 60))]
        after_miss(found, [*text, 77, 78, 79, 77, 78], sequence=sequence)
        assert found.remembered <= 60
    assert after_miss(found, [*range(40), 77, 78, 79, 77, 78], sequence=1) == (79, 77, 78)


# Random


@pytest.mark.parametrize("name", ["ngram", "suffix"])
@pytest.mark.parametrize("kept", [1, 2, 5, 11])
def test_i22_a_text_that_is_rolled_back_is_looked_up_as_it_is_now(name: Backup, kept: int) -> None:
    """The context loses its end in the middle of a generation and goes on otherwise: what was looked up is gone."""
    long = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    rolled = [*long[:kept], 2, 1]
    found = drafter(name)
    after_miss(found, long)
    tokens = after_miss(found, rolled)
    assert len(tokens) <= 3
    assert set(tokens) <= set(range(len(DRAFT)))
    if name == "ngram":  # knows nothing but the text as it is
        assert tokens == after_miss(drafter(name), rolled)
        assert after_miss(found, long) == after_miss(drafter(name), long)


def test_random_tokens_are_ordinary_ones_and_repeat_with_the_seed() -> None:
    found = RandomDrafter(TokenMemory(400, BLOCK), [3, 5, 8])
    tokens = after_miss(found, [1, 2, 3], lookahead=30)
    assert set(tokens) == {3, 5, 8}
    assert after_miss(found, [9, 9, 3], lookahead=30, sequence=2) == tokens  # of seed and position alone
    assert after_miss(found, [1, 3], lookahead=30) != tokens


# Exactness


def of_text(name: Backup, lookahead: int) -> Callable[[tuple[int, ...]], Speculation]:
    def propose(text: tuple[int, ...]) -> Speculation:
        memory = TokenMemory(200, BLOCK)
        built: dict[str, Drafter] = {
            "ngram": NgramDrafter(memory),
            "suffix": SuffixDrafter(memory, shared=False),
            "random": RandomDrafter(memory, range(V)),
        }
        return Speculation(after_miss(built[name], text, lookahead=lookahead) if name in built else ())

    return propose


@pytest.mark.parametrize("name", WORDLESS)
def test_ratio_emits_the_targets_law_with_every_backup(name: Backup) -> None:
    """By enumeration, over hits and misses: what is drafted depends on all that was emitted before."""
    draw = random.Random(name)
    for _ in range(2):
        target = random_table(draw)
        text = tuple(draw.randrange(V) for _ in range(5))
        predictions = [(), draw.sample(OUTCOMES, 4)]
        other = draw.choice(["ngram", "random"])
        assert_lossless_over_texts(
            accept_ratio, target, text, predictions, primary=of_text(other, 2), backup=of_text(name, 2)
        )


@settings(max_examples=15, deadline=None)
@given(params, prompts, st.integers(1, 4), st.integers(0, 6), st.sampled_from(WORDLESS))
def test_coupled_emits_the_same_tokens_with_every_backup(
    p: SamplingParams, prompt: list[int], k: int, budget: int, name: Backup
) -> None:
    plain = pair().run(prompt, p, "ar")
    for mode in ("sd", "ssd"):
        both = pair(lookahead=k, budget=budget, backup=name)
        assert both.run(prompt, p, mode) == plain  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BACKUPS)
def test_a_seed_fixes_the_text_under_ratio_whatever_was_said_before(name: Backup) -> None:
    def run(*others: int) -> list[int]:
        both = pair(rule="ratio", backup=name)
        for seed in others:
            both.run([0], SamplingParams(temperature=2.0, seed=seed, max_tokens=12))
        return both.run([0], SamplingParams(temperature=2.0, seed=42, max_tokens=12))

    assert run() == run(42, 1)


@pytest.mark.parametrize("name", BACKUPS)
def test_what_each_backup_does_after_a_miss(name: Backup) -> None:
    """A chain in which the draft is never right, so that every round is a miss answered by the backup."""
    chain = [[1, 96, 1, 1, 1], [1, 1, 96, 1, 1], [1, 1, 1, 96, 1], [96, 1, 1, 1, 1], [1, 1, 1, 1, 96]]  # 0 1 2 3 0 …
    wrong = [[1, 1, 1, 1, 96]] * 5
    both = Pair(scripted(chain), scripted(wrong), lookahead=3, budget=0, backup=name)
    sequence = both.sequence([0, 1, 2, 3, 0, 1], SamplingParams(temperature=0, max_tokens=30))
    assert both.finish([sequence]) == [[2, 3, 0, 1] * 7 + [2, 3]]
    lengths = [record.tokens for record in sequence.rounds[1:-1]]
    if name in ("ngram", "suffix"):
        assert set(lengths) == {4}  # the text repeats itself, so everything is accepted
    elif name in ("primary", "none"):
        assert set(lengths) == {1}
    else:
        assert sum(lengths) / len(lengths) < 2.5


def test_only_a_row_that_missed_uses_the_backup() -> None:
    both = Pair(scripted(TARGET), scripted(DRAFT), lookahead=2, budget=3, backup="none")
    batch = [both.sequence([0], SamplingParams(temperature=1.0, seed=s, max_tokens=30)) for s in range(6)]
    mixed = 0
    while not any(sequence.finish_reason for sequence in batch):
        both.step(batch)
        last = [sequence.rounds[-1] for sequence in batch]
        assert all(record.tokens == 1 for record in last if record.hit is False)
        mixed += {True, False} <= {record.hit for record in last}
    assert mixed > 3
