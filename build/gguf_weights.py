"""A GGUF file as weights: undoes what llama.cpp's converter did to the configuration and the tensors.

Only what is known to come out right is accepted: an architecture or a rotary scaling that is not listed here is refused
rather than guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from saguaro.build.gguf_file import GgufFile
from saguaro.build.gguf_tokenizer import GgufTokenizer
from saguaro.engines.checkpoint import FAMILIES
from saguaro.errors import EngineError

_MODULES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufWeights:
    """One GGUF file of a supported family. Raises EngineError for another, ModelError when it is damaged."""

    def __init__(self, path: Path) -> None:
        self._file = file = GgufFile(path)
        self._family = file.get("general.architecture", str)
        if self._family not in FAMILIES:
            raise EngineError(
                f"{path}: holds a model of type {self._family!r}; models of type {', '.join(FAMILIES)} can be built."
            )
        if file.optional("split.count", int) not in (None, 0, 1):
            raise file.refusal("it is one piece of a model cut into several files")
        self._names = {_hf_name(name): name for name in file.tensors if name != _ROPE_FACTORS}
        self.shapes = {hf: file.tensors[name].shape for hf, name in self._names.items()}
        self._tokenizer = GgufTokenizer(file)
        self.config = self._read_config()
        self.generation: dict[str, Any] = {
            "bos_token_id": self.config.bos_token_id,
            "eos_token_id": self._tokenizer.end_ids(),
            "pad_token_id": self.config.pad_token_id,
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._file.read(self._names[name], dtype)
        if self._family == "llama" and "self_attn.q_proj." in name:
            return _halves_from_pairs(tensor, self.config.num_attention_heads)
        if self._family == "llama" and "self_attn.k_proj." in name:
            return _halves_from_pairs(tensor, self.config.num_key_value_heads)
        return tensor

    def write_tokenizer(self, directory: Path) -> None:
        self._tokenizer.write(directory, self.config.max_position_embeddings)

    def _read_config(self) -> Any:
        file, family = self._file, self._family
        heads, hidden = self._count("attention.head_count"), self._count("embedding_length")
        layers = {name.split(".")[2] for name in self.shapes if name.startswith("model.layers.")}
        if len(layers) != self._count("block_count"):
            raise file.damage(f"it announces {self._count('block_count')} layers and has {len(layers)}")
        head_dim = file.optional(f"{family}.attention.key_length", int) or hidden // heads
        rotated = file.optional(f"{family}.rope.dimension_count", int)
        if rotated not in (None, head_dim):
            raise file.refusal(f"it rotates {rotated} of {head_dim} dimensions of a head")
        settings = {
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": len(layers),
            "num_attention_heads": heads,
            "num_key_value_heads": file.optional(f"{family}.attention.head_count_kv", int) or heads,
            "head_dim": head_dim,
            "rms_norm_eps": file.get(f"{family}.attention.layer_norm_rms_epsilon", float),
            "max_position_embeddings": self._count("context_length"),
            "rope_parameters": self._rope(head_dim),
            "vocab_size": self.shapes.get("model.embed_tokens.weight", (0,))[0],
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "bos_token_id": file.optional("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
            "pad_token_id": file.optional("tokenizer.ggml.padding_token_id", int),
        }
        if family != "qwen2":  # qwen2 always has biases, and states no such choice
            settings["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self.shapes
        try:
            return AutoConfig.for_model(family, **settings)
        except (ValueError, StrictDataclassError) as error:
            raise file.damage(f"its header describes no possible model ({' '.join(str(error).split())})") from error

    def _count(self, key: str) -> int:
        value = self._file.get(f"{self._family}.{key}", int)
        if value < 1:
            raise self._file.damage(f"its {key} is {value}")
        return value

    def _rope(self, head_dim: int) -> dict[str, Any]:
        scaling = self._file.optional(f"{self._family}.rope.scaling.type", str)
        if scaling not in (None, "none"):
            raise self._file.refusal(f"it scales its rotary positions by {scaling!r}")
        theta = self._file.optional(f"{self._family}.rope.freq_base", float) or 10000.0
        if _ROPE_FACTORS not in self._file.tensors:
            return {"rope_type": "default", "rope_theta": theta}
        # The file holds the outcome of Llama 3's scaling; the configuration needs what it was computed from.
        stored = self._file.read(_ROPE_FACTORS, torch.float32)
        parameters = _LLAMA3_ROPE | {"rope_theta": theta, "factor": float(stored.max())}
        expected = _llama3_factors(parameters, head_dim)
        if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-3):
            raise self._file.refusal("its rotary factors are not those of Llama 3's scaling")
        return parameters


def _hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; an unknown one keeps its name, so that it is noticed rather than lost."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_MODULES:
        return f"model.layers.{parts[1]}.{_LAYER_MODULES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _MODULES:
        return f"{_MODULES[parts[0]]}.{parts[1]}"
    return name


def _halves_from_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from GGUF's rotary layout (x0 y0 x1 y1 ...) to Hugging Face's (x0 x1 ... y0 y1 ...)."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] what each rotary frequency is divided by under Llama 3's scaling."""
    frequency = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    rotations = rope["original_max_position_embeddings"] * frequency / (2 * torch.pi)  # over the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((rotations - low) / (high - low)).clamp(0, 1)  # share of the frequency that is not scaled
    factors: Tensor = 1 / ((1 - kept) / rope["factor"] + kept)
    return factors
