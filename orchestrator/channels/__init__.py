"""Channels carry whole messages, as bytes, between two roles. They know nothing of what the bytes mean.

All of them keep order, have a deadline on every receive, and say when the peer is gone.
"""

from __future__ import annotations

from typing import Protocol


class Channel(Protocol):
    def send(self, data: bytes) -> None:
        """Hand a message over without waiting for the peer. Raises LinkError when the peer is gone."""
        ...

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None when none came within `timeout` seconds (0 polls). LinkError: the peer is gone."""
        ...

    def close(self) -> None:
        """Let go of the link; the peer's next receive raises LinkError. Closing twice is harmless."""
        ...
