"""Replicas of the draft: together they are one draft, and losing one of them lowers the hit rate and nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import test_batching
from harness import Pair
from saguaro.errors import ConfigError, LaunchError
from saguaro.orchestrator import launch
from saguaro.orchestrator.config import DraftConfig, find_deployment, read_deployment
from saguaro.orchestrator.fan_out_policy import Lists, Situation
from saguaro.orchestrator.metrics import chrome_trace
from saguaro.orchestrator.placement import Demand
from saguaro.orchestrator.shards import home, largest, owners
from saguaro.orchestrator.types import Backup, Outcome, Rule, SamplingParams, Speculation
from saguaro.plugins.fan_out import FanOut
from test_batching import Loop, alone, emitted
from test_round import DRAFT, TARGET, params, prompts, scripted


def pair(replicas: int, **options: object) -> Pair:
    drafts = [scripted(DRAFT) for _ in range(replicas)]
    return Pair(scripted(TARGET), drafts[0], more_drafts=drafts[1:], **options)  # type: ignore[arg-type]


def caches(both: Pair) -> list[dict[tuple[int, Outcome], Speculation]]:
    """What each replica has prepared by now."""
    for channel in both.channels:
        channel.pump()
    return [dict(speculator._cache._prepared) for speculator in both.speculators]


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(params, prompts, st.sampled_from(["ar", "sd", "ssd", "ssd"])), min_size=1, max_size=3),
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["primary", "defer", "ngram"]),
)
def test_together_they_are_one_draft(
    rule: Rule, requests: list[tuple], replicas: int, k: int, budget: int, backup: Backup
) -> None:
    """In every round the branches of all are those of one, none is prepared twice, and tokens and figures are the same:
    so whatever one draft emits under either rule, several do."""
    one, several = (pair(n, rule=rule, lookahead=k, budget=budget, backup=backup) for n in (1, replicas))
    batches = [[both.sequence(prompt, p, mode) for p, prompt, mode in requests] for both in (one, several)]
    while running := [[s for s in batch if not s.finish_reason] for batch in batches][0]:
        for both, batch in zip((one, several), batches, strict=True):
            both.step([s for s in batch if not s.finish_reason])
        [whole], parts = caches(one), caches(several)
        assert sum(map(len, parts)) == len(whole)
        assert {key: prepared for part in parts for key, prepared in part.items()} == whole
        assert [s.tokens for s in batches[0]] == [s.tokens for s in batches[1]], running
    assert [s.rounds for s in batches[0]] == [s.rounds for s in batches[1]]
    for situation in (Situation(hit, temperature) for hit in (True, False) for temperature in (0.0, 1.0)):
        expected = one.estimators.of(situation)
        for speculator in several.speculators:  # each has seen every outcome, and every guess
            found = speculator.estimators.of(situation)
            assert (found.observed, found.hit_rate, found.hits(k, budget)) == (
                expected.observed, expected.hit_rate, expected.hits(k, budget),
            )  # fmt: skip


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_whose_a_guess_is_does_not_depend_on_how_many_others_there_are(
    counts: list[int], replicas: int, data: st.DataObject
) -> None:
    def of(lengths: list[int]) -> dict[Outcome, int]:
        guesses = [Outcome(k, rank) for k, length in enumerate(lengths) for rank in range(length)]
        return dict(zip(guesses, owners(guesses, range(replicas)), strict=True))

    k = data.draw(st.integers(0, len(counts) - 1))
    longer = of([*counts[:k], counts[k] + 1, *counts[k + 1 :]])
    assert of(counts).items() <= longer.items()
    for row in range(len(counts)):  # at each acceptance length the shares differ by one at most
        shares = Counter(owner for guess, owner in longer.items() if guess.accepted == row)
        assert max(shares.values(), default=0) - min((shares[r] for r in range(replicas)), default=0) <= 1


def test_a_home_stays_as_long_as_it_is_there() -> None:
    assert [home(sequence, (0, 1, 2), 3) for sequence in range(4)] == [0, 1, 2, 0]
    assert [home(sequence, (0, 2), 3) for sequence in range(4)] == [0, 2, 2, 0]
    assert home(7, (2,), 3) == 2


BATCH = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40) for seed in range(4)]


@cache
def plain() -> list[list[int]]:
    return [pair(1).run([0], p, "ar") for p in BATCH]


@pytest.mark.parametrize("backup", ["primary", "defer"])
def test_losing_one_lowers_the_hit_rate_until_it_returns(backup: Backup) -> None:
    both = pair(3, lookahead=2, budget=6, backup=backup)
    batch = [both.sequence([0], p) for p in BATCH]
    for _ in range(6):
        both.step(batch)
    both.links[1].lost = True
    before = len(batch[0].rounds)
    results = [both.step(batch) for _ in range(8)]
    assert {step.replica for result in results[1:] for step in result.steps} == {0, 2}
    spans = [span for result in results for span in result.spans]
    prepared = [e["tid"] for e in chrome_trace(spans)["traceEvents"] if e["name"] == "prepare"]
    assert set(prepared) == {2, 4}  # a line for each that is there
    away = caches(both)
    assert both.verifier.link.connected == [True, False, True]
    assert away[0]
    assert away[2]
    records = [record for s in batch for record in s.rounds[before + 1 :]]
    assert {record.hit for record in records} == {True, False}  # the others' shares still hit
    missed = [record.drafted for record in records if record.hit is False]
    assert min(missed) > 0  # and what was the lost one's to prepare is drafted by a backup
    both.start(1)
    both.connect(1, batch)
    assert both.verifier.link.connected == [True, True, True]
    both.step(batch)
    assert all(part for part in caches(both))  # each has a share again
    both.finish([s for s in batch if not s.finish_reason])
    assert [s.tokens[1:] for s in batch] == plain()


def test_what_a_lost_one_would_have_prepared_the_others_prepare() -> None:
    """A draft that is always right, and whose best guess after two accepted tokens is the third replica's."""
    both = Pair(
        scripted(TARGET),
        scripted(TARGET),
        more_drafts=[scripted(TARGET), scripted(TARGET)],
        lookahead=2,
        budget=3,
        policy=Lists(lambda budget, k: FanOut((0,) * k + (budget,))),
    )
    sequence = both.sequence([0], SamplingParams(temperature=1.0, seed=3, max_tokens=60))
    for _ in range(9):
        both.step([sequence])
    both.links[2].lost = True
    both.finish([sequence])
    hits = [record.hit for record in sequence.rounds[1:]]
    assert hits == [True] * 8 + [False] + [True] * 11  # what it had prepared when it went is all that is missed


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 5))
def test_no_replica_has_more_than_its_columns_hold(counts: list[int], replicas: int) -> None:
    guesses = [Outcome(k, rank) for k, count in enumerate(counts) for rank in range(count)]
    shares = Counter(owners(guesses, range(replicas)))
    most = largest(sum(counts), len(counts) - 1, replicas)
    assert max(shares.values(), default=0) <= most <= sum(counts)
    assert most <= math.ceil(sum(counts) / replicas) + len(counts)


