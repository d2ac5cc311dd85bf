"""TensorRT-LLM's Executor behind plain data: batches of `Ask` in, one `Reply` each out, and nothing that can hang.

The only file that knows `tensorrt_llm`; written for 1.2.1, the last release with compiled engines. The Executor has
the KV cache, the batching and the sampling; what is asked of it, and why, is `orchestrator/executor_target.py`.

Process shape: one MPI job of 1 + tp ranks. Rank 0 enqueues requests and has no GPU; ranks 1 to tp hold a share of the
model each, construct the same Executor and stay in `shutdown()` until rank 0 leaves ("pre-spawned orchestrator").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import tensorrt_llm
import torch
from tensorrt_llm.bindings import executor as trtllm
from torch import Tensor

from saguaro.engines.trtllm_config import VERSION, TrtllmEngineConfig, read_trtllm_config
from saguaro.errors import EngineError

_log = logging.getLogger(__name__)
NEVER = -1e30  # a bias that excludes a token: softmax gives exactly 0, and no sum with it is not a number
MAX_TOP_K = 1024  # of the sampling kernels; a larger one would silently become this
_POLL_S = 1.0  # one call of await_responses; the loop around it has the deadline
_STATS = 1000  # iterations the executor remembers; they are read every round
# Blocks of running sequences outlive others by this priority (of 100; 35 is usual), for this long after their last use.
_LIVE_PRIORITY, _LIVE = 90, timedelta(seconds=60)
_CANARY_TOKENS = 8
_FIRST_STATS_S = 10.0


@dataclass(frozen=True)
class Ask:
    """One request: `tokens` to continue by up to `max_tokens`. `temperature` 0 is greedy.

    With `draft` tokens the executor verifies them in one step and emits those it accepts and one more. Sampling then
    needs `draft_logits` [len(draft), vocab_size]: the log of the probabilities each was drawn with. Without them the
    executor compares with a sample of its own and, where that differs, emits another one: wrong but for greedy.
    """

    tokens: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    draft: tuple[int, ...] = ()
    draft_logits: Tensor | None = None
    bias: Tensor | None = None  # [vocab_size] float32, added to the logits of every row
    bad_words: tuple[tuple[int, ...], ...] = ()
    logits: bool = False  # wanted, of every emitted token


@dataclass(frozen=True)
class Reply:
    tokens: tuple[int, ...]
    logits: Tensor | None  # [len(tokens), vocab_size] as the model returned them


@dataclass
class Counts:
    """What has happened since the start."""

    requests: int = 0
    errors: int = 0
    strays: int = 0  # responses nobody waits for any more
    iterations: int = 0
    missed_iterations: int = 0  # whose statistics were overwritten before they were read
    reused_blocks: int = 0
    missed_blocks: int = 0
    canary_failures: int = 0


@dataclass(frozen=True)
class Options:
    """How the executor is run. `reuse` off computes every context anew: for diagnosis."""

    kv_tokens: int
    memory_fraction: float = 0.9
    reuse: bool = True
    timeout_s: float = 30.0
    start_timeout_s: float = 300.0


class ExecutorSession:
    """Rank 0 of the job. Raises EngineError when the executor cannot be started, or does not answer in time.

    `vocab_size` counts the token ids of the tokenizer; those beyond are never emitted.
    """

    def __init__(self, directory: Path, *, vocab_size: int, options: Options, target: bool) -> None:
        self.engine = read_trtllm_config(directory)
        if self.engine.logits_dtype != "float32":
            raise EngineError(
                f"{directory}: logits_dtype is {self.engine.logits_dtype!r}, which would round the probabilities of "
                "drafts: build the engine again with float32"
            )
        if target != (self.engine.speculative_decoding_mode == "draft_tokens_external"):
            raise EngineError(
                f"{directory}: speculative_decoding_mode is {self.engine.speculative_decoding_mode}; a target needs "
                "draft_tokens_external and a draft none"
            )
        if not 0 < vocab_size <= self.engine.padded_vocab_size:
            raise EngineError(
                f"{directory}: the tokenizer has {vocab_size} token ids and the model {self.engine.padded_vocab_size} "
                "rows: the directory mixes two models. Build it again."
            )
        self.vocab_size = vocab_size
        self.counts = Counts()
        self.stats: Any = None  # of the latest iteration
        self._options = options
        self._salts = count(1)
        self._padding: Tensor | None = None
        if vocab_size < self.engine.padded_vocab_size:
            self._padding = torch.zeros(self.engine.padded_vocab_size)
            self._padding[vocab_size:] = NEVER
        self._executor = _construct(directory, self.engine, options, rank=0)
        if not self._executor.can_enqueue_requests():
            raise EngineError(
                f"{directory}: this process cannot enqueue requests; it is not rank 0 of the target's job"
            )
        self._warm_up()
        blocks = self.stats.kv_cache_stats.max_num_blocks if self.stats else 0
        # A partly matching block is copied: a running request may hold one block more than its tokens need.
        self.num_blocks = blocks - self.engine.max_batch_size
        if self.num_blocks < 1:
            raise EngineError(
                f"the executor has {blocks} KV blocks and needs one for each of {self.engine.max_batch_size} sequences "
                "and some more: raise kv_tokens or executor.memory_fraction, or build for a smaller max_batch_size"
            )

    def run(self, asks: Sequence[Ask]) -> list[Reply | EngineError]:
        """All of them at once; each one's answer, or what the executor said against it.

        Raises EngineError when one is not answered within `timeout_s`, or the executor is gone.
        """
        return self._run(asks, self._options.timeout_s)

    def close(self) -> None:
        """End the executor on all ranks."""
        self._executor.shutdown()

    def _run(self, asks: Sequence[Ask], timeout: float, salt: int | None = None) -> list[Reply | EngineError]:
        replies: list[Reply | EngineError | None] = [None] * len(asks)
        self.counts.requests += len(asks)
        try:
            ids = self._executor.enqueue_requests([self._request(ask, salt) for ask in asks])
            waiting = dict(zip(ids, range(len(asks)), strict=True))
            deadline = time.monotonic() + timeout
            while waiting:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._give_up(list(waiting), timeout)
                for response in self._executor.await_responses(timeout=timedelta(seconds=min(left, _POLL_S))):
                    index = waiting.pop(response.request_id, None)
                    if index is None:
                        self.counts.strays += 1
                    else:
                        replies[index] = self._reply(asks[index], response)
            self._observe()
        except RuntimeError as error:
            raise EngineError(
                f"TensorRT-LLM's executor failed: {error}. Look at the log of the target's ranks."
            ) from error
        return [reply for reply in replies if reply is not None]

    def _request(self, ask: Ask, salt: int | None) -> Any:
        given: dict[str, Any] = {
            "sampling_config": _sampling(ask),
            "output_config": trtllm.OutputConfig(
                exclude_input_from_output=True, return_perf_metrics=True, return_generation_logits=ask.logits
            ),
            "kv_cache_retention_config": trtllm.KvCacheRetentionConfig(
                [trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, _LIVE_PRIORITY, _LIVE)],
                decode_retention_priority=_LIVE_PRIORITY,
                decode_duration_ms=_LIVE,
            ),
        }
        # No end_id: the caller decides what ends an answer, and a token is never missing from the output.
        if ask.draft:
            # Never with an empty list, which the executor answers with an assertion.
            draft = {} if ask.draft_logits is None else {"logits": ask.draft_logits}
            given["external_draft_tokens_config"] = trtllm.ExternalDraftTokensConfig(list(ask.draft), **draft)
        if (bias := self._bias(ask)) is not None:
            given["embedding_bias"] = bias
        if ask.bad_words:
            given["bad_words"] = [list(word) for word in ask.bad_words]
        if salt is None and not self._options.reuse:
            salt = next(self._salts)
        if salt is not None:
            given["cache_salt_id"] = salt
        return trtllm.Request(list(ask.tokens), ask.max_tokens, **given)

    def _bias(self, ask: Ask) -> Tensor | None:
        if ask.bias is None or self._padding is None:
            return self._padding if ask.bias is None else ask.bias
        return ask.bias + self._padding

    def _reply(self, ask: Ask, response: Any) -> Reply | EngineError:
        if response.has_error():  # first: `result` and `error_msg` each raise in the other case
            self.counts.errors += 1
            return EngineError(f"TensorRT-LLM's executor refused the request: {response.error_msg}")
        result = response.result
        if not result.is_final:
            return EngineError("TensorRT-LLM's executor streams an answer that was not to be streamed")
        tokens = tuple(result.output_token_ids[0])
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if wrong or not tokens:
            self.counts.errors += 1
            what = f"token {wrong[0]}; the model's ids are 0 to {self.vocab_size - 1}" if wrong else "no token"
            return EngineError(
                f"TensorRT-LLM's executor emitted {what}. Try target.executor.reuse: false in the deployment; if that "
                "helps, its KV cache is damaged"
            )
        metrics = result.request_perf_metrics
        if metrics is not None:
            self.counts.reused_blocks += metrics.kv_cache_metrics.num_reused_blocks
            self.counts.missed_blocks += metrics.kv_cache_metrics.num_missed_blocks
        logits = None
        if ask.logits:
            logits = result.generation_logits[0, : len(tokens)].float()
        return Reply(tokens, logits)

    def _give_up(self, ids: list[int], timeout: float) -> None:
        for request in ids:
            self._executor.cancel_request(request)
        self._observe()
        stats = self.stats
        said = "it has not run one iteration"
        if stats is not None:
            blocks = stats.kv_cache_stats
            said = (
                f"its last iteration was number {stats.iter} with {stats.num_active_requests} requests active and "
                f"{stats.num_queued_requests} queued; {blocks.free_num_blocks} of {blocks.max_num_blocks} KV blocks "
                "are free"
            )
        raise EngineError(
            f"TensorRT-LLM's executor did not answer {len(ids)} requests within {timeout:g} s: {said}. If iterations "
            "go on, raise target.executor.timeout_s; if they stand still, a rank has died or waits for another one: "
            "look at the log of each, and whether another process uses a GPU of the target"
        )

    def _observe(self) -> None:
        """Read the statistics of all iterations since the last time; reading takes them away."""
        for stats in self._executor.get_latest_iteration_stats():
            if self.stats is not None:
                self.counts.missed_iterations += max(0, stats.iter - self.stats.iter - 1)
            self.counts.iterations += 1
            self.stats = stats

    def _warm_up(self) -> None:
        """One prompt twice, the second time from the cache: the executor answers, and reuse does not change a token.

        Under a salt of its own, which no request of `run` has.
        """
        length = min(2 * self.engine.tokens_per_block + 3, self.engine.max_model_len - _CANARY_TOKENS)
        ask = Ask([index * 7 % self.vocab_size for index in range(max(1, length))], _CANARY_TOKENS)
        answers = [self._run([ask], self._options.start_timeout_s, salt=2**63)[0] for _ in range(2)]
        for answer in answers:
            if isinstance(answer, EngineError):
                raise answer
        deadline = time.monotonic() + _FIRST_STATS_S
        while self.stats is None and time.monotonic() < deadline:
            time.sleep(0.01)  # an iteration's statistics may come after its answers
            self._observe()
        if answers[0] != answers[1]:
            self.counts.canary_failures += 1
            _log.warning(
                "one prompt was answered with other tokens when its KV came from the cache. Where two tokens are "
                "nearly as likely that is rounding; if answers look damaged, set target.executor.reuse: false"
            )


def work(directory: Path, options: Options, rank: int) -> None:
    """What ranks 1 to tp do: hold a share of the model until rank 0 ends the executor."""
    executor = _construct(directory, read_trtllm_config(directory), options, rank)
    executor.shutdown()  # returns when rank 0 has left


def _construct(directory: Path, engine: TrtllmEngineConfig, options: Options, rank: int) -> Any:
    """The same on every rank but for who is the orchestrator. Raises EngineError with what TensorRT-LLM says."""
    if tensorrt_llm.__version__ != VERSION:
        raise EngineError(
            f"tensorrt_llm is version {tensorrt_llm.__version__}, and this engine needs {VERSION}: use the container "
            "image that docs/deployment names"
        )
    workers = range(1, engine.tp_size + 1)
    config = trtllm.ExecutorConfig(
        max_beam_width=1,
        kv_cache_config=trtllm.KvCacheConfig(
            enable_block_reuse=True,  # without it an engine for external drafts does not start
            max_tokens=options.kv_tokens,
            free_gpu_memory_fraction=options.memory_fraction,
            enable_partial_reuse=True,
            copy_on_partial_reuse=True,
        ),
        enable_chunked_context=False,  # with it drafts that do not fit a chunk are silently dropped
        iter_stats_max_iterations=_STATS,
        parallel_config=trtllm.ParallelConfig(
            communication_type=trtllm.CommunicationType.MPI,
            communication_mode=trtllm.CommunicationMode.ORCHESTRATOR,
            device_ids=[worker - 1 for worker in workers],  # among the GPUs this job may see
            participant_ids=list(workers),
            orchestrator_config=trtllm.OrchestratorConfig(is_orchestrator=rank == 0, spawn_processes=False),
        ),
        gather_generation_logits=engine.gather_generation_logits,
    )
    try:
        return trtllm.Executor(directory, trtllm.ModelType.DECODER_ONLY, config)
    except RuntimeError as error:
        raise EngineError(f"{directory}: TensorRT-LLM cannot start on rank {rank}: {error}") from error


def _sampling(ask: Ask) -> Any:
    """Every filter is named: where neither top_k nor top_p is given, TensorRT-LLM decodes greedily."""
    given: dict[str, Any] = {"top_k": 1}
    if ask.temperature > 0:
        given = {"top_k": ask.top_k, "top_p": ask.top_p, "temperature": ask.temperature, "seed": ask.seed}
    if ask.repetition_penalty != 1:
        given["repetition_penalty"] = ask.repetition_penalty
    return trtllm.SamplingConfig(beam_width=1, **given)
