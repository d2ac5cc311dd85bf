"""llama.cpp: its server as the package `xllamacpp` carries it, in this process, spoken to over its loopback port."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from saguaro.bench.peers.peer import Answer, Arrivals, Method, Pair
from saguaro.errors import EngineError
from saguaro.orchestrator.types import Mode

_ANSWER_S = 600.0  # between two pieces of an answer
_CONTEXT = 2048  # tokens


@dataclass
class LlamaCpp:
    pair: Pair
    threads: int
    modes: tuple[Mode, ...] = ("ar", "sd")
    _servers: dict[Method, Any] = field(default_factory=dict, init=False)  # the lookahead is of a server, not a request

    @property
    def name(self) -> str:
        return "llama.cpp"

    @property
    def precision(self) -> str:
        return self.pair.quantisation

    @property
    def settings(self) -> str:
        from xllamacpp import get_system_info

        return f"{self.threads} threads for each model, draft p_min 0 and n_min 0; {get_system_info().strip(' |')}"

    def missing(self) -> str | None:
        return self.pair.missing_for("xllamacpp")

    def version(self) -> str:
        return f"xllamacpp {version('xllamacpp')}"

    def load(self, methods: Sequence[Method]) -> None:
        import xllamacpp as llama

        for method in methods:
            params = llama.CommonParams()
            params.model.path = str(self.pair.target_gguf)
            params.n_ctx, params.n_parallel = _CONTEXT, 1
            cpus = [params.cpuparams, params.cpuparams_batch]
            if method.lookahead:
                draft = params.speculative.draft
                params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
                draft.mparams.path = str(self.pair.draft_gguf)
                draft.n_min, draft.n_max, draft.p_min = 0, method.lookahead, 0.0
                cpus += [draft.cpuparams, draft.cpuparams_batch]
            for cpu in cpus:
                cpu.n_threads = self.threads
            self._servers[method] = llama.Server(params)

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        request = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        arrivals = Arrivals()
        timings: dict[str, Any] = {}
        for piece in _stream(self._servers[method].listening_address, request):
            arrivals.add(piece.get("tokens", ()))
            timings = piece.get("timings", timings)
        return arrivals.answer(max_tokens - 1 - timings.get("draft_n_accepted", 0) if method.lookahead else None)

    def close(self) -> None:
        self._servers.clear()


def _stream(address: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer."""
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=_ANSWER_S)) as connection:
        connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"llama.cpp answered {response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len("data: ") :])
