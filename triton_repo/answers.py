"""The answers of one request: from what the service emits each round to the output tensors of the `ssd` model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from saguaro.orchestrator.detokenizer import TextStream
from saguaro.orchestrator.metrics import RequestStats
from saguaro.orchestrator.service_protocol import Tokens
from saguaro.orchestrator.types import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Part:
    """What a round added to one answer, or all of it. Counts are those of the answer up to here."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cum_logprob: float
    num_tokens: int
    finish_reason: FinishReason | None
    stats: RequestStats | None


class Answer:
    """One answer while it comes. Its text lives here, with the request, and so ends with it, however that ends."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer, text: str = "") -> None:
        """`text` is what the whole answer begins with."""
        self._index = index
        self._stream = TextStream(tokenizer, params)
        self._text = text
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cum_logprob = 0.0
        self._stats: RequestStats | None = None
        self.finish_reason: FinishReason | None = None

    def push(self, event: Tokens) -> Part:
        """What the event adds."""
        self._stats = event.stats
        return self._add(event.tokens, event.logprobs, event.finish_reason)

    def cancel(self) -> Part:
        """The last part of an answer that is given up: the text that was held back."""
        return self._add([], [], "cancelled")

    def whole(self) -> Part:
        """Everything so far as one part."""
        return self._part(self._text, self._tokens, self._logprobs)

    def _add(self, tokens: list[int], logprobs: list[TokenLogprobs], finish_reason: FinishReason | None) -> Part:
        text = self._stream.push_round(tokens, finish_reason)
        self.finish_reason = finish_reason
        self._text += text
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._cum_logprob += sum(entry.logprob for entry in logprobs)
        return self._part(text, tokens, logprobs)

    def _part(self, text: str, tokens: list[int], logprobs: list[TokenLogprobs]) -> Part:
        return Part(
            self._index,
            text,
            tokens,
            logprobs,
            self._cum_logprob,
            len(self._tokens),
            self.finish_reason,
            self._stats,
        )


def to_tensors(parts: Sequence[Part], num_input_tokens: int) -> dict[str, NDArray[Any]]:
    """The outputs of `ssd` for a response with these parts, by name; the first dimension is the batch of 1."""
    stats = [part.stats for part in parts]
    width = max(len(part.logprobs) for part in parts)
    output_log_probs = np.zeros((1, len(parts), width), np.float32)  # shorter answers end with zeros
    for row, part in zip(output_log_probs[0], parts, strict=True):
        row[: len(part.logprobs)] = [entry.logprob for entry in part.logprobs]
    return {
        "text_output": _strings(part.text for part in parts),
        "cum_log_probs": np.array([[part.cum_logprob for part in parts]], np.float32),
        "output_log_probs": output_log_probs,
        "sequence_index": _ints(part.index for part in parts),
        "num_output_tokens": _ints(part.num_tokens for part in parts),
        "total_draft_tokens": _ints(one.draft_tokens if one else 0 for one in stats),
        "total_accepted_draft_tokens": _ints(one.accepted_draft_tokens if one else 0 for one in stats),
        "acceptance_rate": np.array(
            [[one.accepted_draft_tokens / one.draft_tokens if one and one.draft_tokens else 0.0 for one in stats]],
            np.float32,
        ),
        "finish_reason": _strings(part.finish_reason or "" for part in parts),
        "stats": _strings(msgspec.json.encode(one).decode() if one else "" for one in stats),
        "batch_index": _ints([0]),
        "num_input_tokens": _ints([num_input_tokens]),
        "output_ids": _ints(token for part in parts for token in part.tokens),
        "raw_logprobs": _strings(msgspec.json.encode(part.logprobs).decode() for part in parts),
    }


def _strings(values: Any) -> NDArray[Any]:
    return np.array([[value.encode() for value in values]], dtype=object)


def _ints(values: Any) -> NDArray[np.int32]:
    return np.array([list(values)], np.int32)