def test_one_that_is_late_holds_nobody_up_for_long_and_starts_anew_with_the_others() -> None:
    both = pair(3, lookahead=2, budget=6)
    batch = [both.sequence([0], p) for p in BATCH]
    for _ in range(5):
        both.step(batch)
    both.channels[2].delay = 1
    both.step(batch)
    assert both.links[2].counts.draft_timeouts == 1
    assert all(sequence.rounds[-1].hit is not None for sequence in batch)  # verified, if without a speculation
    both.step(batch)
    sent = len(both.channels[2].sent)
    both.step(batch)
    assert len(both.channels[2].sent) == sent  # suspect: not asked
    both.channels[2].delay = 0
    both.step(batch)
    assert len(both.channels[2].sent) == sent + 2  # a round, and what is verified in it
    assert all(part for part in caches(both))
    both.finish([s for s in batch if not s.finish_reason])
    assert [s.tokens[1:] for s in batch] == plain()


def test_a_late_answer_that_comes_before_the_next_round_costs_no_new_start() -> None:
    both = pair(2, lookahead=2, budget=6)
    batch = [both.sequence([0], p) for p in BATCH]
    for _ in range(5):
        both.step(batch)
    both.channels[1].delay = 1
    both.step(batch)
    both.channels[1].delay = 0
    assert not both.verifier.regroup(batch)
    both.step(batch)
    assert all(sequence.draft_length for sequence in batch)
    both.finish(batch)
    assert [s.tokens[1:] for s in batch] == plain()


