"""Answers of a pair, with what both models think at each position, in a file: recorded once, replayed at will.

Only what a replay looks at is kept: of the draft's ranking the tokens down to the answer's own, and under `ratio` the
probabilities, six digits of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saguaro.bench.replay import Ranked, Scored, Text, Weighed
from saguaro.bench.speed_command import about
from saguaro.bench.tune import Progress
from saguaro.bench.tune_command import TunePlan, score_answers
from saguaro.errors import ConfigError
from saguaro.llm import anchored, build_engines
from saguaro.orchestrator.config import find_deployment, read_deployment
from saguaro.orchestrator.types import RequestSampling, Rule, SamplingParams

_ABSENT = -1  # in place of tokens that no replay asks for


def record(deployment: str, store: Path, plan: TunePlan, progress: Progress) -> dict[float, dict[str, Any]]:
    """A document for each temperature of the plan; all its prompts are answered, however long it takes."""
    path = find_deployment(deployment)
    config = anchored(read_deployment(path), path)
    target, draft = build_engines(config, path, store)
    if draft is None:
        raise ConfigError(f"{path} has no draft: there is nothing to replay in plain decoding")
    found, engines, _ = score_answers(config, (target, draft), store, plan, time.monotonic(), progress)
    width = found[0][0]["coupled"].ranked.ids.shape[1]
    known = about(config.name)
    common = {key: known[key] for key in ("deployment", "machine", "versions")}
    common |= {"width": width, "vocab_size": engines[1].vocab_size}
    return {
        temperature: common | {"temperature": temperature, "answers": [pack(scores) for scores in scored]}
        for temperature, scored in zip(plan.temperatures, found, strict=True)
    }


def load(path: Path) -> tuple[list[dict[Rule, Scored]], dict[str, Any]]:
    """The answers of one temperature, and the document without them. Raises ConfigError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        width, temperature = document["width"], document["temperature"]
        answers = [unpack(answer, temperature, width) for answer in document.pop("answers")]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no file of recorded answers ({error!r}): delete it to record again") from error
    return answers, document


def pack(scores: Mapping[Rule, Scored]) -> dict[str, Any]:
    """As JSON."""
    text = scores["coupled"].text
    rules = {}
    for rule, scored in scores.items():
        ids, place = scored.ranked.ids, scored.ranked.place.tolist()
        width = ids.shape[1]
        rules[rule] = {
            "place": place,
            "ids": [row[: at + 1 if at < width else 1].tolist() for row, at in zip(ids, place)],
        }
        if weighed := scored.weighed:
            likely = [int(max(np.flatnonzero(q), default=0)) + 1 for q in np.round(weighed.q, 6)]
            rules[rule] |= {
                "q": [row[:n].round(6).tolist() for row, n in zip(weighed.q, likely)],
                "p": [row[:n].round(6).tolist() for row, n in zip(weighed.p, likely)],
                "p_token": weighed.p_token.round(6).tolist(),
            }
    return {"seed": text.request.seed, "prompt": text.prompt, "answer": text.answer, "rules": rules}


def unpack(answer: Mapping[str, Any], temperature: float, width: int) -> dict[Rule, Scored]:
    """What `pack` made; what was left out of it is absent, or has no probability."""
    prompt, tokens, seed = tuple(answer["prompt"]), tuple(answer["answer"]), answer["seed"]
    params = replace(SamplingParams(temperature=temperature, seed=seed), max_tokens=len(tokens))
    text = Text(prompt, tokens, RequestSampling(params, seed, len(prompt)))
    found: dict[Rule, Scored] = {}
    for rule, part in answer["rules"].items():
        ranked = Ranked(_filled(part["ids"], width, _ABSENT, np.int64), np.array(part["place"], dtype=np.int64))
        weighed = None
        if "q" in part:
            q, p = (_filled(part[name], width, 0.0, np.float64) for name in ("q", "p"))
            weighed = Weighed(q / q.sum(1, keepdims=True), p, np.array(part["p_token"]))
        found[rule] = Scored(text, ranked, weighed)
    return found


def _filled(rows: Sequence[Sequence[float]], width: int, value: float, dtype: type) -> NDArray[Any]:
    array: NDArray[Any] = np.full((len(rows), width), value, dtype)
    for row, known in zip(array, rows):
        row[: len(known)] = known
    return array
