"""The kernels in C++, compiled for this machine's CPU when one is first used, and kept in the user's cache.

A kernel is one source beside this file with functions of C: no headers of Python or PyTorch, so that compiling takes
seconds, any compiler will do, and a library serves every version of either. It is called with the addresses of
contiguous tensors; the caller checks their shapes. Loops over rows or channels are shared out by OpenMP, on the threads
that PyTorch uses too: its wheel brings the library that ours asks for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from saguaro.cache import cache_folder
from saguaro.errors import EngineError

_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120
_KEPT_DAYS = 30


@cache
def load(kernel: str) -> ctypes.CDLL:
    """The library of `kernel`.cpp.

    Raises EngineError without a compiler, when it cannot compile for this CPU, or what it makes cannot be kept or run.
    """
    source = Path(__file__).with_name(f"{kernel}.cpp")
    compiler = find_compiler()
    if compiler is None:
        raise EngineError(
            f"the kernel {kernel} is C++ and compiled when it is first used, but there is no compiler here "
            f"({os.environ.get('CXX') or ', '.join(_COMPILERS)}). Install one (Debian and Ubuntu: apt-get install g++; "
            "$CXX may name it), or build the engine with another dtype."
        )
    # All that the result depends on: the macros tell the compiler's version and what this CPU can do.
    macros = _run([*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull], kernel)
    parts = [source.read_text("utf-8"), *compiler[1:], *_FLAGS, macros]
    library = cache_folder() / "kernels" / f"{kernel}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    with suppress(OSError):  # missing, or of a folder that is not ours to write to
        os.utime(library)  # it is in use: see _remove_unused
    if not library.exists():
        _compile(compiler, source, library)
        _remove_unused(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise EngineError(
            f"the kernel {kernel} cannot be loaded ({error}). Delete {library}, or name a folder from which programs "
            "may run in $XDG_CACHE_HOME."
        ) from error


def find_compiler() -> list[str] | None:
    """The command of the compiler that would be used: $CXX with its arguments if set, else the first of the usual."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:
        return None  # a quotation without an end names nothing
    commands = [named] if named else [[name] for name in _COMPILERS]
    return next(([path, *arguments] for name, *arguments in commands if (path := shutil.which(name))), None)


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Aside, then renamed: whoever compiles the same at the same time never sees half a library.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            _run([*compiler, *_FLAGS, str(source), "-o", str(made)], source.stem)
            made.rename(library)
    except OSError as error:
        raise EngineError(
            f"the kernel {source.stem} cannot be kept in {library.parent} ({error.strerror}). Make room there, or name "
            "another folder in $XDG_CACHE_HOME."
        ) from error


def _remove_unused(library: Path) -> None:
    """Remove this kernel's libraries that nobody has loaded for long, now that there is one more.

    Those of other sources, flags or CPUs are not superseded: another release, or another machine, may share the folder.
    A process that has loaded a library keeps it when its file is gone, and who misses one compiles it again.
    """
    kernel = library.name.rpartition("-")[0]
    oldest = time.time() - _KEPT_DAYS * 24 * 3600
    for other in library.parent.glob(f"{kernel}-*.so"):
        with suppress(OSError):  # gone already, or not ours to remove
            if other.stat().st_mtime < oldest:
                other.unlink()


def _run(command: list[str], kernel: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS)
    except OSError as error:
        raise EngineError(f"{command[0]} cannot be run ({error.strerror}). Name another compiler in $CXX.") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"compiling the kernel {kernel} took more than {_SECONDS} s: {command[0]}") from error
    if done.returncode != 0:
        raise EngineError(
            f"the kernel {kernel} cannot be compiled on this machine ({' '.join(command)}):\n{done.stderr[-2000:]}\n"
            "Name another compiler in $CXX, or build the engine with another dtype."
        )
    return done.stdout
