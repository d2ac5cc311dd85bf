"""An engine directory without a model: a profile, a small tokenizer, a manifest."""

from __future__ import annotations

from pathlib import Path

import saguaro
from saguaro.build.recipe import Recipe
from saguaro.build.tiny import tiny_tokenizer, write_tiny_tokenizer
from saguaro.engines.manifest import FORMAT, FileRecord, Manifest, file_sha256, token_map, token_map_digest
from saguaro.errors import ConfigError


def write(recipe: Recipe, directory: Path, source_sha256: str) -> None:
    """Write everything into an empty directory, the manifest last."""
    simulated = recipe.simulated
    if simulated is None or recipe.tp != 1:
        raise ConfigError(
            f"recipe {recipe.name}: a simulated engine is one rank, whatever it stands for: leave tp out."
        )
    tokenizer = tiny_tokenizer(simulated.vocab_size)
    write_tiny_tokenizer(tokenizer, directory, simulated.max_model_len)
    simulated.profile.write(directory)
    tokens = token_map(directory)
    special = sorted(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    Manifest(
        format=FORMAT,
        recipe=recipe.name,
        recipe_hash=recipe.digest(source_sha256),
        engine="simulated",
        model="simulated",
        source_sha256=source_sha256,
        family="simulated",
        dtype=recipe.dtype,
        tp=1,
        vocab_size=max(tokens) + 1,
        max_model_len=recipe.max_model_len or simulated.max_model_len,
        eos_token_ids=tuple(special),
        token_map_sha256=token_map_digest(tokens),
        device="any",
        shards={},
        versions={"saguaro": saguaro.__version__},
        files={file.name: FileRecord(file.stat().st_size, file_sha256(file)) for file in sorted(directory.iterdir())},
    ).write(directory)
