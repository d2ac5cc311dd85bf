"""An engine that is as fast as it is told to be. Its process really starts, so that it is found by its module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.bench.peers.peer import Answer, Method
from saguaro.orchestrator.types import Mode


@dataclass
class FakePeer:
    name: str = "fake"
    modes: tuple[Mode, ...] = ("ar", "sd")
    precision: str = "exact"
    settings: str = "none"
    why_missing: str | None = None
    fails: str = ""  # "load", "generate", "dies", "short"

    def missing(self) -> str | None:
        return self.why_missing

    def version(self) -> str:
        return "1"

    def load(self, methods: Sequence[Method]) -> None:
        self.methods = list(methods)
        if self.fails == "load":
            raise ValueError("no such weights")

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Its process as the first token, then the prompt's sum, counted on; speed is 1 and K."""
        assert method in self.methods
        if self.fails == "generate":
            raise ValueError("no such token")
        if self.fails == "dies":
            os._exit(3)
        os.write(1, b"libraries print what they like\n")
        tokens = [os.getpid(), *range(sum(prompt), sum(prompt) + max_tokens - 1)]
        return Answer(tuple(tokens[: max_tokens - (self.fails == "short")]), 1.0 + method.lookahead)

    def close(self) -> None: ...
