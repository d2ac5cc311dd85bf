"""Hugging Face transformers, eager: `generate`, and assisted generation with the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from saguaro.bench.peers.peer import Answer, Arrivals, Method, Pair
from saguaro.engines.manifest import Manifest
from saguaro.orchestrator.types import Mode


@dataclass
class HuggingFace:
    pair: Pair
    threads: int
    dtype: str  # of torch
    modes: tuple[Mode, ...] = ("ar", "sd")
    _models: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        return f"transformers {self.dtype}"

    @property
    def precision(self) -> str:
        return f"{self.dtype} and {self.dtype}"

    @property
    def settings(self) -> str:
        return f"{self.threads} threads, eager, constant num_assistant_tokens, assistant_confidence_threshold 0"

    def missing(self) -> str | None:
        engines = {Manifest.load(engine).engine for engine in (self.pair.target, self.pair.draft)}
        return None if engines == {"pytorch"} else "needs a pair whose engines are both pytorch: others hold no weights"

    def version(self) -> str:
        return f"{version('transformers')}, torch {version('torch')}"

    def load(self, methods: Sequence[Method]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self.threads)
        for role, engine in (("target", self.pair.target), ("draft", self.pair.draft)):
            if role == "target" or any(method.lookahead for method in methods):
                model = AutoModelForCausalLM.from_pretrained(engine, dtype=self.dtype, local_files_only=True).eval()
                model.generation_config.eos_token_id = None  # answers have full length
                self._models[role] = model

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        import torch

        arrivals = _Streamer()
        options: dict[str, Any] = {}
        if method.lookahead:
            draft = options["assistant_model"] = self._models["draft"]
            draft.generation_config.num_assistant_tokens = method.lookahead
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0
        ids = torch.tensor([prompt])
        self._models["target"].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,  # of no use for one sequence, and asked for all the same
            streamer=arrivals,
            **options,
        )
        return arrivals.answer(len(arrivals.times) - 1 if method.lookahead else None)

    def close(self) -> None:
        self._models.clear()


class _Streamer(Arrivals):
    """What `generate` gives its tokens to: the prompt first, then those of each verification."""

    _prompt_came = False

    def put(self, value: Any) -> None:
        if self._prompt_came:
            self.add(value.flatten().tolist())
        self._prompt_came = True

    def end(self) -> None: ...
