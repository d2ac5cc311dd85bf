"""Weights into an engine directory for the draft on TensorRT, compiled for the GPU of this machine.

rank0.engine                    the compiled network
config.json                     what was compiled, by the keys that TensorRT-LLM uses for its engines
generation_config.json, tokenizer.json, draft_vocab.json, ...     as for the other engines
manifest.json                   last: its presence means the directory is complete
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorrt as trt
import torch

import saguaro
from saguaro.build.recipe import Recipe, TensorrtOptions
from saguaro.build.source_model import SourceModel
from saguaro.build.weights import Weights
from saguaro.engines.checkpoint import model_of
from saguaro.engines.cuda import Cuda
from saguaro.engines.kv_pool import head_dim
from saguaro.engines.tensorrt.engine import PLAN
from saguaro.engines.tensorrt.log import Log
from saguaro.engines.tensorrt.network import DraftNetwork, Limits
from saguaro.errors import ConfigError, EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TENSOR_VALUES = 1 << 31  # TensorRT's limit for one tensor


class TensorrtBuild:
    """One build, checked before anything is written.

    `capability`: of the device to compile for, such as 9.0; that of the current one if not given. `timings`: a folder
    for what TensorRT measures, so that the next build need not.

    Raises ConfigError, EngineError or ModelError when recipe, model and this engine do not fit each other.
    """

    def __init__(
        self, recipe: Recipe, weights: Weights, *, capability: str | None = None, timings: Path | None = None
    ) -> None:
        self._model = SourceModel(recipe, weights)
        self._options = recipe.tensorrt or TensorrtOptions()
        if recipe.tp != 1:
            raise ConfigError(
                f"recipe {recipe.name}: tp is {recipe.tp}, but an engine for tensorrt runs on one device."
            )
        self._dtype = _DTYPES[recipe.dtype]
        if capability is None:
            if not torch.cuda.is_available():
                raise EngineError(
                    f"recipe {recipe.name}: TensorRT compiles on the GPU it compiles for, and there is none here. "
                    "Build it on the machine of the draft, or use engine: pytorch."
                )
            capability = Cuda().capability
        self._capability = capability
        self._timing_cache = timings and timings / f"tensorrt-{trt.__version__}-{capability}.cache"
        options, config = self._options, self._model.config
        values = options.max_kv_tokens * config.num_key_value_heads * head_dim(config)
        if values >= _TENSOR_VALUES:
            most = options.max_kv_tokens * (_TENSOR_VALUES - 1) // values
            raise ConfigError(
                f"recipe {recipe.name}: tensorrt.max_kv_tokens is {options.max_kv_tokens}, but TensorRT takes tensors "
                f"of less than 2^31 values, which is {most} tokens of this model in a layer's pool."
            )
        self._limits = Limits(
            max_sequences=options.max_batch_size,
            max_rows=options.max_rows,
            usual_rows=options.usual_rows,
            max_blocks=options.max_kv_tokens // options.block_size,
            table_width=math.ceil((self._model.max_model_len + options.branch_columns) / options.block_size),
        )

    @property
    def size(self) -> int:
        """Bytes of weights that will be compiled; the compiled network is about as large."""
        return sum(torch.Size(shape).numel() for shape in self._model.shapes.values()) * self._dtype.itemsize

    def write(self, directory: Path, source_sha256: str, advance: Callable[[int], None]) -> None:
        """Write everything into an empty directory, the manifest last. `advance` is told of bytes of weights read."""
        vocab_size = self._model.write_tokenizer(directory)
        kept = self._model.write_draft_vocab(directory)
        model = self._read(advance)
        builder = trt.Builder(Log())
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        options = self._options
        draft = DraftNetwork(
            network,
            model,
            vocab_size=vocab_size,
            max_model_len=self._model.max_model_len,
            block_size=options.block_size,
            capability=int(self._capability.replace(".", "")),
            usual_rows=options.usual_rows,
            splits=options.splits,
            kept=kept,
        )
        (directory / PLAN).write_bytes(compile_network(builder, network, draft, self._limits, self._timing_cache))
        text = json.dumps(self._description(type(model).__name__, vocab_size, kept), indent=2)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
        self._model.write_manifest(
            directory, source_sha256, device=self._capability, versions={"tensorrt": trt.__version__}
        )

    def _read(self, advance: Callable[[int], None]) -> Any:
        """The model, in the memory of this process: TensorRT reads it there."""
        tensors = {}
        for name in self._model.shapes:
            tensors[name] = self._model.weights.read(name, self._dtype)
            advance(tensors[name].nbytes)
        return model_of(tensors, self._model.config, self._dtype, f"recipe {self._model.recipe.name}")

    def _description(self, architecture: str, vocab_size: int, kept: Sequence[int] | None) -> dict[str, Any]:
        config, options, limits = self._model.config, self._options, self._limits
        rope = dict(config.rope_parameters)
        return {
            "version": saguaro.__version__,
            "producer": {"name": "saguaro", "tensorrt": trt.__version__, "compute_capability": self._capability},
            "pretrained_config": {
                "architecture": architecture,
                "dtype": self._model.recipe.dtype,
                "logits_dtype": "float32",
                "vocab_size": vocab_size,
                "hidden_size": config.hidden_size,
                "num_hidden_layers": config.num_hidden_layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "head_size": head_dim(config),
                "intermediate_size": config.intermediate_size,
                "hidden_act": config.hidden_act,
                "norm_epsilon": config.rms_norm_eps,
                "max_position_embeddings": config.max_position_embeddings,
                "position_embedding_type": "rope_gpt_neox",
                "rotary_base": rope.pop("rope_theta"),
                "rotary_scaling": None if rope["rope_type"] == "default" else rope,
                "tie_word_embeddings": config.tie_word_embeddings,
                "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "gpus_per_node": 1},
                "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
            },
            "build_config": {
                "max_batch_size": limits.max_sequences,
                "max_num_tokens": limits.max_rows,
                "opt_num_tokens": limits.usual_rows,
                "max_seq_len": self._model.max_model_len,
                "max_beam_width": 1,
                "kv_cache_type": "paged",
                "max_kv_blocks": limits.max_blocks,
                "max_blocks_per_sequence": limits.table_width,
                "attention_splits": options.splits,
                "head_token_ids": vocab_size if kept is None else len(kept),
                "plugin_config": {"tokens_per_block": options.block_size},
            },
        }


def compile_network(
    builder: Any, network: Any, draft: DraftNetwork, limits: Limits, timing_cache: Path | None = None
) -> Any:
    """The serialised engine (a buffer) of a network that `draft` has written. Raises EngineError when there is none."""
    config = builder.create_builder_config()
    # Without it TensorRT refuses outputs that are the memory of an input: the KV pools.
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32, as in the pytorch engine
    config.add_optimization_profile(draft.profile(builder.create_optimization_profile(), limits))
    if timing_cache is not None:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        # What another version or device measured is refused by TensorRT, and it starts from nothing.
        config.set_timing_cache(config.create_timing_cache(known), False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError("TensorRT could not build the draft's engine; its log says why.")
    if timing_cache is not None:
        timing_cache.parent.mkdir(parents=True, exist_ok=True)
        beside = timing_cache.with_suffix(".new")
        beside.write_bytes(config.get_timing_cache().serialize())
        beside.replace(timing_cache)  # a build that is killed leaves the old one
    return plan
