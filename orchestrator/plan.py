"""What the launcher tells its ranks, through files in the runtime directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from saguaro.orchestrator.config import DeploymentConfig, ModelConfig

LOG_FORMAT = "%(levelname)s saguaro: %(message)s"  # the launcher reads a rank's level from its lines


@dataclass(frozen=True)
class GroupPlan:
    """One MPI job: a model on `ranks` processes."""

    model: ModelConfig
    engine: str  # its directory
    ranks: int
    cores: tuple[int, ...]  # of all its ranks

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """A rank's own part of the cores."""
        return share_of(self.cores, rank, self.ranks)


def share_of(cores: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
    """One of `count` parts of the cores; all of them where there are too few for each to have one."""
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count] if len(cores) >= count else cores


@dataclass(frozen=True)
class LaunchPlan:
    """Everything the ranks of one start need to know; lies in the runtime directory as `plan.json`."""

    config: DeploymentConfig
    groups: dict[str, GroupPlan]  # by role
    deployment: int  # identifies this start: messages of another one are foreign
    launcher: int  # process id of whoever started it, and owns the runtime directory

    @property
    def drafts(self) -> list[str]:
        """The roles of the draft's replicas, in order."""
        return [role for role in self.groups if role != "target"]

    def write(self, runtime: Path) -> None:
        (runtime / "plan.json").write_bytes(msgspec.json.encode(self))

    @staticmethod
    def read(runtime: Path) -> LaunchPlan:
        return msgspec.json.decode((runtime / "plan.json").read_bytes(), type=LaunchPlan)


def draft_roles(replicas: int) -> list[str]:
    """What the draft's groups are called."""
    return ["draft"] if replicas == 1 else [f"draft-{replica}" for replica in range(replicas)]


def rendezvous(runtime: Path, role: str) -> Path:
    """Where the ranks of a group meet."""
    return runtime / f"{role}.meeting"


def sign_of_life(runtime: Path, role: str, rank: int) -> Path:
    """A pipe that a rank holds open for writing as long as it lives; the launcher sees which closes first."""
    return runtime / f"{role}-{rank}.alive"


def service_socket(runtime: Path) -> Path:
    """Where the target group's service listens."""
    return runtime / "service.sock"
