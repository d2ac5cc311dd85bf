"""Weights into an engine directory for the pytorch engine.

model.safetensors, or model-RANK-of-TP.safetensors     cast and cut, tied embeddings once
config.json, generation_config.json                    of the whole model
tokenizer.json, ...                                    as the weights came with
draft_vocab.json                                       the token ids of a reduced head
manifest.json                                          last: its presence means the directory is complete
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from saguaro.build.recipe import Recipe
from saguaro.build.shards import SafetensorsWriter, ShardPlan
from saguaro.build.source_model import SourceModel
from saguaro.build.weights import Weights
from saguaro.engines.manifest import FileRecord

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}


class PytorchBuild:
    """One build, checked before anything is written. Raises what `SourceModel` raises."""

    def __init__(self, recipe: Recipe, weights: Weights) -> None:
        self._model = SourceModel(recipe, weights)
        self._dtype = _DTYPES[recipe.dtype]
        self._plan = ShardPlan(self._model.config, recipe.tp)
        self._shares = self._plan.shapes(self._model.shapes)

    @property
    def size(self) -> int:
        """Bytes of weights that will be written."""
        values = sum(torch.Size(shape).numel() for shape in self._shares.values())
        return values * self._dtype.itemsize * self._plan.tp

    def write(self, directory: Path, source_sha256: str, advance: Callable[[int], None]) -> None:
        """Write everything into an empty directory, the manifest last. `advance` is told of bytes written."""
        records = self._write_weights(directory, advance)
        self._model.write_tokenizer(directory)
        self._model.write_draft_vocab(directory)
        self._model.config.dtype = self._dtype
        self._model.config.save_pretrained(directory)
        self._model.write_manifest(directory, source_sha256, shards=self._plan.rules, files=records)

    def _write_weights(self, directory: Path, advance: Callable[[int], None]) -> dict[str, FileRecord]:
        files = [self._plan.file(rank) for rank in range(self._plan.tp)]
        with ExitStack() as stack:
            writers = [
                stack.enter_context(SafetensorsWriter(directory / file, self._dtype, self._shares)) for file in files
            ]
            for name in self._model.shapes:
                tensor = self._model.weights.read(name, self._dtype)
                split = self._plan.split(name)
                for rank, writer in enumerate(writers):
                    share = split.cut(tensor, rank, self._plan.tp)
                    writer.write(name, share)
                    advance(share.numel() * share.itemsize)
            return {file: writer.close() for file, writer in zip(files, writers, strict=True)}
