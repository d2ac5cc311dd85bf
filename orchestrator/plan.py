"""What the launcher tells its ranks, through files in the runtime directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from saguaro.orchestrator.config import DeploymentConfig

LOG_FORMAT = "%(levelname)s saguaro: %(message)s"  # the launcher reads a rank's level from its lines


@dataclass(frozen=True)
class LaunchPlan:
    """Everything the ranks of one start need to know; lies in the runtime directory as `plan.json`."""

    config: DeploymentConfig
    target_engine: str
    draft_engine: str | None
    target_cores: tuple[int, ...]
    draft_cores: tuple[int, ...]
    deployment: int  # identifies this start: messages of another one are foreign
    launcher: int  # process id of whoever started it, and owns the runtime directory

    def write(self, runtime: Path) -> None:
        (runtime / "plan.json").write_bytes(msgspec.json.encode(self))

    @staticmethod
    def read(runtime: Path) -> LaunchPlan:
        return msgspec.json.decode((runtime / "plan.json").read_bytes(), type=LaunchPlan)


def service_socket(runtime: Path) -> Path:
    """Where the target group's service listens."""
    return runtime / "service.sock"
