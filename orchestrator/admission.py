"""What a client may submit: the checks of a request, and the sequence it becomes."""

from __future__ import annotations

import secrets

from tokenizers import Tokenizer

from saguaro.errors import ConfigError
from saguaro.orchestrator.bad_words import encode_bad_words
from saguaro.orchestrator.config import SpeculationConfig
from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.grammar import has_grammar
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable
from saguaro.orchestrator.sampling import check_vocabulary
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.service_protocol import Submit
from saguaro.orchestrator.target import Target
from saguaro.orchestrator.types import MODES, RequestSampling, SamplingParams


class Admission:
    """Of one deployment. `stop_ids` are the target's ends of text; without a `tokenizer` nothing may be text."""

    def __init__(
        self,
        config: SpeculationConfig,
        target: Target,
        stop_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        target_pool: BlockPool,
        draft_pool: BlockPool,
    ) -> None:
        self._config = config
        self._target = target
        self._stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._target_pool = target_pool
        self._draft_pool = draft_pool

    def sequence(self, number: int, submit: Submit) -> Sequence:
        """The sequence of this number, without its grammar. Raises ConfigError naming field, limit and remedy."""
        limits, vocab_size = self._config, self._target.vocab_size
        mode = submit.mode or limits.limit
        lookahead = limits.max_lookahead if submit.lookahead is None else submit.lookahead
        if MODES.index(mode) > MODES.index(limits.limit):
            raise ConfigError(
                f"mode {mode!r} is more than this deployment's {limits.limit!r}: ask for {limits.limit!r}"
            )
        if not 1 <= lookahead <= limits.max_lookahead:
            raise ConfigError(
                f"lookahead must be between 1 and this deployment's {limits.max_lookahead}, got {lookahead}"
            )
        if not submit.prompt:
            raise ConfigError("the prompt has no tokens")
        if not all(0 <= token < vocab_size for token in submit.prompt + submit.delivered):
            raise ConfigError(f"the prompt has token ids outside 0 to {vocab_size - 1}")
        if submit.params.n != 1:
            raise ConfigError("a request has one answer: submit each of SamplingParams.samples() instead of n > 1")
        params = self._in_tokens(submit.params)
        if len(submit.delivered) >= params.max_tokens:
            raise ConfigError(f"{len(submit.delivered)} tokens are delivered and max_tokens is {params.max_tokens}")
        check_vocabulary(params, vocab_size)
        return Sequence(
            id=number,
            request=RequestSampling(
                params=params.without_grammar(),
                seed=secrets.randbits(64) if params.seed is None else params.seed,
                prompt_length=len(submit.prompt),
                stop_ids=(() if params.ignore_eos else self._stop_ids) + params.stop_token_ids,
            ),
            tokens=list(submit.prompt),
            mode=self._target.admit(params, mode),
            lookahead=lookahead,
            target_table=BlockTable(self._target_pool),
            draft_table=BlockTable(self._draft_pool),
            priority=submit.priority,
            text=TextStream(self._tokenizer, params) if self._tokenizer and params.stop else None,
        )

    def _in_tokens(self, params: SamplingParams) -> SamplingParams:
        """The parameters with text turned into tokens where they have to be tokens."""
        words = any(isinstance(word, str) for word in params.bad_words)
        if self._tokenizer is None:
            if words or params.stop or has_grammar(params):
                raise ConfigError("stop, bad_words as text and grammars need a tokenizer: this service has none")
            return params
        return encode_bad_words(self._tokenizer, params) if words else params
