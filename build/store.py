"""The folder where models and engines are kept, and what writing into it safely needs.

    models/NAME/...            pulled weights, complete by construction: written aside, checked, then renamed
    models/.partial/NAME/...   what an interrupted pull had already fetched
    engines/NAME-HASH/...      engine directories, likewise renamed into place
    digests/, locks/           remembered SHA-256 sums of files; lock files

It knows nothing of where weights come from or of what an engine is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from saguaro.engines.manifest import file_sha256
from saguaro.errors import CapacityError, ConfigError

log = logging.getLogger(__name__)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises CapacityError unless the disk under `folder` has `needed` bytes free."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CapacityError(
            f"not enough disk space under {folder} for {what}: {size_text(needed)} needed, {size_text(free)} "
            "available. Free some space, or choose another store."
        )


def size_text(size: int) -> str:
    """Bytes for people: 1.12 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} bytes"


@contextmanager
def locked(store: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the store's lock `name`; yields whether it is held (always, when waiting). Freed when the process dies."""
    with writing(store):
        path = store / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            log.info("another process is working on %s; waiting for it", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns the operating system's refusals to write under `folder` into CapacityError or ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"the disk under {folder} is full ({error.strerror}). Free some space.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise ConfigError(
                f"{error.filename or folder}: cannot be used ({error.strerror}). Check its permissions, or choose "
                "another store."
            ) from error
        raise


@contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on a terminal, one log line elsewhere. Yields a function of the bytes advanced."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log.info("%s (%s)", what, size_text(total))
        yield lambda size: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda size: bar.advance(task, size)


def digests(folder: Path, names: list[str], store: Path) -> dict[str, str]:
    """SHA-256 of each named file of a folder. Files whose size and time are as remembered are not read again."""
    remembered_at = store / "digests" / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]}.json"
    try:
        remembered = json.loads(remembered_at.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        remembered = {}
    known = dict(remembered)
    for name in names:
        state = (folder / name).stat()
        entry = known.get(name, {})
        if (entry.get("size"), entry.get("mtime_ns")) != (state.st_size, state.st_mtime_ns):
            entry = {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "sha256": file_sha256(folder / name)}
        known[name] = entry
    if known != remembered:
        with writing(store):
            remembered_at.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=remembered_at.parent, delete=False) as beside:
                json.dump(known, beside)
            os.replace(beside.name, remembered_at)
    return {name: known[name]["sha256"] for name in names}


def combined_digest(parts: dict[str, str]) -> str:
    """One SHA-256 for several files: the file's own if there is one, else over the sorted (name, SHA-256) pairs."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return hashlib.sha256("".join(f"{parts[name]} {name}\n" for name in sorted(parts)).encode()).hexdigest()
