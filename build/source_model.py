"""The model a recipe is built from, checked, and what every engine directory has of it: tokenizer and manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import saguaro
from saguaro.build.draft_vocab import frequent_tokens
from saguaro.build.recipe import Recipe
from saguaro.build.weights import Weights, stored_shapes
from saguaro.engines.checkpoint import check_config
from saguaro.engines.manifest import (
    DRAFT_VOCAB,
    FORMAT,
    TOKENIZER,
    FileRecord,
    Manifest,
    file_sha256,
    token_map,
    token_map_digest,
)
from saguaro.errors import ConfigError, ModelError

_PACKAGES = ("torch", "transformers", "gguf", "safetensors")


class SourceModel:
    """Raises ConfigError when the recipe does not suit the model, EngineError when no engine can run it, ModelError
    when the weights are not the model's.
    """

    def __init__(self, recipe: Recipe, weights: Weights) -> None:
        self.recipe = recipe
        self.weights = weights
        self.config: Any = weights.config
        self.max_model_len = recipe.max_model_len or int(self.config.max_position_embeddings)
        if self.max_model_len > self.config.max_position_embeddings:
            raise ConfigError(
                f"recipe {recipe.name}: max_model_len is {self.max_model_len}, the model's limit is "
                f"{self.config.max_position_embeddings}."
            )
        check_config(self.config, self.max_model_len)
        self.shapes = stored_shapes(self.config)
        self._check_shapes()

    def write_tokenizer(self, directory: Path) -> int:
        """Write tokenizer and generation_config.json; the tokenizer's vocabulary size, highest token id + 1."""
        self.weights.write_tokenizer(directory)
        generation = json.dumps(self.weights.generation, indent=2)
        (directory / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
        vocab_size = max(token_map(directory)) + 1
        rows = self.shapes["model.embed_tokens.weight"][0]
        if vocab_size > rows:
            raise ModelError(
                f"recipe {self.recipe.name}: the tokenizer has ids up to {vocab_size - 1}, but the model has {rows} "
                "rows; they do not belong together."
            )
        return vocab_size

    def write_draft_vocab(self, directory: Path) -> list[int] | None:
        """Write the token ids of the recipe's reduced head beside the tokenizer, and return them; None for a whole one.

        Raises ConfigError when the recipe's draft_vocab does not suit the tokenizer.
        """
        recipe = self.recipe
        if recipe.draft_vocab is None:
            return None
        try:
            tokens = frequent_tokens(
                Tokenizer.from_file(str(directory / TOKENIZER)),
                recipe.draft_vocab,
                self.weights.generation["eos_token_id"],
                [Path(text) for text in recipe.vocab_text or ()],
            )
        except ConfigError as error:
            raise ConfigError(f"recipe {recipe.name}: {error}") from error
        (directory / DRAFT_VOCAB).write_text(json.dumps(tokens) + "\n", encoding="utf-8")
        return tokens

    def write_manifest(
        self,
        directory: Path,
        source_sha256: str,
        *,
        device: str = "any",
        shards: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
        files: Mapping[str, FileRecord] | None = None,
    ) -> None:
        """Write the manifest of a directory that holds everything else. `files`: records that are known already."""
        records = dict(files or {})
        for file in sorted(directory.iterdir()):
            if file.name not in records:
                records[file.name] = FileRecord(file.stat().st_size, file_sha256(file))
        tokens = token_map(directory)
        Manifest(
            format=FORMAT,
            recipe=self.recipe.name,
            recipe_hash=self.recipe.digest(source_sha256),
            engine=self.recipe.engine,
            model=self.recipe.model or "tiny",
            source_sha256=source_sha256,
            family=self.config.model_type,
            dtype=self.recipe.dtype,
            tp=self.recipe.tp,
            vocab_size=max(tokens) + 1,
            max_model_len=self.max_model_len,
            eos_token_ids=tuple(self.weights.generation["eos_token_id"]),
            token_map_sha256=token_map_digest(tokens),
            device=device,
            shards=dict(shards or {}),
            versions={
                "saguaro": saguaro.__version__,
                **{name: version(name) for name in _PACKAGES},
                **(versions or {}),
            },
            files=records,
        ).write(directory)

    def _check_shapes(self) -> None:
        found = {name: shape for name, shape in self.weights.shapes.items() if not self._is_redundant(name)}
        wrong = [name for name in self.shapes.keys() | found.keys() if self.shapes.get(name) != found.get(name)]
        if wrong:
            shown = "; ".join(
                f"{name} is {found.get(name, 'missing')}, not {self.shapes.get(name, 'expected')}"
                for name in sorted(wrong)[:5]
            )
            raise ModelError(
                f"{self.recipe.model}: {len(wrong)} tensors are not those of a {self.config.model_type} "
                f"model as its configuration describes it: {shown}. Fetch it again, or choose another model."
            )

    def _is_redundant(self, name: str) -> bool:
        """Whether a stored tensor is computed or tied anyway, so that leaving it out loses nothing."""
        tied = self.config.tie_word_embeddings and name == "lm_head.weight"
        return bool(tied) or name.endswith(".rotary_emb.inv_freq")