@pytest.mark.parametrize(("seed", "backup"), [(0, "primary"), (1, "defer")])
def test_anything_may_happen_to_any_of_them(seed: int, backup: Backup) -> None:
    """Deaths, returns and delays beside preemptions, chunks and cached prefixes: each text is that of its solo run."""
    draw = random.Random(seed)
    drafts = [test_batching.scripted(draft=True, blocks=90) for _ in range(3)]
    target = test_batching.scripted(blocks=24, max_model_len=40)
    loop = Loop(Pair(target, drafts[0], more_drafts=drafts[1:], max_batch_tokens=9, backup=backup))
    both = loop.pair
    happened: Counter[str] = Counter()
    for index in range(18):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 16))]
        loop.submit(prompt, SamplingParams(temperature=1.0, seed=index, max_tokens=18), lookahead=draw.randint(1, 4))
        for _ in range(6):
            replica = draw.randrange(3)
            event = draw.choice(["die", "return", "return", "late", "on time", "on time", *[""] * 6])
            if event == "die":
                both.links[replica].lost = True
            elif event == "return" and both.links[replica].lost:
                both.channels[replica].delay = 0
                both.start(replica)
                both.links[replica] = both.connect(replica, loop.live)
                both.draft_pool.forget()
            elif event in ("late", "on time"):
                both.channels[replica].delay = int(event == "late")
            else:
                event = ""
            happened[event] += 1
            if both.verifier.regroup(loop.live):
                both.draft_pool.forget()
            loop.round()
    loop.run()
    assert [emitted(sequence) for sequence in loop.all] == [alone(sequence) for sequence in loop.all]
    assert min(happened.values()) > 3
    hits = Counter(record.hit for sequence in loop.all for record in sequence.rounds)
    assert min(hits[True], hits[False], hits[None]) > 10


# Configuration and places


def test_replicas_are_the_drafts_alone_and_counted(tmp_path: Path) -> None:
    text = find_deployment("tiny").read_text()
    path = tmp_path / "tiny.yaml"
    path.write_text(text.replace("  recipe: tiny-draft\n", "  recipe: tiny-draft\n  replicas: 3\n"))
    assert read_deployment(path).replicas == 3
    path.write_text(text.replace("  recipe: tiny-draft\n", "  recipe: tiny-draft\n  replicas: 0\n"))
    with pytest.raises(ConfigError, match="draft.*replicas must be between 1 and 64, got 0"):
        read_deployment(path)
    path.write_text(text.replace("  recipe: tiny-target\n", "  recipe: tiny-target\n  replicas: 2\n"))
    with pytest.raises(ConfigError, match="target.replicas"):
        read_deployment(path)


@pytest.mark.parametrize(
    ("available", "named", "expected"),
    [
        ({0, 1, 2, 3, 4}, None, [(1,), (2,), (3,)]),
        ({0, 1}, None, [(1,), (1,), (1,)]),  # too few for each: they share them, and leave the target's alone
        ({0}, None, [(0,), (0,), (0,)]),
        ({0, 1, 2, 3, 4, 5, 6}, (1, 2, 3, 4, 5, 6), [(1, 2), (3, 4), (5, 6)]),
    ],
)
def test_cores_are_shared_out(
    available: set[int], named: tuple[int, ...] | None, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_demand", lambda model, engine: Demand(model, "pytorch", 1, ""))
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: available)
    config = read_deployment(find_deployment("tiny"))
    config = launch.replace(config, draft=DraftConfig("tiny-draft", cores=named, replicas=3))
    groups = launch.plan_groups(config, Path(), Path())
    assert list(groups) == ["target", "draft-0", "draft-1", "draft-2"]
    assert [groups[role].members[0].cores for role in list(groups)[1:]] == expected
    if named:
        monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: {0, 1})
        with pytest.raises(LaunchError, match=r"draft.cores names \[1, 2\] for draft-0, but"):
            launch.plan_groups(config, Path(), Path())
