"""A profile is found again in what a bench says of a pair that has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from saguaro.bench import fit_profile
from saguaro.bench.fit_profile import calibrated, fit, write
from saguaro.bench.speed import SpeedPlan
from saguaro.bench.speed_command import run_plan
from saguaro.build.recipe import read_recipe
from saguaro.engines.profile import Profile
from saguaro.errors import ConfigError
from saguaro.orchestrator.config import read_deployment

TARGET, DRAFT = Profile({1: 20.0, 33: 36.0}), Profile({1: 2.0, 41: 4.0})
ACCEPTANCE, SCALE, EXPONENT = 0.8, 0.45, 0.7
LOOKAHEAD, BRANCHES = 4, 10
CURVES = [
    {"speculation": "miss", "after": "rejection", "temperature": "<=0", "scale": 0.9, "exponent": 0.1},
    {"speculation": "hit", "after": "acceptance", "temperature": "<=0", "scale": 0.1, "exponent": 0.2},
    {"speculation": "hit", "after": "rejection", "temperature": "<=0", "scale": SCALE, "exponent": EXPONENT},
    {"speculation": "hit", "after": "rejection", "temperature": "<=1", "scale": 0.2, "exponent": 0.3},
]


def row(mode: str, lookahead: int, batch: int, host: float = 0.0, **changes: Any) -> dict[str, Any]:
    """As the bench would write it; `host` is what a round, and a draft step, cost beside the forward."""
    verify = TARGET.seconds(batch * (lookahead + 1)) * 1e3 + host
    step = DRAFT.seconds(batch) * 1e3 + host
    trunk = DRAFT.seconds(batch * (lookahead + 1)) * 1e3 + host
    prepared = trunk + lookahead * (DRAFT.seconds(batch * BRANCHES) * 1e3 + host)
    reached = [round(10_000 * ACCEPTANCE**place) for place in range(lookahead + 1)]
    figures = {
        "verify_ms": verify,
        "t_b": lookahead * step / verify if mode == "sd" else None,
        "t_p": prepared / verify if mode == "ssd" else None,
        "branches": float(BRANCHES) if mode == "ssd" else None,
        "drafted": [10_000] * lookahead,
        "accepted": reached[1:],
    }
    where = {"mode": mode, "lookahead": lookahead, "batch": batch, "temperature": 0.0, "placement": "own"}
    return where | figures | changes


def document(host: float = 0.0) -> dict[str, Any]:
    runs = [
        row(mode, lookahead, batch, host)
        for batch in (1, 2, 4)
        for mode, lookahead in (("ar", 0), ("sd", 2), ("sd", LOOKAHEAD), ("ssd", LOOKAHEAD))
    ]
    about = {"deployment": "pair", "machine": {"cpu": "some CPU"}, "command": "saguaro bench pair"}
    return {"runs": runs, "miss_curves": CURVES} | about


def test_a_known_profile_is_found_again() -> None:
    fitted = fit(document())
    for rows in (1, 4, 20):
        assert fitted.target.seconds(rows) == pytest.approx(TARGET.seconds(rows), rel=1e-3)
    for rows in (1, 10, 40):
        assert fitted.draft.seconds(rows) == pytest.approx(DRAFT.seconds(rows), rel=1e-3)
    assert fitted.draft.agreement is not None
    assert fitted.draft.agreement.acceptance == pytest.approx(ACCEPTANCE, abs=1e-3)
    assert (fitted.draft.agreement.miss_scale, fitted.draft.agreement.miss_exponent) == (SCALE, EXPONENT)
    assert fitted.acceptance == pytest.approx([ACCEPTANCE] * LOOKAHEAD, abs=1e-3)
    assert (fitted.lookahead, fitted.branches, fitted.batch) == (LOOKAHEAD, BRANCHES, 4)
    assert max(fitted.worst) < 1e-3


def test_what_a_round_costs_beside_its_forwards_is_taken_off_by_measuring_again() -> None:
    """The simulation of the first fit takes that cost twice, which tells how large it is."""
    first = fit(document(host=1.0))
    twice = fit(document(host=2.0))
    assert first.target.seconds(1) == pytest.approx(0.021)
    corrected = calibrated(first, twice)
    assert corrected.target.seconds(4) == pytest.approx(TARGET.seconds(4), rel=1e-3)
    assert corrected.draft.seconds(10) == pytest.approx(DRAFT.seconds(10), rel=1e-3)


def test_a_time_that_falls_with_rows_becomes_a_constant() -> None:
    changed = document()
    for each in changed["runs"]:
        each["verify_ms"] = 30.0 - each["batch"]
    fitted = fit(changed)
    assert fitted.target.seconds(1) == fitted.target.seconds(20) == pytest.approx(0.0277, rel=0.02)


def test_short_speculations_at_the_end_of_an_answer_do_not_lower_acceptance() -> None:
    changed = document()
    for each in changed["runs"]:
        # Half of the speculations end after their first token, accepted or not.
        each["drafted"] = [10_000, *[5_000] * (each["lookahead"] - 1)] if each["lookahead"] else []
        each["accepted"] = [round(n * ACCEPTANCE ** (i + 1)) for i, n in enumerate(each["drafted"])]
    assert fit(changed).acceptance == pytest.approx([ACCEPTANCE] * LOOKAHEAD, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runs": [row("ar", 0, 1)]}, "measure all three"),
        ({"runs": [row("sd", 4, 1), row("ssd", 4, 1, temperature=1.0)]}, "at --temperature 0"),
        ({"miss_curves": []}, "no miss curve"),
        ({"runs": [row(mode, 4, 1, drafted=[0] * 4) for mode in ("sd", "ssd")]}, "no draft token was verified"),
    ],
)
def test_a_bench_that_says_too_little_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(document() | change)


def test_a_simulated_pair_is_measured_fitted_and_runs(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreement = {"acceptance": 0.7, "miss_scale": 0.5, "miss_exponent": 0.8}
    path = write(fit(document()), tmp_path / "known", document())
    for role, more in (("target", {}), ("draft", {"agreement": agreement})):
        recipe = {"name": role, "engine": "simulated", "simulated": {"profile": {"forward_ms": {1: 0.0}} | more}}
        (path.parent / f"{role}.yaml").write_text(yaml.safe_dump(recipe))
    plan = SpeedPlan(
        {"any": tuple("abcdefgh")}, LOOKAHEAD, modes=("sd", "ssd"), batches=(8,), max_tokens=200, repeats=1
    )
    found, runs, _ = run_plan(read_deployment(path), path, tmp_path, plan, lambda text: None)
    assert [run.setting.mode for run in runs] == ["sd", "ssd"]
    source = tmp_path / "bench.json"
    source.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["fit_profile", str(source), "--out", str(tmp_path / "fitted")])
    fit_profile.main()
    assert json.loads(capsys.readouterr().out)["lookahead"] == LOOKAHEAD
    draft = read_recipe(tmp_path / "fitted" / "draft.yaml").simulated
    assert draft is not None
    assert draft.profile.agreement is not None
    trials = sum(found["runs"][0]["drafted"]) + sum(found["runs"][1]["drafted"])
    assert draft.profile.agreement.acceptance == pytest.approx(0.7, abs=4 * (0.21 / trials) ** 0.5 + 0.01)
    ssd, curve, guesses = found["runs"][1], draft.profile.agreement, np.arange(1, 4)
    rejected = ssd["p_hit"] * (ssd["drafted"][0] - ssd["accepted"][-1])  # after a hit
    fitted = curve.miss_scale * guesses**-curve.miss_exponent
    assert fitted == pytest.approx(0.5 * guesses**-0.8, abs=4 * (0.25 / rejected) ** 0.5)
    deployment = tmp_path / "fitted" / "deployment.yaml"
    again, _, _ = run_plan(
        read_deployment(deployment),
        deployment,
        tmp_path,
        SpeedPlan({"any": ("one",)}, LOOKAHEAD, modes=("ssd",), max_tokens=20, repeats=1),
        lambda text: None,
    )
    assert again["runs"][0]["acceptance_length"] > 1
