"""What drafts after a miss, C, replicas and early ends together, in the running roles: the target's law."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness import Pair
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import Auto, Backup, SamplingParams, Setting
from test_round import DRAFT, TARGET, params, prompts, scripted

BACKUPS: tuple[Backup | Auto, ...] = ("auto", "primary", "defer", "ngram", "suffix", "random", "none")
SCALES = (1.0, 0.5, 0.05)  # C: off, in between, nearly nothing left of what is guessed
LEAST = (0.0, 0.45)  # min_confidence
RANKED = (None, 0.0, 0.1)  # least_probability of what is prepared; None: the policy's lists


def roles(backup: Backup | Auto, replicas: int, **options: Any) -> Pair:
    drafts = [scripted(DRAFT, blocks=3000) for _ in range(replicas)]
    others = tuple(name for name in BACKUPS[1:] if backup == "auto")
    return Pair(
        scripted(TARGET, blocks=1000),
        drafts[0],
        more_drafts=drafts[1:],
        backup="primary" if backup == "auto" else backup,
        others=others,  # type: ignore[arg-type]
        **options,
    )


def finish(
    pair: Pair, sequences: list[Sequence], backup: Backup | Auto, budget: int, start: int = 0
) -> list[list[int]]:
    """With `auto` another backup and budget in each round: whatever the control may decide."""
    if backup != "auto":
        return pair.finish(sequences)
    running, turns = list(sequences), itertools.cycle(BACKUPS[1:])
    for _ in range(start):
        next(turns)
    while running:
        name: Backup = next(turns)  # type: ignore[assignment]
        pair.verifier.setting = Setting("ssd", 8, budget + len(running) % 3, name)
        pair.step(running)
        for sequence in [s for s in running if s.finish_reason]:
            sequence.release()
            running.remove(sequence)
    pair.finish([])  # every block is back
    return [sequence.tokens[sequence.request.prompt_length :] for sequence in sequences]


def test_nothing_is_left_out() -> None:
    assert set(BACKUPS) == {*get_args(Auto), "primary", "defer", "ngram", "suffix", "random", "none"}


@pytest.mark.parametrize("backup", BACKUPS)
@settings(max_examples=2, deadline=None)
@given(
    requests=st.lists(st.tuples(params, prompts), min_size=1, max_size=2),
    k=st.integers(1, 4),
    budget=st.integers(0, 4),
    replicas=st.integers(1, 3),
    scale=st.sampled_from(SCALES),
    least=st.sampled_from(LEAST),
    ranked=st.sampled_from(RANKED),
)
def test_coupled_emits_plain_decodings_tokens(
    backup: Backup | Auto,
    requests: list[tuple],
    k: int,
    budget: int,
    replicas: int,
    scale: float,
    least: float,
    ranked: float | None,
) -> None:
    options = {"cache_aware": scale, "min_confidence": least, "least_probability": ranked}
    pair = roles(backup, replicas, lookahead=k, budget=budget, **options)
    sequences = [pair.sequence(prompt, p) for p, prompt in requests]
    plain = [Pair(scripted(TARGET), scripted(DRAFT)).run(prompt, p, "ar") for p, prompt in requests]
    assert finish(pair, sequences, backup, budget) == plain


@pytest.mark.parametrize("backup", BACKUPS)
def test_ratio_keeps_the_targets_law(backup: Backup | Auto) -> None:
    """Chi-square of the second and third token against the closed form, over all C, replicas and early ends."""
    law = np.array(TARGET, dtype=float) / 100
    joint = np.einsum("a,ab,bc->bc", law[0], law, law).ravel()
    seen: Counter[tuple[int, ...]] = Counter()
    batch = 14
    ways = list(zip(SCALES * 2, LEAST * 3, (1, 2, 3, 3, 1, 2)))  # each C with and without early ends
    for number, (scale, least, replicas) in enumerate(ways):
        options = {"cache_aware": scale, "min_confidence": least, "least_probability": RANKED[number % 3]}
        pair = roles(backup, replicas, rule="ratio", lookahead=2, budget=3, width=4, **options)
        seeds = range(number * batch, (number + 1) * batch)
        sequences = [pair.sequence([0, 4, 0], SamplingParams(max_tokens=3, seed=seed)) for seed in seeds]
        seen.update(tuple(tokens[1:]) for tokens in finish(pair, sequences, backup, 3, number))
    observed = np.array([seen[index] for index in np.ndindex(5, 5)])
    often = joint * seen.total() >= 5
    found, expected = ([*cells[often], cells[~often].sum()] for cells in (observed, joint * seen.total()))
    assert stats.chisquare(found, expected).pvalue > 1e-3
