"""Where this machine's user keeps what can be made again: models, engines, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`saguaro` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "saguaro"
