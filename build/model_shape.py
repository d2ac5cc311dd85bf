"""What of a model decides the size of its engines: known for the shipped recipes, read from config.json for others.

So a build can be planned without weights, without a GPU and without transformers. It knows nothing of engines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from saguaro.errors import ConfigError, ModelError

Family = Literal["llama", "qwen2", "qwen3"]

# As Hugging Face and TensorRT-LLM name the class.
ARCHITECTURES: Final = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)


@dataclass(frozen=True)
class ModelShape:
    """The architecture facts of one decoder with RoPE, grouped-query attention and SwiGLU."""

    family: Family
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of embedding and head: config.json's, not the tokenizer's
    max_position_embeddings: int
    tied: bool  # head and embedding are one matrix
    rope_theta: float
    norm_epsilon: float
    rope_type: str | None = None  # None: not scaled
    rope_factor: float | None = None

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of all heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Values in the matrices of all layers: attention's four and the MLP's three."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def layer_vectors(self) -> int:
        """Values in norms and biases of all layers, and the last norm."""
        heads = {"llama": 0, "qwen2": self.query_size + 2 * self.kv_size, "qwen3": 2 * self.head_dim}[self.family]
        return self.layers * (2 * self.hidden_size + heads) + self.hidden_size

    @property
    def vocabulary_matrix(self) -> int:
        """Values in the embedding, and in the head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Values in the published weights."""
        return self.layer_matrices + self.layer_vectors + self.vocabulary_matrix * (1 if self.tied else 2)


def read_shape(folder: Path) -> ModelShape:
    """From a model folder's config.json. Raises ModelError when it says too little, or is another kind of model."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        family = config["model_type"]
        if family not in ARCHITECTURES:
            raise ModelError(f"{path}: is a model of type {family!r}; {', '.join(ARCHITECTURES)} can be built.")
        rope = _rope(config)
        heads = int(config["num_attention_heads"])
        return ModelShape(
            family=family,
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
            rope_theta=float(rope["rope_theta"]),
            norm_epsilon=config["rms_norm_eps"],
            rope_type=rope["rope_type"],
            rope_factor=rope["factor"],
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path}: cannot be read as a model configuration ({error}). Fetch the model again."
        ) from error
    except KeyError as error:
        raise ModelError(f"{path}: says nothing of {error}. Fetch the model again.") from error


def find_shape(model: str, store: Path) -> ModelShape:
    """Of a local folder, of a model already pulled, or known by name. Raises ConfigError when it is none of these."""
    for folder in (Path(model).expanduser(), store / "models" / model.replace("/", "--")):
        if (folder / "config.json").is_file():
            return read_shape(folder)
    if model in SHAPES:
        return SHAPES[model]
    raise ConfigError(
        f"the architecture of {model} is not known here. Pull it (`saguaro models pull {model}`), name a local folder "
        f"with its config.json, or use one of {', '.join(SHAPES)}."
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Base, kind and factor, in the older spelling of config.json or the newer one."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = cast("str | None", scaling.get("rope_type", scaling.get("type")))
    return {
        "rope_theta": scaling.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_type": None if kind == "default" else kind,
        "factor": scaling.get("factor"),
    }


def _llama(hidden: int, layers: int, heads: int, intermediate: int, *, factor: float, tied: bool) -> ModelShape:
    return ModelShape(
        family="llama",
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        tied=tied,
        rope_theta=500_000.0,
        norm_epsilon=1e-5,
        rope_type="llama3",
        rope_factor=factor,
    )


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        family="qwen3",
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        tied=tied,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
    )


# The models of the shipped recipes, as their config.json says.
SHAPES: Final = MappingProxyType(
    {
        "meta-llama/Llama-3.1-70B-Instruct": _llama(8192, 80, 64, 28_672, factor=8.0, tied=False),
        "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 32, 32, 14_336, factor=8.0, tied=False),
        "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 16, 32, 8192, factor=32.0, tied=True),
        "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25_600, tied=False),
        "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    }
)
