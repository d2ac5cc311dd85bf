"""What an engine must be able to do to be measured beside others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from saguaro.orchestrator.types import Mode


@dataclass(frozen=True)
class Pair:
    """The weights that all decode with."""

    target: Path  # engine directories
    draft: Path
    target_gguf: Path | None  # the files they were built from, where these are GGUF
    draft_gguf: Path | None

    @property
    def quantisation(self) -> str:
        """Of the GGUF files, as their names end."""
        return " and ".join(
            path.stem.rpartition("-")[2].upper() for path in (self.target_gguf, self.draft_gguf) if path
        )

    def missing_for(self, package: str) -> str | None:
        """Why a peer that reads GGUF files with this package cannot run here, and what to do about it."""
        if find_spec(package) is None:
            return "not installed: pip install saguaro-serving[peers]"
        return None if self.target_gguf and self.draft_gguf else "needs a pair that was built from GGUF files"


@dataclass(frozen=True)
class Method:
    """`ar`: one token after the other. `sd`: with the draft model, whatever the peer calls it. `ssd`: Saguaro's."""

    mode: Mode
    lookahead: int = 0  # draft tokens per verification; 0 for ar

    def __str__(self) -> str:
        return f"{self.mode} K={self.lookahead}" if self.lookahead else self.mode


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    tokens_per_second: float | None  # of decoding: tokens after the first that came, over the time since then
    acceptance_length: float | None = None  # tokens per verification after the prompt's, where the peer tells


class Peer(Protocol):
    """An engine, with its options. It is made here, and loaded in a process of its own: it must be picklable before."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> tuple[Mode, ...]: ...

    @property
    def precision(self) -> str:
        """Of weights and arithmetic, in words."""

    @property
    def settings(self) -> str:
        """Threads and flags, in words."""

    def missing(self) -> str | None:
        """Why it cannot run here, and what to do about it."""

    def version(self) -> str: ...

    def load(self, methods: Sequence[Method]) -> None:
        """Get ready for these methods and no other."""

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Greedily, `max_tokens` tokens, the end of text ignored. Token ids in and out."""

    def close(self) -> None: ...


@dataclass
class Arrivals:
    """Tokens of one answer, noted as they come."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # seconds, of each arrival
    first: int = 0  # tokens that came first

    def add(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.times.append(time.perf_counter())
            self.token_ids += token_ids
            self.first = self.first or len(token_ids)

    def answer(self, verifications: int | None = None) -> Answer:
        """`verifications`: after the prompt's."""
        later, seconds = len(self.token_ids) - self.first, self.times[-1] - self.times[0]
        return Answer(
            tuple(self.token_ids),
            later / seconds if seconds > 0 else None,
            later / verifications if verifications else None,
        )
