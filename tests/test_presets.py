"""Related systems as presets: what each name stands for, and that none of them changes what is said."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness import Pair
from oracles import Drafter, assert_lossless_over_cache, assert_lossless_over_texts, drawn, nothing, pointed, pruned
from saguaro.errors import ConfigError
from saguaro.llm import LLM
from saguaro.orchestrator.config import SpeculationConfig, read_deployment
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import Situation
from saguaro.orchestrator.presets import NAMES, PRESETS, Preset
from saguaro.orchestrator.protocol import Step
from saguaro.orchestrator.round_control import RoundControl
from saguaro.orchestrator.sampling import accept_ratio
from saguaro.orchestrator.types import Backup, Outcome, SamplingParams
from test_drafters import of_text
from test_losslessness import V, random_table, scaled_table, truncated_table
from test_round import DRAFT, TARGET, params, prompts, scripted

DEPLOYMENT = "name: mine\ntarget:\n  recipe: tiny-target\n  kv_tokens: 4096\ndraft:\n  recipe: tiny-draft\n"
SCALES = (1.0, 0.5, 0.1)


def speculation(folder: Path, text: str) -> SpeculationConfig:
    path = folder / "mine.yaml"
    path.write_text(f"{DEPLOYMENT}speculation: {{{text}}}\n")
    return read_deployment(path).speculation


def pair(config: SpeculationConfig, **options: Any) -> Pair:
    """The roles as a deployment of this section would have them, over scripted models."""
    estimators = Estimators(config.prior)
    return Pair(
        scripted(TARGET, blocks=1000),
        scripted(DRAFT, blocks=3000),
        rule=config.rule,
        lookahead=config.max_lookahead,
        budget=config.budgets()[-1],
        policy=config.policy(estimators),
        estimators=estimators,
        width=config.width,
        cache_aware=config.cache_aware,
        min_confidence=config.min_confidence,
        backup=config.backup,
        **options,
    )


# What they are


def test_every_preset_is_described() -> None:
    assert set(PRESETS) == set(NAMES)
    text = (Path(__file__).parents[1] / "docs" / "presets.md").read_text()
    assert all(f"## `{name}`" in text for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_what_its_keys_are(name: Preset, tmp_path: Path) -> None:
    written = "".join(f", {key}: {str(value).replace(chr(39), '')}" for key, value in PRESETS[name].items())
    by_name, by_hand = speculation(tmp_path, f"preset: {name}"), speculation(tmp_path, f"preset: {name}{written}")
    assert by_name == by_hand
    assert by_name != SpeculationConfig(preset=name)


def test_a_key_beside_a_preset_wins(tmp_path: Path) -> None:
    assert speculation(tmp_path, "preset: pearl").backup == "none"
    mine = speculation(tmp_path, "preset: pearl, backup: primary, lookahead: 7, fan_out: {policy: uniform, budget: 3}")
    assert (mine.backup, mine.max_lookahead, mine.fan_out.counts, mine.budgets()[-1]) == ("primary", 7, None, 3)
    assert mine.mode == "ssd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: perl", r"speculation\.preset: must be .*sd, pearl, .*suffix.*did you mean pearl\?"),
        ("preset: 3", r"speculation\.preset: must be"),
        ("preset: pearl, lookahed: 3", r"speculation\.lookahed: unknown key \(did you mean lookahead\?\)"),
        ("preset: pearl, fan_out: {counts: [0, 1], policy: auto}", "policy must be left out beside `counts`"),
    ],
)
def test_what_is_no_preset_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        speculation(tmp_path, text)


def test_where_each_preset_guesses(tmp_path: Path) -> None:
    for name in NAMES:
        config = speculation(tmp_path, f"preset: {name}, lookahead: 5")
        policy = config.policy(Estimators(config.prior))
        budget = config.budgets()[-1] if config.mode == "ssd" else 0
        for hit in (True, False):
            counts = policy(budget, 5, Situation(hit)).counts
            if name in ("pearl", "amusd"):
                assert counts == (0, 0, 0, 0, 0, 1)
            elif name == "specbranch":
                assert counts == (0, 0, 0, 0, 0, 4)
            elif name == "swiftspec":
                assert min(counts) >= 1
            else:
                assert sum(counts) == 0
        assert policy(budget, 0, Situation()).branches == min(budget, {"specbranch": 4, "swiftspec": 8}.get(name, 1))


@pytest.mark.parametrize("name", ["amusd", "pearl"])
def test_all_accepted_is_the_only_hit(name: str, tmp_path: Path) -> None:
    """A hit needs full acceptance of the round before it. After a miss PEARL verifies nothing, AMUSD drafts anew."""
    both = pair(speculation(tmp_path, f"preset: {name}, lookahead: 2"))
    sequence = both.sequence([0], SamplingParams(temperature=1.0, seed=1, max_tokens=150))
    both.finish([sequence])
    seen: Counter[Any] = Counter()
    for before, now in zip(sequence.rounds[1:], sequence.rounds[2:-1]):
        whole = before.accepted == before.drafted
        assert whole or not now.hit
        assert now.drafted == (2 if now.hit or name == "amusd" else 0)
        seen[now.hit, whole] += 1
    assert min(seen[True, True], seen[False, True], seen[False, False]) > 3


@pytest.mark.parametrize("name", ["pearl", "amusd", "specbranch", "swiftspec"])
def test_its_length_follows_what_is_measured(name: str, tmp_path: Path) -> None:
    """As the original's does. A quick draft has longer speculations than a slow one, and T_p stays below 1."""
    config = speculation(tmp_path, f"preset: {name}")
    chosen = []
    for step in (30, 120):  # of a draft's forward, in thousandths of the target's
        control = RoundControl(config, max_budget=8, verify_steps=[Step(1, 10**9), Step(16, 10**9)])
        control.draft(True, [Step(rows, step * 10**6) for rows in (1, 4, 16)])
        setting = control.setting(1)
        assert (setting.mode, setting.budget) == ("ssd", {"pearl": 1, "amusd": 1, "specbranch": 4}.get(name, 8))
        chosen.append(setting.lookahead)
    assert chosen[0] > chosen[1] > 1
    assert chosen[1] * 0.12 <= 1


