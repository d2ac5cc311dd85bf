"""The plan of a draft engine for TensorRT 10.14: one process writes the network and lets TensorRT compile it."""

from __future__ import annotations

from typing import Final

from saguaro.build.gpu_memory import (
    BFLOAT16,
    CARDS,
    FLOAT32,
    MemoryPlan,
    activation_items,
    kv_token_bytes,
    weight_items,
    whole_blocks,
)
from saguaro.build.model_shape import ModelShape
from saguaro.build.plan import Plan, PlannedFile, Setting, Step
from saguaro.build.recipe import Recipe, TensorrtOptions
from saguaro.errors import ConfigError

_HOUR: Final = 3600


def plan_tensorrt(recipe: Recipe, shape: ModelShape) -> Plan:
    """Raises ConfigError for a recipe that does not suit the model."""
    options = recipe.tensorrt or TensorrtOptions()
    length = recipe.max_model_len or shape.max_position_embeddings
    if length > shape.max_position_embeddings:
        raise ConfigError(
            f"recipe {recipe.name}: max_model_len is {length}, the model's limit is {shape.max_position_embeddings}."
        )
    if recipe.tp != 1:
        raise ConfigError(f"recipe {recipe.name}: tp is {recipe.tp}, but a draft engine is for one GPU.")
    value = FLOAT32 if recipe.dtype == "float32" else BFLOAT16
    weights = weight_items(shape, 1, matrix_bytes=value, separate_head=False, rotary=True)
    memory = MemoryPlan(
        card=CARDS["h100-80gb"],
        items=(
            *weights,
            *activation_items(shape, 1, tokens=options.max_rows, logit_rows=options.max_rows, logit_copies=1),
        ),
        kv_token_bytes=kv_token_bytes(shape, 1, value),
        tokens_per_block=options.block_size,
        wanted_tokens=whole_blocks([length] * options.max_batch_size, options.block_size),
    )
    size = sum(item.bytes for item in weights)
    kept = recipe.draft_vocab
    reduced = () if kept is None else (Setting("draft_vocab", kept, "token ids the head computes"),)
    return Plan(
        recipe=recipe,
        shape=shape,
        max_model_len=length,
        settings=(
            Setting("max_batch_size", options.max_batch_size, "sequences drafted for together"),
            Setting("max_rows", options.max_rows, "rows of one forward: trunks, branches or a chunk of a prompt"),
            Setting("usual_rows", options.usual_rows, "what kernels are chosen and tiled for"),
            Setting(
                "block_size", options.block_size, "KV slots of a block, which the deployment's draft must have too"
            ),
            Setting("max_kv_tokens", options.max_kv_tokens, "the largest pool a deployment may ask for"),
            Setting(
                "branch_columns", options.branch_columns, "KV slots of one sequence's branches, behind its context"
            ),
            Setting("splits", options.splits, "parts a sequence's context is attended in, side by side"),
            *reduced,
            Setting("STRONGLY_TYPED", True, "every layer computes in the dtype of the Hugging Face model"),
            Setting("ALIASED_PLUGIN_IO_10_03", True, "the KV pools are inputs and outputs with the same memory"),
            Setting("TF32", False, "float32 means float32"),
        ),
        steps=(
            Step(
                "compile",
                "ENGINE",
                ("saguaro", "build", recipe.name),
                "TensorRT's network API, in this process; one engine for prefill, trunks and branches",
                _HOUR,
            ),
        ),
        files=(PlannedFile("ENGINE", "rank{}.engine", size),),
        memory=memory,
        host_bytes=2 * size,
        warnings=("branches take KV blocks too: fan-out budget x lookahead tokens for each sequence.",),
    )
