"""Tiny random Hugging Face models, and engine directories made from them: quick, and peaked enough to notice a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from saguaro.engines.manifest import FileRecord, Manifest

LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "llama3.1": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
FAMILIES = tuple(_CLASSES)
VOCAB_ROWS = 512  # of the model; the tokenizer would know fewer


def tiny_model(family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> Any:
    """A model of 3 layers with 6 query heads on 2 KV heads; every call with the same arguments has the same weights."""
    config_class, model_class = _CLASSES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_ROWS,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24 if family == "qwen3" else 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if family == "llama3.1":
        settings["rope_parameters"] = dict(LLAMA_3_1_ROPE)
    model = model_class(config_class(**(settings | options)))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # Norm weights near 1; matrices wide enough that attention is far from uniform; biases that matter.
        mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, 1.5 * parameter.shape[-1] ** -0.5)
        # Parameters only: `model.to` would round the rotary frequencies, which Hugging Face keeps in float32.
        parameter.data = (mean + deviation * torch.randn(parameter.shape, generator=generator)).to(dtype)
    model.tie_weights()
    return model.eval()


def save_engine(model: Any, directory: Path, **fields: Any) -> Manifest:
    """Write the model as an engine directory; `fields` replace those of its manifest."""
    model.config.to_json_file(directory / "config.json")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values: dict[str, Any] = {
        "format": 1,
        "recipe": "test",
        "recipe_hash": "0" * 64,
        "engine": "pytorch",
        "model": "tiny",
        "source_sha256": "0" * 64,
        "family": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tp": 1,
        "vocab_size": 500,
        "max_model_len": 128,
        "eos_token_ids": (2,),
        "token_map_sha256": "0" * 64,
        "device": "cpu",
        "shards": {},
        "versions": {},
        "files": {
            name: FileRecord((directory / name).stat().st_size, "0" * 64)
            for name in ("config.json", "model.safetensors")
        },
    }
    manifest = Manifest(**(values | fields))
    manifest.write(directory)
    return manifest
