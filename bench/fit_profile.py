"""A simulated pair that behaves like a measured one: recipes for target and draft from what `saguaro bench` found.

python -m saguaro.bench.fit_profile BENCH_JSON --out DIR [--again BENCH_JSON]
python -m saguaro.bench.fit_profile DEPLOYMENT --out DIR

Times of a forward are straight lines over its rows, by least squares over all settings. They hold what a round costs
beside its forwards too, and the simulation adds that once more; so the simulated pair is measured in the same way
(`--again`; done at once for a deployment), and what it takes longer than the real one is taken off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from saguaro.bench.speed import SpeedPlan, prompts_by_kind
from saguaro.bench.speed_command import run_plan
from saguaro.engines.profile import Agreement, Profile
from saguaro.errors import ConfigError, SaguaroError
from saguaro.orchestrator.config import find_deployment, read_deployment

_BATCHES = (1, 2, 4)
_SHORT, _LONG = 1, 2  # lookaheads of sd beside the deployment's, for a deployment that is measured here

Row = Mapping[str, Any]  # of `runs` in bench.json


@dataclass(frozen=True)
class Line:
    """Milliseconds by rows."""

    base: float
    slope: float
    most: int  # rows that were measured
    worst: float  # relative distance of a measured time from the line

    def profile_times(self) -> dict[int, float]:
        ends = dict.fromkeys((1, max(1, self.most)))
        return {rows: round(self.base + self.slope * rows, 4) for rows in ends}


@dataclass(frozen=True)
class Fitted:
    """`acceptance` is of each place of a speculation, given that those before were accepted; the draft has the mean."""

    target: Profile
    draft: Profile
    acceptance: tuple[float, ...]
    worst: tuple[float, float]  # relative distance of a time from the line: target, draft
    lookahead: int
    branches: int
    batch: int


def fit(document: Mapping[str, Any]) -> Fitted:
    """From greedy runs of bench.json. Raises ConfigError where they do not say enough."""
    first = document["runs"][0]["placement"]
    rows = [row for row in document["runs"] if row["temperature"] == 0 and row["placement"] == first]
    ssd = [row for row in rows if row["mode"] == "ssd" and row["branches"] and row["t_p"]]
    if not ssd or not any(row["mode"] == "sd" and row["t_b"] for row in rows):
        raise ConfigError("a profile is fitted to greedy runs of ar, sd and ssd: measure all three at --temperature 0")
    target = _line([([1, _verified(row)], row["verify_ms"], _verified(row)) for row in rows])
    draft = _line([step for row in rows if row["mode"] != "ar" for step in _draft_steps(row)])
    acceptance, mean = _acceptance(rows)
    scale, exponent = _miss_curve(document["miss_curves"])
    agreement = Agreement(round(mean, 4), round(scale, 4), round(exponent, 4))
    return Fitted(
        Profile(target.profile_times()),
        Profile(draft.profile_times(), agreement),
        acceptance,
        (target.worst, draft.worst),
        lookahead=max(row["lookahead"] for row in ssd),
        branches=max(1, round(max(row["branches"] for row in ssd))),
        batch=max(row["batch"] for row in rows),
    )


def calibrated(fitted: Fitted, again: Fitted) -> Fitted:
    """`again` is fitted to the simulation of `fitted`: what came on top there is taken off."""

    def corrected(profile: Profile, measured: Profile) -> Profile:
        times = {
            rows: round(max(0.0, 2 * ms - measured.seconds(rows) * 1e3), 4) for rows, ms in profile.forward_ms.items()
        }
        return replace(profile, forward_ms=times)

    return replace(fitted, target=corrected(fitted.target, again.target), draft=corrected(fitted.draft, again.draft))


def write(fitted: Fitted, folder: Path, document: Mapping[str, Any]) -> Path:
    """target.yaml, draft.yaml and deployment.yaml, whose path is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    cpu, name = document["machine"]["cpu"], document["deployment"]
    for role, profile, worst in zip(("target", "draft"), (fitted.target, fitted.draft), fitted.worst, strict=True):
        said = f"The {role} of {name}: `{document['command']}` on {cpu}. Times lie within {worst:.0%} of the line."
        if profile.agreement:
            said += f" Acceptance by place: {' '.join(f'{a:.3f}' for a in fitted.acceptance)}."
        kept = {key: value for key, value in asdict(profile).items() if value is not None}
        recipe = {"name": f"{name}-{role}", "engine": "simulated", "simulated": {"profile": kept}}
        (folder / f"{role}.yaml").write_text(f"# {said}\n{yaml.safe_dump(recipe, sort_keys=False)}", encoding="utf-8")
    deployment = {
        "name": f"simulated-{name}",
        "target": {"recipe": "target.yaml", "kv_tokens": 65536},
        "draft": {"recipe": "draft.yaml", "kv_tokens": 262144},
        "speculation": {"lookahead": fitted.lookahead, "fan_out": {"budget": fitted.branches}},
        "serving": {"max_sequences": fitted.batch, "max_batch_tokens": 4096},
    }
    path = folder / "deployment.yaml"
    path.write_text(f"# {name}, simulated.\n{yaml.safe_dump(deployment, sort_keys=False)}", encoding="utf-8")
    return path


