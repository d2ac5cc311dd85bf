"""The plan of an engine for TensorRT-LLM 1.2.1: convert or quantise the checkpoint, then `trtllm-build`.

NVIDIA's own scripts convert (`convert_checkpoint.py`) and calibrate (`quantize.py`): they are what its checkpoints are
tested with, and they live in the image beside the version they belong to. FP8 goes through `quantize.py`, because the
conversion script sets scales without having seen one activation.
"""

from __future__ import annotations

from typing import Final

from saguaro.build.gpu_memory import (
    BFLOAT16,
    CARDS,
    GIB,
    MemoryPlan,
    activation_items,
    kv_token_bytes,
    weight_items,
    whole_blocks,
)
from saguaro.build.model_shape import ModelShape
from saguaro.build.plan import Plan, PlannedFile, Setting, Step
from saguaro.build.recipe import Recipe, TrtllmOptions
from saguaro.build.trtllm_settings import kv_dtype, trtllm_settings
from saguaro.errors import CapacityError, ConfigError

_CONVERTERS: Final = {"llama": "llama", "qwen2": "qwen", "qwen3": "qwen"}
_HOUR: Final = 3600
_MANY_TOKENS: Final = 16_384  # trtllm-build warns above it
_TENSOR_VALUES: Final = 1 << 31  # TensorRT's limit for one tensor
_LOGIT_COPIES: Final = 5  # target and draft logits and probabilities, and the engine's output


def plan_trtllm(recipe: Recipe, shape: ModelShape) -> Plan:
    """Raises ConfigError for what cannot be built, CapacityError for what cannot be loaded on the recipe's GPU."""
    options = recipe.trtllm or TrtllmOptions()
    length = _max_model_len(recipe, shape)
    _check(recipe, shape, options)
    tokens = _max_num_tokens(recipe, shape, options, length)
    memory, checkpoint_bytes = _memory(recipe, shape, options, length, tokens)
    settings = trtllm_settings(recipe, options, length, tokens)
    weights = sum(item.bytes for item in memory.items if not item.estimate)
    workers = min(options.workers or recipe.tp, recipe.tp)
    return Plan(
        recipe=recipe,
        shape=shape,
        max_model_len=length,
        settings=settings,
        steps=(_checkpoint_step(recipe, shape, options), _compile_step(settings)),
        files=(
            PlannedFile("CHECKPOINT", "rank{}.safetensors", checkpoint_bytes),
            PlannedFile("ENGINE", "rank{}.engine", weights),
        ),
        memory=memory,
        # Weights and serialised engine of each worker; to calibrate, the whole model in bfloat16.
        host_bytes=max(2 * workers * weights, shape.parameters * BFLOAT16 if recipe.dtype == "fp8" else 0),
        warnings=_warnings(shape, options, length, tokens, memory),
    )


def _max_model_len(recipe: Recipe, shape: ModelShape) -> int:
    length = recipe.max_model_len or shape.max_position_embeddings
    if length > shape.max_position_embeddings:
        raise ConfigError(
            f"recipe {recipe.name}: max_model_len is {length}, the model's limit is {shape.max_position_embeddings}."
        )
    return length


def _check(recipe: Recipe, shape: ModelShape, options: TrtllmOptions) -> None:
    def refuse(key: str, why: str) -> None:
        raise ConfigError(f"recipe {recipe.name}: {key}: {why}.")

    card, plugins = CARDS[options.gpu], options.plugins
    kv_heads = shape.kv_heads % recipe.tp and recipe.tp % shape.kv_heads
    if shape.heads % recipe.tp or kv_heads or shape.intermediate_size % recipe.tp:
        refuse(
            "tp",
            f"{recipe.tp} ranks cannot share {shape.heads} attention heads, {shape.kv_heads} KV heads and "
            f"{shape.intermediate_size} MLP columns evenly",
        )
    if "fp8" in (recipe.dtype, options.kv_dtype) and not card.has_fp8:
        refuse("dtype", f"fp8 needs a GPU of compute capability 8.9 or more; the {card.name} has {card.capability}")
    if recipe.dtype != "fp8" and options.kv_dtype == "fp8":
        refuse(
            "trtllm.kv_dtype",
            "fp8 with dtype bfloat16 makes TensorRT-LLM switch paged context attention off, which block reuse needs; "
            "use dtype: fp8, or leave kv_dtype out",
        )
    for key in ("gemm_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin", "gemm_swiglu_plugin"):
        if getattr(plugins, key) == "fp8" and recipe.dtype != "fp8":
            refuse(f"trtllm.plugins.{key}", "fp8 needs dtype: fp8")
    fuses = plugins.reduce_fusion == "enable"
    if fuses and (recipe.tp == 1 or shape.family != "llama"):
        refuse("trtllm.plugins.reduce_fusion", "TensorRT-LLM switches it off for one rank and for all but Llama models")
    if plugins.user_buffer == "enable" and not (fuses and recipe.dtype == "fp8"):
        refuse("trtllm.plugins.user_buffer", "it needs reduce_fusion: enable and dtype: fp8")


