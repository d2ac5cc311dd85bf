"""What a replay says of a setting is what the running roles do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from harness import Pair
from saguaro.bench.replay import Figures, Ranked, Replay, Scored, Text, answer_logits, score
from saguaro.orchestrator.analysis import overall_hit_rate
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig
from saguaro.orchestrator.drafters.backups import text_drafter
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.types import RequestSampling, SamplingParams, TextBackup
from test_round import DRAFT, TARGET, scripted

V = len(TARGET)
PROMPT = [0, 4, 4, 0, 1, 4, 4]


def config(**options: Any) -> SpeculationConfig:
    fan_out = {"budget": 6, "policy": "uniform"} | options.pop("fan_out", {})
    return SpeculationConfig(**{"lookahead": 3, "width": V, "fan_out": FanOutConfig(**fan_out)} | options)


def running(speculation: SpeculationConfig, draft: Any = DRAFT) -> Pair:
    estimators = Estimators(speculation.prior)
    return Pair(
        scripted(TARGET, blocks=400, max_model_len=800),
        scripted(draft, blocks=800, max_model_len=800),
        rule=speculation.rule,
        lookahead=speculation.max_lookahead,
        budget=speculation.budgets()[-1],
        policy=speculation.policy(estimators),
        estimators=estimators,
        width=speculation.width,
        cache_aware=speculation.cache_aware,
        backup=speculation.backup,
    )


def scored(both: Pair, sequence: Any, rule: Any) -> Scored:
    prompt = sequence.request.prompt_length
    text = Text(tuple(sequence.tokens[:prompt]), tuple(sequence.tokens[prompt:]), sequence.request)
    return score(
        answer_logits(scripted(DRAFT, blocks=800, max_model_len=800), text),
        answer_logits(scripted(TARGET, blocks=800, max_model_len=800), text),
        text,
        rule,
        V,
    )


def replayed(speculation: SpeculationConfig) -> Replay:
    estimators = Estimators(speculation.prior)
    backup: TextBackup | None = None if speculation.backup == "primary" else speculation.backup
    return Replay(
        speculation.policy(estimators),
        estimators,
        lookahead=speculation.max_lookahead,
        budget=speculation.budgets()[-1],
        cache_aware=speculation.cache_aware,
        backup=text_drafter(backup, TokenMemory(800, 1), speculation.rule, range(V)) if backup else None,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lookahead": 5, "fan_out": {"policy": None, "counts": (2, 1, 1, 1, 0, 3)}},
        {"fan_out": {"policy": "auto", "budget": 5}},
        {"backup": "ngram"},
        {"backup": "suffix", "lookahead": 2},
        {"backup": "random"},
        {"backup": "none", "fan_out": {"policy": "geometric"}},
    ],
    ids=str,
)
def test_rounds_are_those_of_the_running_roles(options: dict[str, Any], temperature: float) -> None:
    """Hit, drafted and accepted, round for round, at temperature 0 and under `coupled`."""
    speculation = config(**options)
    both, replay = running(speculation), replayed(speculation)
    hits = set()
    for number in (1, 2):
        p = SamplingParams(temperature=temperature, seed=number, max_tokens=90)
        sequence = both.sequence(PROMPT[number:], p)
        both.finish([sequence])
        found = replay.play(scored(both, sequence, "coupled"), number, np.random.default_rng(0))
        expected = [(r.hit, r.drafted, r.accepted) for r in sequence.rounds[1:]]
        assert [(r.hit, r.drafted, r.accepted) for r in found] == expected[: len(found)]
        assert len(found) >= len(expected) - 3  # but the last ones, which the end of the text cuts short
        hits |= {r.hit for r in found}
    assert temperature == 0 or hits == {True, False}


@pytest.mark.parametrize("options", [{}, {"cache_aware": 0.3}, {"backup": "ngram"}], ids=str)
def test_ratio_has_the_law_of_the_running_roles(options: dict[str, Any]) -> None:
    """Acceptance, hit rate and tokens per round, within what chance leaves."""
    speculation = config(rule="ratio", **options)
    both, replay, draws = running(speculation), replayed(speculation), np.random.default_rng(1)
    ran, played = [], []
    for number in range(8):
        p = SamplingParams(temperature=1.0, seed=number, max_tokens=100)
        sequence = both.sequence(PROMPT, p)
        both.finish([sequence])
        ran.append(sequence.rounds[1:-2])
        texts = scored(both, sequence, "ratio")
        played += [replay.play(texts, number, draws) for _ in range(2)]
    found = Figures.of(played)
    rounds = [r for rows in ran for r in rows]
    assert found.hit_rate == pytest.approx(np.mean([bool(r.hit) for r in rounds]), abs=0.05)
    assert found.tokens_per_round == pytest.approx(np.mean([r.accepted + 1 for r in rounds]), abs=0.15)
    tried = sum(min(r.accepted + 1, r.drafted) for r in rounds)
    assert found.acceptance == pytest.approx(sum(r.accepted for r in rounds) / tried, abs=0.035)


def test_the_hit_rate_follows_from_those_after_a_hit_and_after_a_miss() -> None:
    """Theorem 7's chain, over 5000 rounds in which what follows a miss differs from what follows a hit."""
    draw = np.random.default_rng(0)
    length, width = 400, 6
    ids = np.tile(np.arange(width), (length, 1))
    request = RequestSampling(SamplingParams(temperature=0), 0, 1)
    player = replayed(config(backup="none", fan_out={"policy": None, "counts": (2, 1, 1, 1)}))
    hits: list[list[bool]] = []
    for number in range(50):
        place = draw.choice(width + 1, length, p=[0.7, 0.1, 0.06, 0.04, 0.04, 0.03, 0.03])
        text = Scored(Text((9,), tuple(place.tolist()), request), Ranked(ids, place))
        hits.append([r.hit for r in player.play(text, number, draw)])
    p_hit = np.mean([hit for row in hits for hit in row])
    assert sum(map(len, hits)) > 5000
    rates = [np.mean([now for row in hits for before, now in pairwise(row) if before == hit]) for hit in (True, False)]
    assert abs(rates[0] - rates[1]) > 0.05
    assert overall_hit_rate(*rates) == pytest.approx(p_hit, abs=0.02)


def test_resampling_all_texts_once_changes_nothing() -> None:
    replay = replayed(config())
    sequence = (both := running(config())).sequence(PROMPT, SamplingParams(temperature=1.0, seed=3, max_tokens=60))
    both.finish([sequence])
    figures = Figures.of([replay.play(scored(both, sequence, "coupled"), n, np.random.default_rng(0)) for n in (0, 1)])
    same = figures.resampled(np.ones((1, 2)))
    assert same.rounds.sum() == figures.rounds.sum()
    assert same.hit_rate.tolist() == [figures.hit_rate]
