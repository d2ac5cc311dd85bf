"""Weights into an engine directory for the pytorch engine.

model.safetensors, or model-RANK-of-TP.safetensors     cast and cut, tied embeddings once
config.json, generation_config.json                    of the whole model
tokenizer.json, ...                                    as the weights came with
manifest.json                                          last: its presence means the directory is complete
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch

import saguaro
from saguaro.build.recipe import Recipe
from saguaro.build.shards import SafetensorsWriter, ShardPlan
from saguaro.build.weights import Weights, stored_shapes
from saguaro.engines.checkpoint import check_config
from saguaro.engines.manifest import FORMAT, FileRecord, Manifest, file_sha256, token_map, token_map_digest
from saguaro.errors import ConfigError, ModelError

_PACKAGES = ("torch", "transformers", "gguf", "safetensors")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


class PytorchBuild:
    """One build, checked before anything is written.

    Raises ConfigError when the recipe does not suit the model, EngineError when the engine cannot run it, ModelError
    when the weights are not the model's.
    """

    def __init__(self, recipe: Recipe, weights: Weights) -> None:
        self._recipe = recipe
        self._weights = weights
        self._dtype = _DTYPES[recipe.dtype]
        config = weights.config
        self._max_model_len = recipe.max_model_len or config.max_position_embeddings
        if self._max_model_len > config.max_position_embeddings:
            raise ConfigError(
                f"recipe {recipe.name}: max_model_len is {self._max_model_len}, the model's limit is "
                f"{config.max_position_embeddings}."
            )
        check_config(config, self._max_model_len)
        self._shapes = stored_shapes(config)
        self._check_shapes()
        self._plan = ShardPlan(config, recipe.tp)
        self._shares = self._plan.shapes(self._shapes)

    @property
    def size(self) -> int:
        """Bytes of weights that will be written."""
        values = sum(torch.Size(shape).numel() for shape in self._shares.values())
        return values * self._dtype.itemsize * self._plan.tp

    def write(self, directory: Path, source_sha256: str, advance: Callable[[int], None]) -> None:
        """Write everything into an empty directory, the manifest last. `advance` is told of bytes written."""
        records = self._write_weights(directory, advance)
        self._weights.write_tokenizer(directory)
        tokens = token_map(directory)
        vocab_size = max(tokens) + 1
        rows = self._shapes["model.embed_tokens.weight"][0]
        if vocab_size > rows:
            raise ModelError(
                f"recipe {self._recipe.name}: the tokenizer has ids up to {vocab_size - 1}, but the model has {rows} "
                "rows; they do not belong together."
            )
        config = self._weights.config
        config.dtype = self._dtype
        config.save_pretrained(directory)
        generation = self._weights.generation
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        for file in sorted(directory.iterdir()):
            if file.name not in records:
                records[file.name] = FileRecord(file.stat().st_size, file_sha256(file))
        Manifest(
            format=FORMAT,
            recipe=self._recipe.name,
            recipe_hash=self._recipe.digest(source_sha256),
            engine="pytorch",
            model=self._recipe.model or "tiny",
            source_sha256=source_sha256,
            family=config.model_type,
            dtype=self._recipe.dtype,
            tp=self._plan.tp,
            vocab_size=vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=tuple(generation["eos_token_id"]),
            token_map_sha256=token_map_digest(tokens),
            device="any",
            shards=self._plan.rules,
            versions={"saguaro": saguaro.__version__, **{name: version(name) for name in _PACKAGES}},
            files=records,
        ).write(directory)

    def _write_weights(self, directory: Path, advance: Callable[[int], None]) -> dict[str, FileRecord]:
        files = [self._plan.file(rank) for rank in range(self._plan.tp)]
        with ExitStack() as stack:
            writers = [
                stack.enter_context(SafetensorsWriter(directory / file, self._dtype, self._shares)) for file in files
            ]
            for name in self._shapes:
                tensor = self._weights.read(name, self._dtype)
                split = self._plan.split(name)
                for rank, writer in enumerate(writers):
                    share = split.cut(tensor, rank, self._plan.tp)
                    writer.write(name, share)
                    advance(share.numel() * share.itemsize)
            return {file: writer.close() for file, writer in zip(files, writers, strict=True)}

    def _check_shapes(self) -> None:
        found = {name: shape for name, shape in self._weights.shapes.items() if not self._is_redundant(name)}
        wrong = [name for name in self._shapes.keys() | found.keys() if self._shapes.get(name) != found.get(name)]
        if wrong:
            shown = "; ".join(
                f"{name} is {found.get(name, 'missing')}, not {self._shapes.get(name, 'expected')}"
                for name in sorted(wrong)[:5]
            )
            raise ModelError(
                f"{self._recipe.model}: {len(wrong)} tensors are not those of a {self._weights.config.model_type} "
                f"model as its configuration describes it: {shown}. Fetch it again, or choose another model."
            )

    def _is_redundant(self, name: str) -> bool:
        """Whether a stored tensor is computed or tied anyway, so that leaving it out loses nothing."""
        tied = self._weights.config.tie_word_embeddings and name == "lm_head.weight"
        return bool(tied) or name.endswith(".rotary_emb.inv_freq")
