"""What the front end is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """`triton` is HOST:PORT of its gRPC, `socket` the service's, `engine` the target's directory."""

    triton: str
    socket: Path
    engine: Path
    model: str
    keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_concurrent: int = 256
    deadline_s: float = 3600.0
    silence_s: float = 10.0
