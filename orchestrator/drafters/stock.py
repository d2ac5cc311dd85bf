"""Drafting on a stock TensorRT-LLM engine: every guess and every branch is a request of its own.

Needs no code inside the engine; the KV of shared prefixes is found by the executor's block reuse. It costs a request
for each branch and, for the guesses, the logits of each trunk row on the host, so it is meant for few branches, as the
fallback and as the oracle of the fan-out engine. Drafts are greedy whatever the temperature: point masses, exact under
both rules, though sampled requests accept fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saguaro.engines.trtllm import Ask, ExecutorSession, Reply
from saguaro.errors import ConfigError, SaguaroError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.drafters.base import Guess, Trunk, never
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.types import Outcome, Speculation
from saguaro.plugins.fan_out import FanOut


def check_deployment(config: DeploymentConfig) -> None:
    """Before anything is loaded. Raises ConfigError naming key, reason and remedy."""
    speculation = config.speculation
    for key, value in (("lookahead", speculation.lookahead), ("fan_out.budget", speculation.fan_out.budget)):
        if value == "auto":
            raise ConfigError(
                f"speculation.{key} is `auto`, but a draft on TensorRT-LLM's Executor does not say how long its steps "
                "take: give a number"
            )


class ExecutorDrafter:
    """`num_blocks` and `block_size` are of the pool that the leader counts; KV lies where the executor wants it."""

    def __init__(self, session: ExecutorSession, num_blocks: int, block_size: int) -> None:
        if not session.engine.gather_generation_logits:
            raise ConfigError(
                "a draft on TensorRT-LLM's Executor needs gather_generation_logits: what is guessed is chosen from "
                "logits. Set it in the draft's recipe and build it again"
            )
        self._session = session
        self.memory = TokenMemory(num_blocks, block_size)

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Only the text: KV is computed by the first request that needs it."""
        for row in rows:
            self.memory.store(row, row.tokens[:-1])

    def predict(self, trunks: Sequence[Trunk], fan_outs: Sequence[FanOut]) -> list[list[Guess]]:
        wanted: list[tuple[int, int, int]] = []  # trunk, acceptance length, guesses
        for index, (trunk, fan_out) in enumerate(zip(trunks, fan_outs, strict=True)):
            self.memory.store(trunk.row, trunk.row.tokens + trunk.draft_tokens)
            wanted.extend((index, k, count) for k, count in enumerate(fan_out.counts) if count)
        replies = self._run(
            [Ask([*self._prefix(trunks[i]), *trunks[i].draft_tokens[:k]], 1, logits=True) for i, k, _ in wanted]
        )
        guesses: list[list[Guess]] = [[] for _ in trunks]
        for (index, k, count), reply in zip(wanted, replies, strict=True):
            if reply is None or reply.logits is None:
                continue
            trunk = trunks[index]
            logits = reply.logits[:, : self._session.vocab_size]
            tails = [trunk.draft_tokens[:k]]
            context = self._prefix(trunk)
            (candidates,) = sampling.propose(
                logits, [sampling.Query(trunk.row.request, context, tails, count + 1)], "ratio"
            )
            sent = trunk.draft_tokens[k] if k < len(trunk.draft_tokens) else None
            guesses[index].extend(Guess(Outcome(k, token)) for token in candidates.guesses(0, count, sent))
        return guesses

    def draft(
        self, trunks: Sequence[Trunk], guesses: Sequence[Sequence[Guess]], enough: Callable[[], bool] = never
    ) -> list[list[Speculation]]:
        asks = [
            Ask(
                [*self._prefix(trunk), *trunk.draft_tokens[: guess.outcome.accepted], guess.outcome.bonus],
                trunk.row.lookahead,
                repetition_penalty=trunk.row.request.params.repetition_penalty,
            )
            for trunk, guessed in zip(trunks, guesses, strict=True)
            for guess in guessed
        ]
        replies = iter(self._run(asks))
        return [
            [Speculation(reply.tokens) if (reply := next(replies)) else Speculation() for _ in guessed]
            for guessed in guesses
        ]

    def _prefix(self, trunk: Trunk) -> list[int]:
        """The text up to the trunk's first token, which lies at column `prefix`."""
        text: list[int] = self.memory.read(trunk.row.table, trunk.prefix + 1).tolist()
        return text

    def _run(self, asks: Sequence[Ask]) -> list[Reply | None]:
        """None for what the executor refused: a branch less, no more."""
        if not asks:
            return []
        return [None if isinstance(reply, SaguaroError) else reply for reply in self._session.run(asks)]
