"""The target on TensorRT-LLM: one request for each sequence and round, verified inside its Executor.

The KV cache is the executor's. Between rounds it finds the KV of a sequence by its tokens (block reuse), so nothing of
a sequence is kept here; the leader's block tables only count what may be in use.

Exactness. The executor samples and accepts by rules of its own, so a request is put in such a way that they come to the
target's distribution as `scores.py` defines it, and refused by name where they cannot:

- temperature 0: draft tokens alone, `top_k` 1. The one token that can be sampled decides, as here.
- temperature > 0: draft tokens with log q, which makes it the rule `ratio`; a token without a recorded q gets a row
  that is 0 at the token and excludes all others. The rule `coupled` needs our noise and cannot be had.
- `top_p` without a draft: the executor would give the last token of the nucleus only what is left up to `top_p`. With a
  draft it masks and renormalises, as here; so a token without meaning is sent along as draft, and only the first
  emitted token is used.
- A bias of every row is `embedding_bias`, added before temperature and penalties: logit_bias, and excluded ids without
  text. A bias that changes with each token (grammar; presence and frequency penalties, because the executor counts the
  prompt too) is only right for one row, so such requests run in mode `ar`.
- `min_tokens`: stop tokens are bad words while none of a round's rows lies beyond; drafts are shortened to that end.
- The seed of a round is a hash of the request's seed and the position: with one seed for all, draws would repeat.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from hashlib import blake2b

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor

from saguaro.engines.trtllm import MAX_TOP_K, NEVER, Ask, ExecutorSession, Reply
from saguaro.engines.trtllm_config import TrtllmEngineConfig
from saguaro.errors import ConfigError, EngineError, SaguaroError
from saguaro.orchestrator.config import DeploymentConfig
from saguaro.orchestrator.grammar import has_grammar
from saguaro.orchestrator.logprobs import token_logprobs
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.target import nothing
from saguaro.orchestrator.types import Mode, Outcome, SamplingParams, Speculation

_MAX_BIAS = 1e29  # beyond any logit, and still far from NEVER


def check_deployment(config: DeploymentConfig, engine: TrtllmEngineConfig) -> None:
    """Before anything is loaded, which takes minutes. Raises ConfigError naming key, reason and remedy."""
    speculation, model = config.speculation, config.target
    if speculation.rule != "ratio":
        raise ConfigError(
            f"speculation.rule is {speculation.rule!r}, which a target on TensorRT-LLM cannot follow: its Executor "
            "accepts draft tokens inside, with random numbers of its own. Set speculation.rule: ratio; at "
            "temperature 0 both are greedy decoding"
        )
    if speculation.deterministic:
        raise ConfigError(
            "speculation.deterministic is set, but the logits of TensorRT-LLM's engines depend on what else is in the "
            "batch. Take the key out"
        )
    if speculation.max_lookahead > engine.max_draft_len:
        raise ConfigError(
            f"speculation.lookahead is {speculation.lookahead} and the target's engine takes {engine.max_draft_len} "
            "draft tokens: lower it, or build with a larger trtllm.max_draft_len"
        )
    if config.serving.max_sequences > engine.max_batch_size:
        raise ConfigError(
            f"serving.max_sequences is {config.serving.max_sequences} and the target's engine takes "
            f"{engine.max_batch_size} requests at once: lower it, or build with a larger trtllm.max_batch_size"
        )
    if model.block_size != engine.tokens_per_block:
        raise ConfigError(
            f"target.block_size is {model.block_size} and the engine's blocks hold {engine.tokens_per_block} tokens: "
            f"set target.block_size: {engine.tokens_per_block}"
        )


class ExecutorTarget:
    """Whether the deployment fits is `check_deployment`'s matter; here it is taken to."""

    asynchronous = False  # the session's one call enqueues and waits

    def __init__(self, session: ExecutorSession) -> None:
        self._session = session
        self._engine = session.engine
        self.vocab_size = session.vocab_size
        self.max_model_len = session.engine.max_model_len
        self.block_size = session.engine.tokens_per_block
        self.num_blocks = session.num_blocks
        self._longer = 0  # tokens beyond a round's outcome, which were not used
        self._pretended = 0  # draft tokens without meaning, see `top_p` above

    def admit(self, params: SamplingParams, mode: Mode) -> Mode:
        samples = params.temperature > 0
        if samples and params.min_p > 0:
            raise ConfigError(_refusal("min_p", params.min_p, "its sampling with draft tokens has no such filter"))
        if samples and params.top_k > MAX_TOP_K:
            raise ConfigError(_refusal("top_k", params.top_k, f"it keeps at most {MAX_TOP_K} tokens"))
        if params.repetition_penalty != 1 and _counted(params):
            raise ConfigError(
                _refusal(
                    "repetition_penalty",
                    params.repetition_penalty,
                    "it would be applied after presence_penalty and frequency_penalty instead of before",
                )
            )
        if params.logprobs is not None and not self._engine.gather_generation_logits:
            raise ConfigError(
                _refusal("logprobs", params.logprobs, "the engine was built without gather_generation_logits")
            )
        return "ar" if _counted(params) or has_grammar(params) else mode

    def expect(self, sequences: Rows[Sequence], drafted: Rows[int]) -> None:
        pass  # a request is made of the tokens

    def verify(
        self, sequences: Rows[Sequence], speculations: Rows[Speculation], meanwhile: Callable[[], None] = nothing
    ) -> list[Outcome | SaguaroError | None]:
        """One request for each sequence, all in one batch of the executor.

        A `chunk_end` computes the KV of that part of a prompt, for the next request to find; what it emits is dropped.
        """
        results: list[Outcome | SaguaroError | None] = [None] * len(sequences)
        asks: dict[int, tuple[Ask, Speculation]] = {}
        for index, (sequence, speculation) in enumerate(zip(sequences, speculations, strict=True)):
            try:
                asks[index] = self._ask(sequence, speculation)
            except ConfigError as error:
                results[index] = error
        replies = self._session.run([ask for ask, _ in asks.values()]) if asks else []
        for (index, (_, used)), reply in zip(asks.items(), replies, strict=True):
            if isinstance(reply, EngineError):
                results[index] = reply
            elif sequences[index].chunk_end is None:
                results[index] = self._outcome(sequences[index], used, reply)
        return results

    def settle(self) -> None:
        pass  # its outcomes are all it says

    def metrics(self) -> Iterable[Metric]:
        counts, stats = self._session.counts, self._session.stats
        for name, text, value in (
            ("requests", "Requests to the executor: one for each sequence and round", counts.requests),
            ("errors", "Requests that the executor refused or answered wrongly", counts.errors),
            ("stray_responses", "Responses that came after their request had been given up", counts.strays),
            ("iterations", "Iterations of the executor", counts.iterations),
            ("missed_iterations", "Iterations whose statistics were lost", counts.missed_iterations),
            ("reused_blocks", "KV blocks that requests found in the executor's cache", counts.reused_blocks),
            ("missed_blocks", "KV blocks that requests did not find and computed", counts.missed_blocks),
            ("canary_failures", "Start-ups where reuse of KV changed the tokens of the canary", counts.canary_failures),
            ("unused_tokens", "Tokens the executor emitted beyond a round's outcome", self._longer),
            ("pretended_drafts", "Draft tokens sent only so that top_p is exact", self._pretended),
        ):
            yield CounterMetricFamily(f"saguaro_executor_{name}", text, value)
        if stats is not None:
            yield GaugeMetricFamily(
                "saguaro_executor_iteration_seconds", "Time of the latest iteration", stats.iter_latency_ms / 1e3
            )
            blocks = GaugeMetricFamily("saguaro_executor_kv_blocks", "KV blocks of the executor", labels=["state"])
            for state in ("free", "used", "max"):
                blocks.add_metric([state], getattr(stats.kv_cache_stats, f"{state}_num_blocks"))
            yield blocks

    def _ask(self, sequence: Sequence, speculation: Speculation) -> tuple[Ask, Speculation]:
        """The request of a round, and the part of the speculation it verifies.

        Raises ConfigError if nothing may follow.
        """
        if sequence.chunk_end is not None:
            return Ask(sequence.tokens[: sequence.chunk_end], 1), Speculation()
        params = sequence.request.params
        used = speculation.first(self._engine.max_draft_len)
        words = [word for word in params.bad_words if not isinstance(word, str)]
        left = params.min_tokens - sequence.emitted
        if left > 0:
            used = used.first(left - 1)
            words += [(token,) for token in sequence.request.stop_ids]
        draft, draft_logits = used.tokens, None
        if params.temperature > 0 and params.top_p < 1 and not draft:
            draft = (sequence.tokens[-1],)
            self._pretended += 1
        if params.temperature > 0 and draft:
            draft_logits = _log_q(draft, used, self._engine.padded_vocab_size)
        ask = Ask(
            tokens=sequence.tokens,
            max_tokens=len(draft) + 1,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            seed=_seed(sequence),
            draft=draft,
            draft_logits=draft_logits,
            bias=self._bias(sequence, words),
            bad_words=tuple(words),
            logits=params.logprobs is not None,
        )
        return ask, used

    def _bias(self, sequence: Sequence, words: Rows[tuple[int, ...]]) -> Tensor | None:
        """[vocab_size] what is added to the logits; None for nothing."""
        params = sequence.request.params
        banned = list({word[0] for word in words if len(word) == 1})
        if not (params.logit_bias or sequence.grammar or _counted(params) or len(banned) >= self.vocab_size):
            return None
        bias = torch.zeros(self._engine.padded_vocab_size)
        for token, value in params.logit_bias.items():
            bias[token] = min(max(value, -_MAX_BIAS), _MAX_BIAS)
        if _counted(params):
            emitted = torch.tensor(sequence.tokens[sequence.request.prompt_length :], dtype=torch.int64)
            counts = torch.bincount(emitted, minlength=len(bias))
            bias -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        allowed = torch.ones(self.vocab_size, dtype=torch.bool)
        if sequence.grammar:
            allowed = sequence.grammar.masks([()], self.vocab_size)[0]
            bias[: self.vocab_size].masked_fill_(~allowed, NEVER)
        allowed[banned] = False
        if not bool(allowed.any()):
            raise ConfigError(
                f"no token may follow at position {sequence.length}: bad_words, min_tokens (which bans the stop "
                f"tokens) and the grammar together exclude all {self.vocab_size} tokens; relax one of them"
            )
        return bias

    def _outcome(self, sequence: Sequence, used: Speculation, reply: Reply) -> Outcome:
        """Accepted are the leading tokens that are the draft's: a token that replaces a rejected one is never the same.

        The executor may emit more than the round's outcome. That is not used, whatever it is, and drawn again.
        """
        accepted = 0
        while accepted < min(len(used.tokens), len(reply.tokens) - 1) and (
            reply.tokens[accepted] == used.tokens[accepted]
        ):
            accepted += 1
        outcome = Outcome(accepted, reply.tokens[accepted])
        self._longer += len(reply.tokens) - accepted - 1
        if (count := sequence.request.params.logprobs) is not None and reply.logits is not None:
            emitted = list(reply.tokens[: accepted + 1])
            sequence.logprobs.extend(token_logprobs(reply.logits[:, : self.vocab_size], emitted, count))
        return outcome


def _refusal(name: str, value: object, reason: str) -> str:
    return (
        f"{name} is {value!r}, which the target of this deployment, TensorRT-LLM's Executor, cannot honour exactly: "
        f"{reason}. Leave it out"
    )


def _counted(params: SamplingParams) -> bool:
    """Whether penalties count the tokens of the answer alone."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def _seed(sequence: Sequence) -> int:
    """Of one round. It must not be one that another round, or the draft, draws from."""
    packed = struct.pack("<QQ", sequence.request.seed, sequence.length)
    return int.from_bytes(blake2b(packed, digest_size=8, person=b"executor").digest(), "little")


def _log_q(draft: tuple[int, ...], speculation: Speculation, vocab_size: int) -> Tensor:
    """[K, vocab_size] log of the distribution each draft token was drawn from; its softmax is that distribution."""
    rows = torch.full((len(draft), vocab_size), NEVER)
    for k, token in enumerate(draft):
        if not speculation.draft_probs:
            rows[k, token] = 0.0  # a point mass
        else:
            probs = speculation.draft_probs[k]
            rows[k, list(probs.ids)] = torch.tensor([math.log(p) for p in probs.probs], dtype=torch.float32)
    return rows
