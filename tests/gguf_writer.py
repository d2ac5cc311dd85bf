"""Writes Hugging Face models as GGUF files the way llama.cpp's converter does, for tests that read them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from torch import Tensor

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, module = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[module]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Each head's rows as llama.cpp rotates them: row i of the first half, row i of the second half, ..."""
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return torch.stack([halves[:, 0], halves[:, 1]], dim=2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Tokenizer,
    *,
    split: str = "qwen2",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write the model with matrices stored as `kind`; `metadata` and `tensors` are added, or replace what there is."""
    config, family = model.config, model.config.model_type
    writer = GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    _add_tokenizer(writer, tokenizer, config.vocab_size, split)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    stored = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight" or not tied(model)}
    for name, tensor in stored.items():
        if family == "llama" and ".q_proj." in name:
            tensor = interleaved(tensor, config.num_attention_heads)
        if family == "llama" and ".k_proj." in name:
            tensor = interleaved(tensor, config.num_key_value_heads)
        plain = tensor.dim() == 1
        used = GGMLQuantizationType.F32 if plain else kind
        writer.add_tensor(gguf_name(name), quantize(tensor.float().numpy(), used), raw_dtype=used)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def rounded(tensor: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """What is left of a tensor after it was stored as `kind`."""
    if tensor.dim() == 1:
        return tensor
    return torch.from_numpy(np.array(dequantize(quantize(tensor.numpy(), kind), kind)))


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, rows: int, split: str) -> None:
    content = json.loads(tokenizer.to_str())
    tokens = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(rows)])
    writer.add_token_types([added.get(i, NORMAL if i in tokens else UNUSED) for i in range(rows)])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_chat_template("{{ messages[0].content }}")
