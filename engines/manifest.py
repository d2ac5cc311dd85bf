"""What an engine directory holds, and whether it fits: read before anything is loaded.

A directory is complete exactly when its manifest is there, because the manifest is written last. The manifest also says
what must be equal between target and draft: the token ids. It knows nothing of how a directory is built or run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tokenizers import Tokenizer

from saguaro.engines.schema import parse
from saguaro.errors import ConfigError, EngineError, ModelError

FORMAT = 1
FILE = "manifest.json"
TOKENIZER = "tokenizer.json"
DRAFT_VOCAB = "draft_vocab.json"  # the token ids of a reduced head, ascending; absent where the head is whole

EngineName = Literal["pytorch", "trtllm", "tensorrt", "simulated"]
Dtype = Literal["float32", "bfloat16", "int8", "int4", "fp8"]
Bits = Literal[8, 4]  # of a quantised weight
# Stored as bfloat16, quantised when loaded, and computed on the CPU by kernels in C++, which are compiled there.
QUANTISED: Final[Mapping[Dtype, Bits]] = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class FileRecord:
    """One file of the directory."""

    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of an engine directory without loading it."""

    format: int
    recipe: str  # its name
    recipe_hash: str  # of the recipe, the weights it was made from and the format
    engine: EngineName
    model: str  # as the recipe names it
    source_sha256: str  # of the weights
    family: str  # the model type: llama, qwen2, qwen3
    dtype: Dtype  # QUANTISED: stored as bfloat16; fp8: the layers' matrices, calibrated
    tp: int  # shards: model-RANK-of-TP.safetensors, or model.safetensors for 1
    vocab_size: int  # highest token id of the tokenizer + 1; the model may have more rows (padding)
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    token_map_sha256: str  # `token_map_digest`
    device: str  # any, or the compute capability the engine was compiled for
    # How each module is split over ranks, by pattern: "colwise" (output rows, and its bias), "rowwise" (input columns;
    # the bias is on rank 0 and zero elsewhere, so that the ranks' outputs add up to the layer's), "whole".
    shards: dict[str, str]
    versions: dict[str, str]  # packages that built it
    files: dict[str, FileRecord] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write the manifest, durably. To be called when every other file of the directory is."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, ensure_ascii=False)
        with (directory / FILE).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read the manifest and check that the directory is what it says, by names and sizes.

        Raises EngineError when there is no complete engine directory, it has another format, or a file does not fit.
        """
        path = directory / FILE
        if not path.is_file():
            raise EngineError(f"{directory}: holds no complete engine ({FILE} is missing). Run `saguaro build` first.")
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: cannot be read ({error}). Delete the directory and build it again.") from error
        version = document.get("format") if isinstance(document, dict) else None
        if version != FORMAT:
            raise EngineError(f"{path}: has format {version}; this version of saguaro reads {FORMAT}. Build it again.")
        try:
            manifest = parse(document, cls, str(path))
        except ConfigError as error:
            raise EngineError(f"{error} Delete the directory and build it again.") from error
        for name, record in manifest.files.items():
            size = (directory / name).stat().st_size if (directory / name).is_file() else None
            if size != record.size:
                found = "missing" if size is None else f"{size} bytes long"
                raise EngineError(
                    f"{directory / name}: is {found}, its manifest says {record.size} bytes. "
                    "Delete the directory and build it again."
                )
        return manifest

    @property
    def reduced(self) -> bool:
        """Whether its head leaves tokens out: an engine that can draft, but not be a target."""
        return DRAFT_VOCAB in self.files

    def damaged(self, directory: Path) -> list[str]:
        """Names of files whose bytes are not those that were built. Reads everything: for diagnosis, not start-up."""
        return [name for name, record in self.files.items() if file_sha256(directory / name) != record.sha256]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def token_map(directory: Path) -> dict[int, str]:
    """Every token id of the directory's tokenizer and its token, added ones included. Raises ModelError without it."""
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    except Exception as error:  # the library raises nothing narrower for a file it cannot read
        raise ModelError(f"{directory / TOKENIZER}: is not a tokenizer ({error}). Fetch the model again.") from error
    return {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}


def token_map_digest(tokens: Mapping[int, str]) -> str:
    """SHA-256 of an id -> token map; equal exactly when the maps are."""
    digest = hashlib.sha256()
    for index in sorted(tokens):
        # JSON quotes line ends inside a token, so no two maps give the same lines.
        digest.update(f"{index} {json.dumps(tokens[index])}\n".encode())
    return digest.hexdigest()


def check_target(directory: Path) -> None:
    """Raises EngineError for an engine that would never emit some tokens."""
    if Manifest.load(directory).reduced:
        raise EngineError(
            f"{directory}: was built with draft_vocab, so that its head leaves tokens out. It can draft, but the "
            "distribution of a target has to be whole. Build the target from a recipe without draft_vocab."
        )


def compare_token_maps(target: Path, draft: Path) -> None:
    """Check that two engine directories mean the same by every token id.

    Compares what the tokenizers know; padding rows of the models do not matter. Raises ConfigError with the first five
    ids that differ, EngineError when a directory is not complete.
    """
    if Manifest.load(target).token_map_sha256 == Manifest.load(draft).token_map_sha256:
        return
    ours, theirs = token_map(target), token_map(draft)
    different = sorted(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))

    def name(tokens: Mapping[int, str], index: int) -> str:
        return repr(tokens[index]) if index in tokens else "nothing"

    shown = "; ".join(f"{i} is {name(ours, i)} / {name(theirs, i)}" for i in different[:5])
    raise ConfigError(
        f"the draft {draft} cannot speculate for the target {target}: {len(different)} token ids differ "
        f"(target / draft): {shown}. Choose a draft with the target's tokenizer."
    )