def test_the_branch_point_of_specbranch_is_where_the_draft_is_unsure(tmp_path: Path) -> None:
    """After 0, 2 and 4 its best token has 0.4 or more: with 0.45 it stops before others, and branches there."""
    config = replace(speculation(tmp_path, "preset: specbranch, lookahead: 6"), min_confidence=0.45)
    both = pair(config)
    sequence = both.sequence([0], SamplingParams(temperature=1.0, seed=1, max_tokens=150))
    both.finish([sequence])
    assert len({record.drafted for record in sequence.rounds[1:-1]}) > 2
    for before, now in zip(sequence.rounds[1:], sequence.rounds[2:-1]):
        assert before.accepted == before.drafted or not now.hit  # it branches at the end alone, wherever that is


# Losslessness, by enumeration: the rule `ratio` over two rounds, hit and miss


def tables(rng: random.Random) -> tuple[Any, Any]:
    return random_table(rng), random_table(rng)


def drafters(config: SpeculationConfig, table: Any, lookahead: int) -> tuple[Drafter, Drafter]:
    """What the draft model and the backup may come up with: every path, and what it was drawn from."""
    scaled = scaled_table(truncated_table(table, min(config.width, V)), 1, Fraction(str(config.cache_aware)))
    model = pointed(table, lookahead) if config.width == 1 else drawn(scaled, lookahead)
    if config.min_confidence:
        model = pruned(scaled, lookahead, Fraction(str(config.min_confidence)))
    return model, {"primary": model, "none": nothing}[config.backup]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["pearl", "amusd", "specbranch", "swiftspec"])
def test_ratio_emits_the_targets_law_with_every_preset(name: str, scale: float, tmp_path: Path) -> None:
    config = speculation(tmp_path, f"preset: {name}, lookahead: 2, rule: ratio, cache_aware: {scale}")
    rng = random.Random(f"{name}{scale}")
    for _ in range(2):
        target, table = tables(rng)
        model, backup = drafters(config, table, 2)
        branch, _ = drafters(config, table, 1)
        counts = config.policy(Estimators(config.prior))(config.budgets()[-1], 2, Situation()).counts
        guessed = [Outcome(k, x) for k, count in enumerate(counts) for x in rng.sample(range(V), min(count, V))]
        assert_lossless_over_cache(
            accept_ratio, target, model, [guessed, ()], branch=branch, backup=backup, last=rng.randrange(V)
        )


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix"])
def test_ratio_emits_the_targets_law_when_the_text_drafts(name: str, tmp_path: Path) -> None:
    backup: Backup = speculation(tmp_path, f"preset: {name}").backup
    rng = random.Random(name)
    text = tuple(rng.randrange(V) for _ in range(6))
    assert_lossless_over_texts(
        accept_ratio, random_table(rng), text, [()], primary=of_text(backup, 2), backup=of_text(backup, 2)
    )


# Losslessness, end to end


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(p=params, prompt=prompts, k=st.integers(1, 5))
def test_coupled_emits_plain_decodings_tokens(
    name: str, p: SamplingParams, prompt: list[int], k: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = speculation(tmp_path_factory.getbasetemp(), f"preset: {name}, lookahead: {k}")
    assert pair(config).run(prompt, p, config.mode) == pair(config).run(prompt, p, "ar")


@pytest.mark.parametrize(("name", "scale"), [*((name, 1.0) for name in NAMES), ("sd", 0.1), ("amusd", 0.1)])
def test_ratio_keeps_the_targets_law_in_the_running_roles(name: str, scale: float, tmp_path: Path) -> None:
    """Chi-square of three tokens against the closed form, fixed seeds; what is too rare for it is one cell."""
    config = speculation(tmp_path, f"preset: {name}, lookahead: 2, rule: ratio, width: 4, cache_aware: {scale}")
    count, batch = 300, 60
    law = np.array(TARGET, dtype=float) / 100
    joint = np.einsum("a,ab,bc->abc", law[0], law, law).ravel()
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, batch):
        both = pair(config)
        sequences = [
            both.sequence([0, 4, 0], SamplingParams(max_tokens=3, seed=start + i), config.mode) for i in range(batch)
        ]
        seen.update(tuple(tokens) for tokens in both.finish(sequences))
    observed = np.array([seen[(a, b, c)] for a in range(5) for b in range(5) for c in range(5)])
    often = joint * count >= 5
    found, expected = ([*cells[often], cells[~often].sum()] for cells in (observed, joint * count))
    assert stats.chisquare(found, expected).pvalue > 1e-4


def test_a_text_preset_loads_no_draft_model(store: Path, tmp_path: Path, nothing_left: None) -> None:
    """A deployment whose draft names the target's recipe, at the cost of no model: ar's text, and drafts accepted."""
    path = tmp_path / "lookup.yaml"
    path.write_text(DEPLOYMENT.replace("tiny-draft", "tiny-target") + "speculation: {preset: prompt-lookup}\n")
    with LLM(str(path), store=store) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        plain, drafted = (llm.generate("a b a b a b a b", params, mode=mode)[0] for mode in ("ar", "sd"))
    assert plain.token_ids == drafted.token_ids
    assert drafted.stats.draft_tokens > 0
    assert drafted.stats.accepted_draft_tokens > 0
