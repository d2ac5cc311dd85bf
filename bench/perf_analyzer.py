"""Triton's load generator, perf_analyzer: found, or installed where it can be.

Its wheel needs glibc 2.38. Where the system's is older, the six libraries it links against come from a newer release of
the distribution, unpacked into a private folder: the system stays as it is.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from saguaro.errors import LaunchError

_log = logging.getLogger(__name__)
VERSION = "2.60.0"
_GLIBC = (2, 38)
_RELEASE = "trixie"  # Debian's first with that glibc
_LIBRARIES = ("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libssl3t64", "libzstd1")
_LOADER = "ld-linux-x86-64.so.2"
_TIMEOUT = 600.0  # seconds for one download
_PLACEHOLDER = 100_000  # bytes: what pip installs as `perf-analyzer` on an older system is smaller, and does nothing


def perf_analyzer(store: Path) -> list[str]:
    """The command that runs it: the one on PATH, else the one kept under `store`, else installed there now.

    Raises LaunchError saying what is missing.
    """
    on_path = shutil.which("perf_analyzer")
    if on_path and Path(on_path).stat().st_size > _PLACEHOLDER:
        return [on_path]
    folder = store / "tools" / f"perf_analyzer-{VERSION}"
    if not folder.exists():
        _install(folder)
    binary = str(folder / "wheel/perf_analyzer/bin/perf_analyzer")
    if _system_glibc() >= _GLIBC:
        return [binary]
    libraries = folder / "lib"
    return [str(libraries / _LOADER), "--library-path", str(libraries), "--argv0", "perf_analyzer", binary]


def _install(folder: Path) -> None:
    """Beside its place and renamed into it, so that an interrupted installation leaves nothing half done."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise LaunchError(
            f"perf_analyzer is published for Linux on x86_64, and this is {platform.system()} on {platform.machine()}: "
            "run the load test from another machine with --grpc and --http"
        )
    _log.info("installing perf_analyzer %s under %s", VERSION, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        beside = Path(temporary) / "new"
        # The platform is named because on an older glibc pip would silently choose an empty 0.1.0.
        _run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
                *("--no-compile", "--only-binary=:all:", "--platform", "manylinux_2_38_x86_64"),
                *("--target", str(beside / "wheel"), f"perf-analyzer=={VERSION}"),
            ]
        )
        (beside / "wheel/perf_analyzer/bin/perf_analyzer").chmod(0o755)
        if _system_glibc() < _GLIBC:
            _unpack_libraries(beside)
        beside.rename(folder)


def _unpack_libraries(folder: Path) -> None:
    """The newer release's libraries into `folder`/lib, through a package state of its own and this system's mirror."""
    state = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial", "packages"):
        (state / part).mkdir(parents=True)
    (state / "sources.list").write_text(
        f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {_mirror()} {_RELEASE} main\n"
    )
    options = {
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::Etc::Preferences": os.devnull,
        "Dir::Etc::PreferencesParts": os.devnull,
        "Dir::State::Lists": state / "lists",
        "Dir::Cache": state / "cache",
        "Dir::State::status": os.devnull,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    _run([*apt, "update"])
    _run([*apt, "download", *_LIBRARIES], cwd=state / "packages")
    for package in (state / "packages").glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(state / "root")])
    (folder / "lib").mkdir()
    for library in (state / "root").rglob("*.so*"):
        if library.parent.name in ("x86_64-linux-gnu", "lib64"):  # its plug-ins lie deeper and are not needed
            shutil.copy(library, folder / "lib" / library.name)
    shutil.rmtree(state)


def _mirror() -> str:
    """Where this system's own packages come from."""
    if shutil.which("apt-get") is None:
        raise LaunchError(
            f"perf_analyzer needs glibc {'.'.join(map(str, _GLIBC))}, this system has "
            f"{'.'.join(map(str, _system_glibc()))} and no apt to fetch a private one with: run the load test from a "
            "newer system with --grpc and --http"
        )
    lines = _run(["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(REPO_URI)"]).splitlines()
    for kind, release, uri in (line.split() for line in lines if len(line.split()) == 3):
        if kind == "Packages" and release in ("bullseye", "bookworm", "trixie", "oldstable", "stable"):
            return uri
    raise LaunchError(
        "perf_analyzer needs a newer glibc than this system's, and no Debian source is configured to fetch a private "
        "one from: run the load test from a newer system with --grpc and --http"
    )


def _system_glibc() -> tuple[int, ...]:
    return tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))  # type: ignore[union-attr]


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    """What the command prints. Raises LaunchError with its last words."""
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} did not finish within {_TIMEOUT:g} s: is the package mirror reachable?"
        ) from None
    if result.returncode:
        words = " ".join(result.stderr.split())[-500:]
        raise LaunchError(f"perf_analyzer could not be installed: {Path(command[0]).name} failed: {words}")
    return result.stdout
