"""A build recipe: which model becomes an engine directory, for which engine and in which form. Read from one YAML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal

from saguaro.build.model_shape import Family
from saguaro.build.models import CATALOGUE
from saguaro.engines.manifest import FORMAT, Dtype, EngineName, file_sha256
from saguaro.engines.profile import Profile
from saguaro.engines.schema import nearest, read_yaml
from saguaro.errors import ConfigError

# What each engine computes in.
_DTYPES: Final[dict[str, tuple[Dtype, ...]]] = {
    "pytorch": ("float32", "bfloat16", "int8", "int4"),
    "trtllm": ("bfloat16", "fp8"),
    "tensorrt": ("float32", "bfloat16"),
    "simulated": ("bfloat16",),
}
_REDUCED_HEADS: Final = ("pytorch", "tensorrt")  # engines that can leave tokens out of the draft's head


@dataclass(frozen=True)
class Tiny:
    """A small random model in place of real weights, for tests and trials. Equal recipes give equal bytes.

    Every tensor depends on its name and the seed alone. So a recipe with fewer `layers` is the first layers of the
    larger one, and `noise` (relative to each tensor's spread) moves every weight a little: a draft that agrees with its
    target often, but not always. Tokenizers of equal `vocab_size` are equal.
    """

    family: Family
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    vocab_size: int = 500  # ids of the tokenizer; the model has rows for the next multiple of 64
    max_model_len: int = 512
    seed: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "heads", "kv_heads", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % (2 * self.heads):
            raise ConfigError(f"hidden_size must be a multiple of 2 * heads ({2 * self.heads}), got {self.hidden_size}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}")
        if self.noise < 0:
            raise ConfigError(f"noise must be 0 or more, got {self.noise}")


Switch = Literal["enable", "disable"]


@dataclass(frozen=True)
class Plugins:
    """Switches of TensorRT-LLM's PluginConfig that are a matter of speed; None leaves its default.

    TensorRT-LLM drops a plugin key it does not know without a word, so what is not listed here is refused. What
    speculation needs (paged KV, paged context attention, packed input) is not a choice.
    """

    gemm_plugin: Literal["auto", "bfloat16", "fp8", "disable"] | None = None  # None: auto, or disable for fp8
    low_latency_gemm_plugin: Literal["fp8", "disable"] | None = None
    low_latency_gemm_swiglu_plugin: Literal["fp8", "disable"] | None = None
    gemm_swiglu_plugin: Literal["fp8", "disable"] | None = None
    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] | None = None
    reduce_fusion: Switch | None = None
    user_buffer: Switch | None = None
    multiple_profiles: Switch | None = None


@dataclass(frozen=True)
class Simulated:
    """No model at all: forwards wait as long as a device would. Target and draft share vocabulary, limit and seed."""

    profile: Profile
    vocab_size: int = 500  # ids of the tokenizer
    max_model_len: int = 8192


@dataclass(frozen=True)
class TrtllmOptions:
    """What a TensorRT-LLM engine is compiled for."""

    max_batch_size: int = 8  # requests in one iteration
    max_draft_len: int = 8  # draft tokens that can be verified; 0: an engine that only generates
    max_num_tokens: int | None = None  # tokens of one iteration; None: max_batch_size sequences of full length
    tokens_per_block: int = 32  # of the KV cache
    kv_dtype: Literal["bfloat16", "fp8"] | None = None  # None: as the recipe's dtype
    gather_generation_logits: bool = False  # whether requests may ask for logits
    calibration: str = "cnn_dailymail"  # fp8: data set on the hub, or local folder, that sets the scales
    calibration_samples: int = 512
    workers: int | None = None  # processes that convert and compile ranks side by side; None: one per rank
    gpu: Literal["a100-80gb", "h100-80gb", "h200-141gb"] = "h100-80gb"  # the card that memory is planned for
    plugins: Plugins = Plugins()

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "calibration_samples", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_draft_len < 0:
            raise ConfigError(f"max_draft_len must be 0 or more, got {self.max_draft_len}")
        if self.tokens_per_block < 8 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise ConfigError(f"tokens_per_block must be a power of two, at least 8, got {self.tokens_per_block}")


@dataclass(frozen=True)
class TensorrtOptions:
    """Limits a TensorRT engine for the draft is compiled for, and what it is tuned for."""

    max_batch_size: int = 8  # sequences of one forward
    max_rows: int = 512  # of one forward: branches of all sequences together. Longer prompts take several forwards
    usual_rows: int = 32  # branches of a usual batch: kernels are chosen and tiled for it
    block_size: int = 16  # KV slots of a block: that of the deployment's draft
    max_kv_tokens: int = 131072  # of the KV pool
    branch_columns: int = 1024  # KV slots of one sequence's branches: fan-out budget times lookahead
    splits: int = 8  # parts a sequence's columns are attended in, side by side: more for few, long sequences

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_rows", "block_size", "branch_columns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.usual_rows <= self.max_rows:
            raise ConfigError(f"usual_rows must be between 1 and max_rows ({self.max_rows}), got {self.usual_rows}")
        if self.max_kv_tokens < self.block_size:
            raise ConfigError(f"max_kv_tokens must be at least a block ({self.block_size}), got {self.max_kv_tokens}")


@dataclass(frozen=True)
class Recipe:
    """What to build. Exactly one of `model`, `tiny` and `simulated` says from what."""

    name: str
    engine: EngineName
    model: str | None = None  # of the catalogue, a hub id, or a path (relative to the recipe)
    tiny: Tiny | None = None
    simulated: Simulated | None = None
    dtype: Dtype = "bfloat16"
    tp: int = 1
    max_model_len: int | None = None  # tokens; the model's own if not given
    # Token ids whose logits a draft computes, end and added tokens among them: the most frequent ones, by the files
    # (relative to the recipe) or else by the tokenizer's own order. None: all. What is left out is never proposed.
    draft_vocab: int | None = None
    vocab_text: tuple[str, ...] | None = None
    trtllm: TrtllmOptions | None = None
    tensorrt: TensorrtOptions | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise ConfigError(f"name must be letters, digits, '.', '_' and '-', got {self.name!r}")
        if [self.model, self.tiny, self.simulated].count(None) != 2:
            raise ConfigError("exactly one of model, tiny and simulated must be given")
        if (self.simulated is not None) != (self.engine == "simulated"):
            raise ConfigError(f"engine must be simulated for a `simulated:` section, and only then, got {self.engine}")
        if self.tp < 1:
            raise ConfigError(f"tp must be at least 1, got {self.tp}")
        if self.dtype not in _DTYPES[self.engine]:
            raise ConfigError(
                f"dtype {self.dtype} is not for the engine {self.engine}; it takes {', '.join(_DTYPES[self.engine])}"
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1, got {self.max_model_len}")
        if self.draft_vocab is not None and self.engine not in _REDUCED_HEADS:
            raise ConfigError(
                f"draft_vocab is not for the engine {self.engine}, but for {' and '.join(_REDUCED_HEADS)}: remove it"
            )
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ConfigError(f"draft_vocab must be at least 1, or left out for all tokens, got {self.draft_vocab}")
        if self.vocab_text is not None and (self.draft_vocab is None or not self.vocab_text):
            raise ConfigError(
                "vocab_text names the files in which the tokens of draft_vocab are counted: give both, and a file"
            )
        for section in ("trtllm", "tensorrt"):
            if getattr(self, section) is not None and self.engine != section:
                raise ConfigError(f"{section} is given, but engine is {self.engine}: remove the section")

    def digest(self, source_sha256: str) -> str:
        """Hash of everything an engine directory depends on; of weights and texts the bytes, wherever they lie.

        Raises ConfigError for a text that cannot be read.
        """
        # Without what is not given, so that an option added later does not change the hash of recipes without it.
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None and key != "model"}
        if self.vocab_text is not None:
            given["vocab_text"] = [_text_sha256(path) for path in self.vocab_text]
        text = json.dumps([FORMAT, source_sha256, given], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_recipe(path: Path) -> Recipe:
    """Raises ConfigError naming file, key and the nearest valid key."""
    recipe = read_yaml(path, Recipe)
    if recipe.vocab_text is not None:
        texts = tuple(os.path.abspath(path.parent / Path(text).expanduser()) for text in recipe.vocab_text)
        recipe = dataclasses.replace(recipe, vocab_text=texts)
    if recipe.model is None or recipe.model in CATALOGUE:
        return recipe
    beside = path.parent / Path(recipe.model).expanduser()
    return dataclasses.replace(recipe, model=os.path.abspath(beside)) if beside.exists() else recipe


def _text_sha256(path: str) -> str:
    try:
        return file_sha256(Path(path))
    except OSError as error:
        raise ConfigError(f"vocab_text: {path} cannot be read ({error}). Name files of text that are there.") from error


def find_recipe(name_or_path: str) -> Recipe:
    """A YAML file, or a shipped recipe by name. Raises ConfigError naming the nearest."""
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        return read_recipe(path)
    if name_or_path in shipped_recipes():
        return read_recipe(_shipped() / f"{name_or_path}.yaml")
    raise ConfigError(
        f"there is no recipe named {name_or_path!r}{nearest(name_or_path, shipped_recipes())}; "
        f"shipped: {', '.join(shipped_recipes())}; or give the path of a .yaml file."
    )


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.stem for file in _shipped().glob("*.yaml"))


def _shipped() -> Path:
    # Of a package without __init__, as `saguaro.build` is, only sub-paths can be turned into text.
    return Path(str(resources.files("saguaro.build") / "recipes"))
