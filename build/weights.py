"""Weights as a builder sees them: one model's configuration, tensors by Hugging Face name, tokenizer.

`open_weights` reads what people have: a folder with safetensors, or a GGUF file. Nothing else is read, because other
formats can run code. It knows nothing of recipes and engine directories.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from saguaro.build.models import local_files
from saguaro.engines.checkpoint import FAMILIES
from saguaro.engines.manifest import TOKENIZER
from saguaro.errors import EngineError, ModelError

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class Weights(Protocol):
    """One model. Reading raises ModelError when the weights are damaged."""

    @property
    def config(self) -> Any:
        """transformers' configuration of a causal language model."""
        ...

    @property
    def generation(self) -> dict[str, Any]:
        """Content of generation_config.json; `eos_token_id` is a list."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole tensor, rounded to `dtype`."""
        ...

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and the files that belong to it."""
        ...


def open_weights(path: Path) -> Weights:
    """A local model by its GGUF file or folder. Raises ModelError when it is damaged, EngineError when unsupported."""
    from saguaro.build.gguf_weights import GgufWeights  # it builds on this module

    folder, names = local_files(path)
    return GgufWeights(folder / names[0]) if len(names) == 1 else SafetensorsWeights(folder)


class SafetensorsWeights:
    """A model folder as it is published: config.json, model*.safetensors, tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = self._read_config()
        self._files: dict[str, Any] = {}
        for file in self._weight_files():
            try:
                handle: Any = safe_open(folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{folder / file}: cannot be read as safetensors ({error}); it is missing, truncated or damaged. "
                    "Fetch it again."
                ) from error
            self._files |= dict.fromkeys(handle.keys(), handle)
        self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._files.items()}
        self.generation = self._read_generation()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{self._folder}: tensor {name} holds {tensor.dtype}, not floating point numbers.")
        return tensor.to(dtype)

    def write_tokenizer(self, directory: Path) -> None:
        for name in _TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, directory / name)

    def _read_config(self) -> Any:
        written = self._json("config.json")
        if written.get("model_type") not in FAMILIES:
            raise EngineError(
                f"{self._folder / 'config.json'}: describes a model of type {written.get('model_type')!r}; models of "
                f"type {', '.join(FAMILIES)} can be built."
            )
        if "quantization_config" in written:
            method = written["quantization_config"].get("quant_method", "unknown")
            raise EngineError(
                f"{self._folder / 'config.json'}: the weights are stored quantised ({method}), which cannot be read. "
                "Use the model's unquantised safetensors, or a GGUF file."
            )
        try:
            config = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, StrictDataclassError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{self._folder / 'config.json'}: describes no possible model ({reason}).") from error
        if hasattr(config, "auto_map"):
            del config.auto_map  # it names code that is never run
        return config

    def _weight_files(self) -> list[str]:
        if (self._folder / _INDEX).is_file():
            weight_map = self._json(_INDEX).get("weight_map")
            files = sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
            if not files or any("/" in file for file in files):
                raise ModelError(f"{self._folder / _INDEX}: names no weight files of this folder. Fetch it again.")
            return files
        return [name for name in local_files(self._folder)[1] if name.endswith(".safetensors")]

    def _read_generation(self) -> dict[str, Any]:
        name = "generation_config.json"
        generation = self._json(name) if (self._folder / name).is_file() else {}
        stated = [generation.get("eos_token_id"), self.config.eos_token_id]
        ids = [i for value in stated for i in (value if isinstance(value, list) else [value]) if i is not None]
        return generation | {"eos_token_id": list(dict.fromkeys(ids))}

    def _json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as JSON ({error}). Fetch it again.") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path}: is not a JSON mapping. Fetch it again.")
        return content


def stored_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a model of this configuration needs; a tied head is the embedding's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def save_tokenizer(tokenizer: Tokenizer, directory: Path, **options: object) -> None:
    """Write a tokenizer that was made here; `options` are those of `PreTrainedTokenizerFast`."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options).save_pretrained(
        directory
    )
