"""Answers of a measurement, one a line, so that one that takes long can be made in pieces and none is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saguaro.bench.peers.measure import PeerRun
from saguaro.bench.peers.peer import Answer, Method, Peer
from saguaro.errors import ConfigError


class Record:
    """A file of answers. Each piece begins with its command, its `conditions`, which are those of all pieces, and what
    is to be known of its peers.

    Raises ConfigError when the file to `add` to is missing, or of other conditions.
    """

    def __init__(
        self, path: Path, conditions: Mapping[str, Any], command: str, peers: Sequence[Peer], *, add: bool
    ) -> None:
        self._path = path
        self.runs: list[PeerRun] = []
        self.commands: list[str] = []
        self.peers: dict[str, dict[str, str]] = {}
        if add:
            self._read(conditions)
        else:
            path.write_text("", encoding="utf-8")
        found = {
            peer.name: {"precision": peer.precision, "settings": peer.settings, "version": peer.version()}
            for peer in peers
            if peer.missing() is None
        }
        self._begin(command, found)
        self._write({"command": command, "conditions": conditions, "peers": found})

    def add(self, run: PeerRun) -> None:
        self.runs.append(run)
        self._write(asdict(run))

    def _begin(self, command: str, peers: Mapping[str, dict[str, str]]) -> None:
        self.commands.append(command)
        self.peers |= peers

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, conditions: Mapping[str, Any]) -> None:
        try:
            lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path} cannot be added to: {error}. Measure without --add first.") from None
        for line in lines:
            if "command" not in line:
                answer = line["answer"] | {"token_ids": tuple(line["answer"]["token_ids"])}
                self.runs.append(PeerRun(**line | {"method": Method(**line["method"]), "answer": Answer(**answer)}))
                continue
            self._begin(line["command"], line["peers"])
            differs = [key for key, value in conditions.items() if line["conditions"][key] != value]
            if differs:
                raise ConfigError(
                    f"{self._path} is of another {' and '.join(differs)}: answers are only comparable under the same. "
                    "Take another --out."
                )
