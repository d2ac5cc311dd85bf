"""Every peer in turn, each prompt through all of its methods before the next one comes; then the next round.

Only one peer is loaded at a time. The order of peers and of methods rotates, so that what else the machine does meets
all alike. A peer that cannot run, or fails, is named with its reason and leaves the others their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from saguaro.bench.peers.peer import Answer, Method, Peer
from saguaro.bench.peers.process import PeerProcess
from saguaro.errors import ConfigError, EngineError, SaguaroError
from saguaro.orchestrator.config import MAX_LOOKAHEAD
from saguaro.orchestrator.types import Mode

_WARM_UP = 8  # tokens


@dataclass(frozen=True)
class PeerPlan:
    """`rounds`: by number, of prompts by kind, as token ids."""

    rounds: Mapping[int, Mapping[str, tuple[int, ...]]]
    ssd_lookahead: int
    sd_lookaheads: tuple[int, ...]
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.rounds or not all(self.rounds.values()):
            raise ConfigError("rounds must be at least 1, and each have a prompt")
        if not self.sd_lookaheads or not all(1 <= k <= MAX_LOOKAHEAD for k in self.sd_lookaheads):
            raise ConfigError(f"lookaheads must be 1 to {MAX_LOOKAHEAD}, got {self.sd_lookaheads}")
        least = max(self.sd_lookaheads) + 2  # the prompt's verification may bring all but the last
        if self.max_tokens < least:
            raise ConfigError(f"max_tokens must be at least {least}, got {self.max_tokens}")

    def methods(self, modes: Sequence[Mode]) -> list[Method]:
        tried = {"ar": (0,), "sd": self.sd_lookaheads, "ssd": (self.ssd_lookahead,)}
        return [Method(mode, lookahead) for mode in modes for lookahead in tried[mode]]


@dataclass(frozen=True)
class PeerRun:
    """One answer."""

    peer: str
    method: Method
    kind: str  # of prompt
    round: int
    answer: Answer


def measure(
    plan: PeerPlan,
    peers: Sequence[Peer],
    failures: dict[str, str],
    progress: Callable[[str], None],
    start: Callable[[Peer, Sequence[Method]], PeerProcess] = PeerProcess,
) -> Iterator[PeerRun]:
    """All answers as they come. `failures` gets the reasons of peers that are missing or fail, by name."""
    failures |= {peer.name: why for peer in peers if (why := peer.missing())}
    for number, prompts in plan.rounds.items():
        for place in range(len(peers)):
            peer = peers[(number + place) % len(peers)]
            if peer.name in failures:
                continue
            progress(f"round {number}: starting {peer.name}")
            try:
                with start(peer, plan.methods(peer.modes)) as process:
                    yield from _round(plan, peer, process, number, prompts, progress)
            except SaguaroError as error:
                failures[peer.name] = str(error)


def _round(
    plan: PeerPlan,
    peer: Peer,
    process: PeerProcess,
    number: int,
    prompts: Mapping[str, tuple[int, ...]],
    progress: Callable[[str], None],
) -> Iterator[PeerRun]:
    methods = plan.methods(peer.modes)
    for method in methods:  # what is compiled, allocated or guessed for the first time is nobody's speed
        process.generate(method, next(iter(prompts.values())), min(_WARM_UP, plan.max_tokens))
    for turn, (kind, prompt) in enumerate(prompts.items()):
        for place in range(len(methods)):
            method = methods[(turn + place) % len(methods)]
            progress(f"round {number}, {kind}: {peer.name}, {method}")
            answer = process.generate(method, prompt, plan.max_tokens)
            if len(answer.token_ids) != plan.max_tokens:
                raise EngineError(
                    f"{peer.name}, {method}: {len(answer.token_ids)} tokens came where {plan.max_tokens} were asked for"
                )
            yield PeerRun(peer.name, method, kind, number, answer)
