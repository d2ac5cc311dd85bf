"""Names, types and shapes of all tensors: what `config.pbtxt` declares and what requests are read by.

Names, types and shapes of the ensemble are those of NVIDIA's TensorRT-LLM ensemble, with some tensors more. As there,
the first dimension of every tensor is the batch, and left out here; it is always 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DataType = Literal["STRING", "INT32", "UINT64", "FP32", "BOOL"]
ONE, MANY = (1,), (-1,)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model. Whether it is required matters for inputs only."""

    name: str
    dtype: DataType
    dims: tuple[int, ...] = ONE
    required: bool = False


def _specs(dtype: DataType, names: str, dims: tuple[int, ...] = ONE) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype, dims) for name in names.split())


MAX_TOKENS = TensorSpec("max_tokens", "INT32", required=True)
PROMPT = (TensorSpec("text_input", "STRING", required=True), TensorSpec("messages", "STRING"))

OPTIONS = (
    *_specs("INT32", "min_tokens end_id pad_id top_k beam_width num_return_sequences"),
    *_specs("FP32", "temperature top_p min_p length_penalty repetition_penalty presence_penalty frequency_penalty"),
    *_specs("UINT64", "seed random_seed"),
    *_specs("STRING", "bad_words stop_words embedding_bias_words", MANY),
    *_specs("FP32", "embedding_bias_weights", MANY),
    *_specs("BOOL", "stream exclude_input_in_output return_log_probs return_context_logits return_generation_logits"),
    *_specs("BOOL", "return_perf_metrics return_num_input_tokens return_num_output_tokens"),
    # Not in NVIDIA's ensemble.
    *_specs("BOOL", "ignore_eos include_stop_str_in_output"),
    *_specs("INT32", "stop_token_ids", MANY),
    *_specs("INT32", "logprobs speculation_lookahead priority"),
    *_specs("FP32", "timeout_s"),
    *_specs("STRING", "logit_bias guided_decoding_guide_type guided_decoding_guide speculation_mode"),
)

INPUT_IDS = TensorSpec("input_ids", "INT32", MANY)
STOP = TensorSpec("stop", "BOOL")

# An entry for each answer of the response: one when streaming, `num_return_sequences` when not.
ANSWERS = (
    TensorSpec("text_output", "STRING", MANY),
    TensorSpec("cum_log_probs", "FP32", MANY),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    *_specs("INT32", "sequence_index num_output_tokens total_draft_tokens total_accepted_draft_tokens", MANY),
    *_specs("FP32", "acceptance_rate", MANY),
    *_specs("STRING", "finish_reason stats", MANY),
    *_specs("INT32", "batch_index num_input_tokens"),
    TensorSpec("output_ids", "INT32", MANY),
)
RAW_LOGPROBS = TensorSpec("raw_logprobs", "STRING", MANY)
TOKEN_LOGPROBS = TensorSpec("token_logprobs", "STRING", MANY)


@dataclass(frozen=True)
class ModelSpec:
    """One model of the repository."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False


PREPROCESSING = ModelSpec("preprocessing", PROMPT, (INPUT_IDS,))
# A request to stop another has nothing else, so Triton must take one without prompt; a prompt without it is refused here.
SSD = ModelSpec(
    "ssd", (INPUT_IDS, replace(MAX_TOKENS, required=False), *OPTIONS, STOP), (*ANSWERS, RAW_LOGPROBS), decoupled=True
)
POSTPROCESSING = ModelSpec("postprocessing", (*ANSWERS, RAW_LOGPROBS), (*ANSWERS, TOKEN_LOGPROBS))
ENSEMBLE = ModelSpec("ensemble", (*PROMPT, MAX_TOKENS, *OPTIONS), (*ANSWERS, TOKEN_LOGPROBS))
STEPS = (PREPROCESSING, SSD, POSTPROCESSING)
