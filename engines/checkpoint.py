"""An engine directory's weights as a Hugging Face model, mapped rather than copied.

The model is built without memory and then given the tensors of the mapped file: starting takes no second copy, and
processes of one machine share the pages. Only what Hugging Face computes and does not store (the rotary frequencies)
is computed here. No code but this package's and that of `transformers` is ever run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from saguaro.errors import EngineError, ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
_FREQUENCIES_DEPEND_ON_BATCH = ("dynamic", "longrope")


def weights_file(rank: int, tp: int) -> str:
    """Name of the file with a rank's share of the weights."""
    return "model.safetensors" if tp == 1 else f"model-{rank}-of-{tp}.safetensors"


def load_config(directory: Path, max_model_len: int) -> Any:
    """The directory's model configuration. Raises EngineError for a model that would not be computed exactly."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{directory / 'config.json'}: is not a model configuration ({error}). Build the engine again."
        ) from error
    check_config(config, max_model_len)
    return config


def check_config(config: Any, max_model_len: int) -> None:
    """Raises EngineError for a model whose attention is not plain causal attention over the whole context."""
    if config.model_type not in FAMILIES:
        raise EngineError(
            f"the pytorch engine does not run models of type {config.model_type!r}; it runs {', '.join(FAMILIES)}."
        )
    rope = config.rope_parameters["rope_type"]
    if rope in _FREQUENCIES_DEPEND_ON_BATCH:
        raise EngineError(
            f"rope_type {rope!r} makes a sequence's positions depend on the others in its batch. Use a model with "
            "rope_type default, linear, llama3 or yarn."
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides and window is not None and window < max_model_len:
        raise EngineError(
            f"the model attends to a sliding window of {window} tokens, which the pytorch engine does not do. Build "
            f"the engine with max_model_len {window} or less (now {max_model_len})."
        )


def load_model(weights: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model in evaluation mode, its weights mapped from the file.

    Raises ModelError when the file cannot be read, or its tensors are not the model's in name, shape or dtype.
    """
    return model_of(_read(weights), config, dtype, weights)


def model_of(tensors: dict[str, Tensor], config: Any, dtype: torch.dtype, source: Path | str) -> Any:
    """The model in evaluation mode on these tensors. Raises ModelError, naming their `source`, when they do not fit."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _check(source, model, tensors)
    model.load_state_dict(tensors, strict=False, assign=True)
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config=config)
    return model.eval().requires_grad_(False)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors ({error}). Build the engine again.") from error
    return tensors


def _check(source: Path | str, model: Any, tensors: dict[str, Tensor]) -> None:
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        shown = "; ".join(
            f"{name}: {_show(found.get(name))}, expected {_show(expected.get(name))}" for name in wrong[:3]
        )
        raise ModelError(
            f"{source}: {len(wrong)} tensors are not those of the model in config.json ({shown}). "
            "Build the engine again."
        )


def _show(tensor: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{str(tensor[0]).removeprefix('torch.')} {list(tensor[1])}"
