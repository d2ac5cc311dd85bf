"""Saguaro itself: a deployment, with its two models on cores of their own or on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import saguaro
from saguaro.bench.peers.peer import Answer, Method
from saguaro.bench.speed import Placement, SpeedPlan
from saguaro.bench.speed_command import placed
from saguaro.engines.manifest import Manifest
from saguaro.llm import LLM, build_engines
from saguaro.orchestrator.config import find_deployment, read_deployment
from saguaro.orchestrator.types import MODES, Mode, SamplingParams


@dataclass
class Saguaro:
    deployment: str
    placement: Placement
    store: Path
    modes: tuple[Mode, ...] = MODES
    _llm: LLM | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"saguaro {Path(self.deployment).stem} ({self.placement})"

    @property
    def precision(self) -> str:
        path = find_deployment(self.deployment)
        target, draft = build_engines(read_deployment(path), path, self.store)
        return " and ".join(Manifest.load(engine).dtype for engine in (target, draft) if engine)

    @property
    def settings(self) -> str:
        return "each model on cores of its own" if self.placement == "own" else "both models on all cores"

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return saguaro.__version__

    def load(self, methods: Sequence[Method]) -> None:
        path = find_deployment(self.deployment)
        room = SpeedPlan({"of the plan": ("any",)}, max(method.lookahead for method in methods))
        self._llm = LLM(placed(read_deployment(path), self.placement, room, path), store=self.store)

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        assert self._llm is not None
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        result = self._llm.generate([prompt], params, mode=method.mode, lookahead=method.lookahead or None)[0]
        accepted = result.stats.acceptance_length if method.mode != "ar" else None
        return Answer(tuple(result.token_ids), result.stats.tokens_per_second, accepted)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