def _max_num_tokens(recipe: Recipe, shape: ModelShape, options: TrtllmOptions, length: int) -> int:
    longest = options.max_batch_size * length
    tokens = options.max_num_tokens or longest
    least = max(length, options.max_batch_size * (options.max_draft_len + 1))
    key = f"recipe {recipe.name}: trtllm.max_num_tokens"
    if tokens < least:
        raise ConfigError(
            f"{key}: is {tokens}, but a whole context is computed at once ({length} tokens) and every row of a batch "
            f"has {options.max_draft_len + 1} tokens: give {least} or more."
        )
    if tokens > longest:
        raise ConfigError(
            f"{key}: is {tokens}, but trtllm-build takes no more than max_batch_size x max_model_len ({longest})."
        )
    widest = max(2 * shape.intermediate_size, shape.query_size + 2 * shape.kv_size) // recipe.tp
    if tokens * max(widest, shape.hidden_size) >= _TENSOR_VALUES:
        most = (_TENSOR_VALUES - 1) // max(widest, shape.hidden_size)
        raise ConfigError(
            f"{key}: {tokens} tokens make tensors of more than 2^31 values, which TensorRT does not take. Give "
            f"{most} or less, or a smaller max_model_len or max_batch_size."
        )
    return tokens


def _checkpoint_step(recipe: Recipe, shape: ModelShape, options: TrtllmOptions) -> Step:
    common = ("--model_dir", "$MODEL", "--output_dir", "$CHECKPOINT", "--dtype", "bfloat16")
    ranks = ("--tp_size", str(recipe.tp))
    if recipe.dtype == "fp8":
        kv = ("--kv_cache_dtype", "fp8") if kv_dtype(recipe, options) == "fp8" else ()
        data = ("--calib_dataset", options.calibration, "--calib_size", str(options.calibration_samples))
        return Step(
            "quantise",
            "CHECKPOINT",
            ("$PYTHON", "$EXAMPLES/quantization/quantize.py") + (*common, "--qformat", "fp8", *kv, *ranks, *data),
            "FP8 scales calibrated with ModelOpt; the conversion script's --use_fp8 calibrates nothing",
            4 * _HOUR,
        )
    script = f"$EXAMPLES/models/core/{_CONVERTERS[shape.family]}/convert_checkpoint.py"
    # The Qwen script has no such flag: it always reads slices.
    shards = ("--load_by_shard",) if shape.family == "llama" and recipe.tp > 1 else ()
    workers = ("--workers", str(min(options.workers or recipe.tp, recipe.tp)))
    return Step(
        "convert",
        "CHECKPOINT",
        ("$PYTHON", script, *common, *ranks, *workers, *shards),
        "Hugging Face weights into one file per rank",
        2 * _HOUR,
    )


def _compile_step(settings: tuple[Setting, ...]) -> Step:
    line = ["trtllm-build", "--checkpoint_dir", "$CHECKPOINT", "--output_dir", "$ENGINE"]
    for setting in settings:
        line += [setting.flag] if setting.value is True else [setting.flag, str(setting.value)]
    # The first is read if it exists; the second is written by rank 0.
    line += ["--input_timing_cache", "$TIMING_CACHE", "--output_timing_cache", "$TIMING_CACHE"]
    return Step("compile", "ENGINE", tuple(line), "one engine per rank", 4 * _HOUR)


def _memory(
    recipe: Recipe, shape: ModelShape, options: TrtllmOptions, length: int, tokens: int
) -> tuple[MemoryPlan, int]:
    """Memory of a GPU, and the bytes of a rank's file of the checkpoint."""
    matrix = 1 if recipe.dtype == "fp8" else BFLOAT16
    weights = weight_items(shape, recipe.tp, matrix_bytes=matrix, separate_head=True, rotary=True)
    rows = options.max_batch_size * (options.max_draft_len + 1)
    activations = activation_items(shape, recipe.tp, tokens=tokens, logit_rows=rows, logit_copies=_LOGIT_COPIES)
    sequence = length + options.max_draft_len
    memory = MemoryPlan(
        card=CARDS[options.gpu],
        items=(*weights, *activations),
        kv_token_bytes=kv_token_bytes(shape, recipe.tp, 1 if kv_dtype(recipe, options) == "fp8" else BFLOAT16),
        tokens_per_block=options.tokens_per_block,
        wanted_tokens=whole_blocks([sequence] * options.max_batch_size, options.tokens_per_block),
    )
    if memory.pool_tokens < sequence:
        raise CapacityError(
            f"recipe {recipe.name}: {memory.fixed / GIB:.1f} GiB of weights and activations leave room for "
            f"{memory.pool_tokens} tokens of KV cache on one {memory.card.name} ({memory.card.usable / GIB:.1f} GiB "
            f"usable), and one sequence has up to {sequence}. Use more ranks (tp), dtype: fp8, or a smaller "
            "max_model_len or max_batch_size."
        )
    return memory, sum(item.bytes for item in weights if item.name != "rotary table")


def _warnings(
    shape: ModelShape, options: TrtllmOptions, length: int, tokens: int, memory: MemoryPlan
) -> tuple[str, ...]:
    found = []
    if tokens > _MANY_TOKENS:
        found.append(
            f"trtllm-build will warn that max_num_tokens is above {_MANY_TOKENS}. That is meant: it is a limit, few "
            "of these tokens are computed when blocks are reused."
        )
    if memory.pool_tokens < memory.wanted_tokens:
        found.append(
            f"{options.max_batch_size} sequences of full length need {memory.wanted_tokens} tokens of KV cache, "
            f"there is room for {memory.pool_tokens}: long ones will wait for each other."
        )
    if tokens < options.max_batch_size * length:
        found.append(f"requests whose contexts are longer than {tokens} tokens together take several iterations.")
    if shape.tied:
        found.append("the tied head is counted twice: whether the engine stores it once has not been measured.")
    return tuple(found)
