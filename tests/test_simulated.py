"""The simulated engine: a draft is right as often as its profile says, and what is guessed hits as often."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from saguaro.build.driver import build
from saguaro.build.recipe import find_recipe, shipped_recipes
from saguaro.engines import load_engine
from saguaro.engines.base import causal_batch
from saguaro.engines.profile import Agreement, Profile
from saguaro.engines.simulated import SimulatedEngine
from saguaro.errors import ConfigError
from saguaro.orchestrator.config import find_deployment, read_deployment, shipped_deployments

ROWS = 20_000
FIRST = 3  # the ids below have a special meaning
SIZES = {"vocab_size": 500, "first": FIRST, "max_model_len": ROWS, "block_size": 16, "num_blocks": ROWS // 16}


def logits(profile: Profile) -> torch.Tensor:
    """Of one long sequence, [ROWS, V]."""
    engine = SimulatedEngine(profile, **SIZES)
    tokens = np.random.default_rng(0).integers(FIRST, 500, ROWS).tolist()
    return engine.forward(causal_batch([tokens], [0], [range(ROWS // 16)], [ROWS], 16)).logits


def close(measured: float, expected: float) -> None:
    """Within four standard deviations of that many trials."""
    assert abs(measured - expected) < 4 * (max(expected * (1 - expected), 1e-9) / ROWS) ** 0.5 + 1e-12


@pytest.mark.parametrize("agreement", [Agreement(0.8, 0.4, 0.6), Agreement(0.5, 1.0, 1.0), Agreement(0.0, 0.2, 0.3)])
def test_acceptance_and_misses_are_the_profile_s(agreement: Agreement) -> None:
    target = logits(Profile({1: 0.0})).argmax(1)
    order = logits(Profile({1: 0.0}, agreement)).argsort(1, descending=True)
    rank = (order == target[:, None]).int().argmax(1)  # of the target's token in the draft's list
    close(float((rank == 0).double().mean()), agreement.acceptance)
    rejected = 1 - agreement.acceptance
    for guesses in (1, 2, 3, 8, 20):
        missed = rejected * agreement.miss_scale * guesses**-agreement.miss_exponent
        close(float((rank > guesses).double().mean()), missed)  # rank 0 was sent, so the guesses are 1..F


def test_a_perfect_draft_is_the_target() -> None:
    assert torch.equal(logits(Profile({1: 0.0}, Agreement(1.0, 0.4, 0.6))), logits(Profile({1: 0.0})))


def test_tokens_depend_on_the_seed_and_are_never_special() -> None:
    one, other = logits(Profile({1: 0.0})), logits(Profile({1: 0.0}, seed=1))
    assert (one.argmax(1) == other.argmax(1)).double().mean() < 0.05
    assert one[:, :FIRST].max() < -20
    assert len(one.argmax(1).unique()) > 400


def test_forwards_take_the_time_of_their_rows() -> None:
    profile = Profile({1: 10.0, 5: 30.0, 9: 40.0})
    assert [profile.seconds(rows) for rows in (1, 3, 5, 9, 13)] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert Profile({4: 7.0}).seconds(100) == pytest.approx(0.007)
    engine = SimulatedEngine(profile, **SIZES)
    start = time.monotonic()
    outputs = [engine.forward(causal_batch([[5, 6, 7]], [0], [[0]], [1], 16)) for _ in range(2)]
    assert outputs[0].logits.shape == (1, 500)
    assert time.monotonic() - start >= 0.02
    assert outputs[1].logits.shape == (1, 500)  # one forward after the other
    assert time.monotonic() - start >= 0.04


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"forward_ms": {}}, "forward_ms"),
        ({"forward_ms": {2: 1.0, 1: 1.0}}, "fewest first"),
        ({"forward_ms": {1: -1.0}}, "0 or more"),
        ({"sharpness": 0.0}, "sharpness"),
    ],
)
def test_a_profile_that_means_nothing_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Profile(**({"forward_ms": {1: 1.0}} | change))  # type: ignore[arg-type]


def test_an_agreement_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="acceptance must be between 0 and 1, got 1.5"):
        Agreement(1.5, 0.4, 0.6)


def test_a_simulated_engine_is_built_and_loaded_like_any_other(tmp_path: Path) -> None:
    directory = build(find_recipe("simulated-llama-3.2-1b"), tmp_path, progress=False)
    engine = load_engine(directory, block_size=16, num_blocks=8, group=None)
    assert isinstance(engine, SimulatedEngine)
    batch = causal_batch([[5, 6]], [0], [[0]], [2], 16)
    profile = Profile.load(directory)
    expected = SimulatedEngine(profile, **(SIZES | {"max_model_len": 8192})).forward(batch).logits
    assert torch.equal(engine.forward(batch).logits, expected)


def test_the_shipped_pairs_share_what_they_must() -> None:
    for name in shipped_deployments():
        config = read_deployment(find_deployment(name))
        if config.target.recipe in shipped_recipes() and config.draft and name.startswith("simulated"):
            target, draft = (find_recipe(model.recipe).simulated for model in (config.target, config.draft))
            assert target is not None
            assert draft is not None
            assert target.profile.agreement is None
            assert draft.profile.agreement is not None
            assert (target.vocab_size, target.max_model_len, target.profile.seed) == (
                draft.vocab_size,
                draft.max_model_len,
                draft.profile.seed,
            )