def fit_deployment(deployment: str, store: Path, folder: Path, *, max_tokens: int = 96) -> Fitted:
    """Measure it, fit, measure the simulation, correct, and write."""
    path = find_deployment(deployment)
    document = _measured(path, store, max_tokens)
    fitted = fit(document)
    simulation = _measured(write(fitted, folder, document), store, max_tokens)
    fitted = calibrated(fitted, fit(simulation))
    write(fitted, folder, document)
    return fitted


def _measured(path: Path, store: Path, max_tokens: int) -> dict[str, Any]:
    config = read_deployment(path)
    lookahead = config.speculation.max_lookahead
    plan = SpeedPlan(
        prompts_by_kind(1),
        lookahead,
        sd_lookaheads=tuple(dict.fromkeys((_SHORT, _LONG, lookahead))),
        batches=_BATCHES,
        max_tokens=max_tokens,
        repeats=1,
    )
    document, _, _ = run_plan(config, path, store, plan, lambda text: None)
    return document


def _verified(row: Row) -> int:
    """Rows of a verification."""
    return int(row["batch"] * (row["lookahead"] + 1))


def _draft_steps(row: Row) -> list[tuple[list[float], float, float]]:
    """Coefficients of base and slope, milliseconds, most rows: K steps in turn for sd; the trunk and K steps of all
    branches for ssd. How many rows drafted after a miss is not known there."""
    lookahead, batch = row["lookahead"], row["batch"]
    if row["mode"] == "sd":
        return [([lookahead, lookahead * batch], row["t_b"] * row["verify_ms"], batch)] if row["t_b"] else []
    if not row["branches"]:
        return []
    branches = batch * row["branches"]
    rows = _verified(row) + lookahead * branches
    return [([1 + lookahead, rows], row["t_p"] * row["verify_ms"], max(_verified(row), branches))]


def _line(equations: Sequence[tuple[Sequence[float], float, float]]) -> Line:
    """Base and slope by least squares of relative errors, neither below 0."""
    times = np.array([ms for _, ms, _ in equations])
    weighted = np.array([coefficients for coefficients, _, _ in equations]) / times[:, None]
    ones = np.ones(len(times))
    candidates = [np.linalg.lstsq(weighted, ones, rcond=None)[0]]
    candidates += [np.array([np.linalg.lstsq(weighted[:, :1], ones, rcond=None)[0][0], 0.0])]
    candidates += [np.array([0.0, np.linalg.lstsq(weighted[:, 1:], ones, rcond=None)[0][0]])]
    best = min((c for c in candidates if (c >= 0).all()), key=lambda c: float(((weighted @ c - 1) ** 2).sum()))
    worst = float(np.abs(weighted @ best - 1).max())
    return Line(float(best[0]), float(best[1]), round(max(most for _, _, most in equations)), worst)


def _acceptance(rows: Sequence[Row]) -> tuple[tuple[float, ...], float]:
    """By place, and that of all: accepted tokens over tokens that were looked at."""
    places = max(len(row["accepted"]) for row in rows)
    looked_at, accepted = np.zeros(places), np.zeros(places)
    for row in rows:
        count = len(row["accepted"])
        if not count or not row["drafted"][0]:
            continue
        drafted, counted = np.array(row["drafted"], float), np.array(row["accepted"], float)
        # Speculations are shorter at the end of an answer: only those that reach a place are tried there.
        reaching = counted[:-1] * drafted[1:] / np.maximum(drafted[:-1], 1)
        looked_at[:count] += np.append(drafted[0], reaching)
        accepted[:count] += counted
    if not looked_at.sum():
        raise ConfigError("no draft token was verified: measure longer answers (--max-tokens)")
    by_place = accepted / np.maximum(looked_at, 1e-9)
    return tuple(by_place.tolist()), min(1.0, float(accepted.sum() / looked_at.sum()))


def _miss_curve(curves: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """c and r after a rejection of what was prepared, else of what the backup drafted."""
    found = [c for c in curves if c["after"] == "rejection" and c["temperature"] == "<=0"]
    if not found:
        raise ConfigError("no miss curve was measured: it takes some dozen rejections; measure longer answers")
    best = min(found, key=lambda curve: curve["speculation"] != "hit")
    return min(1.0, best["scale"]), min(10.0, max(0.01, best["exponent"]))


def main() -> None:
    from saguaro.cache import cache_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="BENCH_JSON|DEPLOYMENT")
    parser.add_argument("--again", type=Path, metavar="BENCH_JSON", help="of the pair that was fitted to the first")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer, of a deployment (default 96)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    try:
        if arguments.source.endswith(".json"):
            document = json.loads(Path(arguments.source).read_text(encoding="utf-8"))
            fitted = fit(document)
            if arguments.again:
                fitted = calibrated(fitted, fit(json.loads(arguments.again.read_text(encoding="utf-8"))))
            write(fitted, arguments.out, document)
        else:
            fitted = fit_deployment(arguments.source, cache_folder(), arguments.out, max_tokens=arguments.max_tokens)
    except SaguaroError as error:
        parser.exit(1, f"{error}\n")
    Console().print_json(data=asdict(fitted))


if __name__ == "__main__":
    main()
