"""The config.json of a TensorRT-LLM engine directory: read, checked, and compared with what was asked for.

What TensorRT-LLM silently changes at build time (a switch it turns off, a limit it lowers) is seen here, before a GPU
is touched. It imports nothing of TensorRT-LLM.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from saguaro.errors import EngineError

VERSION: Final = "1.2.1"
FILE: Final = "config.json"

# SpeculativeDecodingMode is a flag: written as its number or its name.
_MODES: Final = {"1": "none", "2": "draft_tokens_external"}


@dataclass(frozen=True)
class TrtllmEngineConfig:
    """What an engine is, in TensorRT-LLM's own terms."""

    architecture: str
    dtype: str
    logits_dtype: str
    vocab_size: int  # the model's rows
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    position_embedding_type: str
    rotary_base: float
    rotary_type: str | None  # None: not scaled
    rotary_factor: float | None
    norm_epsilon: float
    hidden_act: str
    tp_size: int
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int  # with max_draft_len in it
    max_beam_width: int
    max_draft_len: int
    speculative_decoding_mode: str  # none, draft_tokens_external, or as it is written
    gather_generation_logits: bool
    kv_cache_type: str
    tokens_per_block: int
    use_paged_context_fmha: bool
    paged_kv_cache: bool
    remove_input_padding: bool

    @property
    def padded_vocab_size(self) -> int:
        """Width of everything over the vocabulary: the rows, padded to a multiple of the ranks that share them."""
        return -(-self.vocab_size // self.tp_size) * self.tp_size

    @property
    def max_model_len(self) -> int:
        """Longest context. One whose KV is gone is computed in a single step, so it has to fit into one, too."""
        return min(self.max_seq_len, self.max_num_tokens) - self.max_draft_len

    def differences(self, wanted: TrtllmEngineConfig) -> list[str]:
        """Fields that are not as wanted, for people."""
        return [
            f"{field.name} is {getattr(self, field.name)!r}, not {getattr(wanted, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(wanted, field.name)
        ]


def check_version() -> None:
    """Raises EngineError unless TensorRT-LLM 1.2.1 is installed in the Python that runs."""
    try:
        found = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError(
            f"the engine trtllm needs TensorRT-LLM {VERSION}, and tensorrt_llm is not installed here. Use NVIDIA's "
            "image (docs/deployment/build.md); `saguaro build --dry-run` shows the plan of a build anywhere."
        ) from error
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers >= (1, 3):
        raise EngineError(
            f"tensorrt_llm is {found}, and from 1.3 on TensorRT-LLM has no compiled engines: trtllm-build and the "
            f"Executor are gone. Install {VERSION} (docs/deployment/versions.md says what that means)."
        )
    if found != VERSION:
        raise EngineError(
            f"tensorrt_llm is {found}; engines are built and run with {VERSION}, for whose interface this version of "
            "saguaro was written. Use an image with that version (docs/deployment/versions.md)."
        )


def read_trtllm_config(directory: Path) -> TrtllmEngineConfig:
    """Read an engine directory's config.json and check that it and the ranks' files belong to TensorRT-LLM 1.2.1.

    Raises EngineError for another version, a missing or wrong field, more than tensor parallelism, an engine without
    paged KV cache and packed input, or a missing or empty engine file.
    """
    path = directory / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read ({error}). Build the engine again.") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise EngineError(
            f"{path}: was built with TensorRT-LLM {version}; this version of saguaro runs engines of {VERSION} alone. "
            "Build it again in an image with that version."
        )
    try:
        config = _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"{path}: lacks what an engine of TensorRT-LLM {VERSION} has ({type(error).__name__}: {error}). "
            "Build the engine again."
        ) from error
    _check(path, document, config)
    for rank in range(config.tp_size):
        engine = directory / f"rank{rank}.engine"
        if not engine.is_file() or engine.stat().st_size == 0:
            raise EngineError(f"{engine}: is missing or empty; {FILE} says tp_size {config.tp_size}. Build it again.")
    return config


def _parse(document: dict[str, Any]) -> TrtllmEngineConfig:
    model, build = document["pretrained_config"], document["build_config"]
    plugins, quantisation = build["plugin_config"], model["quantization"]
    scaling = model["rotary_scaling"] or {}
    return TrtllmEngineConfig(
        architecture=model["architecture"],
        dtype=model["dtype"],
        logits_dtype=model["logits_dtype"],
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        num_hidden_layers=model["num_hidden_layers"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_key_value_heads"],
        head_size=model.get("head_size") or model["hidden_size"] // model["num_attention_heads"],
        intermediate_size=model["intermediate_size"],
        max_position_embeddings=model["max_position_embeddings"],
        position_embedding_type=_name(model["position_embedding_type"]),
        rotary_base=float(model["rotary_base"]),
        rotary_type=scaling.get("rope_type", scaling.get("type")),
        rotary_factor=scaling.get("factor"),
        norm_epsilon=model["norm_epsilon"],
        # Its gated form, which is what the models here have, goes by either name.
        hidden_act="silu" if model["hidden_act"] == "swiglu" else model["hidden_act"],
        tp_size=model["mapping"]["tp_size"],
        quant_algo=quantisation["quant_algo"],
        kv_cache_quant_algo=quantisation["kv_cache_quant_algo"],
        max_batch_size=build["max_batch_size"],
        max_num_tokens=build["max_num_tokens"],
        max_seq_len=build["max_seq_len"],
        max_beam_width=build["max_beam_width"],
        max_draft_len=build["max_draft_len"],
        speculative_decoding_mode=_mode(build["speculative_decoding_mode"]),
        gather_generation_logits=bool(build["gather_generation_logits"]),
        kv_cache_type=_name(build["kv_cache_type"]),
        tokens_per_block=plugins["tokens_per_block"],
        use_paged_context_fmha=plugins["use_paged_context_fmha"],
        paged_kv_cache=plugins["paged_kv_cache"],
        remove_input_padding=plugins["remove_input_padding"],
    )


def _check(path: Path, document: dict[str, Any], config: TrtllmEngineConfig) -> None:
    mapping, plugins = document["pretrained_config"]["mapping"], document["build_config"]["plugin_config"]
    wrong = [
        why
        for broken, why in (
            (mapping.get("world_size") != config.tp_size, "world_size is not tp_size: only tensor parallelism is run"),
            (mapping.get("pp_size", 1) != 1, "pp_size is not 1"),
            (config.max_beam_width != 1, "max_beam_width is not 1"),
            (config.kv_cache_type != "paged", f"kv_cache_type is {config.kv_cache_type}, not paged"),
            (config.paged_kv_cache is not True, "paged_kv_cache is off"),
            (config.use_paged_context_fmha is not True, "use_paged_context_fmha is off, which block reuse needs"),
            (config.remove_input_padding is not True, "remove_input_padding is off"),
            (not plugins.get("gpt_attention_plugin"), "gpt_attention_plugin is off"),
            (
                (config.speculative_decoding_mode == "draft_tokens_external") != (config.max_draft_len > 0),
                f"max_draft_len is {config.max_draft_len} with speculative_decoding_mode "
                f"{config.speculative_decoding_mode}",
            ),
        )
        if broken
    ]
    if wrong:
        raise EngineError(f"{path}: cannot be run: {'; '.join(wrong)}. Build it with a recipe of saguaro.")


def _mode(value: object) -> str:
    name = _name(value)
    return _MODES.get(name, name)


def _name(value: object) -> str:
    """An enum's member in lower case, however it was written: PAGED, KVCacheType.PAGED, 2."""
    return str(value).rpartition(".")[2].lower()
