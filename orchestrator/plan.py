"""What the launcher tells its ranks, through files in the runtime directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from saguaro.orchestrator.config import DeploymentConfig, ModelConfig

LOG_FORMAT = "%(levelname)s saguaro: %(message)s"  # the launcher reads a rank's level from its lines


@dataclass(frozen=True)
class RankPlan:
    """One process of a group."""

    device: int | None  # its GPU, as nvidia-smi counts them; None: it computes on the CPU, or only leads
    cores: tuple[int, ...]  # it may run on


@dataclass(frozen=True)
class GroupPlan:
    """One MPI job: a model on as many processes as it has `members`, by rank."""

    model: ModelConfig
    engine: str  # its directory
    members: tuple[RankPlan, ...]
    shares_cores: bool = False  # with other processes of the deployment

    @property
    def ranks(self) -> int:
        return len(self.members)

    @property
    def devices(self) -> tuple[int, ...]:
        """Its GPUs, by rank; empty for a group on the CPU."""
        return tuple(member.device for member in self.members if member.device is not None)

    @property
    def environment(self) -> dict[str, str]:
        """What its processes need to find in their environment.

        A group sees its own GPUs only, so that its first one is CUDA's device 0 in every rank, and nobody takes memory
        on another group's. CUDA's own order is by speed; nvidia-smi's, in which they are counted here, by bus. Threads
        that have done their part wait in a loop, unless somebody else needs their core.
        """
        waiting = {"OMP_WAIT_POLICY": "passive"} if self.shares_cores else {}
        return waiting | {
            "OMP_NUM_THREADS": str(self.model.threads),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices)),
        }

    def ordinal(self, rank: int) -> int | None:
        """The number by which CUDA knows the rank's GPU."""
        device = self.members[rank].device
        return None if device is None else self.devices.index(device)


@dataclass(frozen=True)
class LaunchPlan:
    """Everything the ranks of one start need to know; lies in the runtime directory as `plan.json`."""

    config: DeploymentConfig
    groups: dict[str, GroupPlan]  # by role
    channel: Literal["mpi", "unix"]  # joins the two groups
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


def section_of(role: str) -> str:
    """The section of the deployment that says what a group may use: one for all replicas of the draft."""
    return role.partition("-")[0]


def rendezvous(runtime: Path, role: str) -> Path:
    """Where the ranks of a group meet."""
    return runtime / f"{role}.meeting"


def sign_of_life(runtime: Path, role: str, rank: int) -> Path:
    """A pipe that a rank holds open for writing as long as it lives; the launcher sees which closes first."""
    return runtime / f"{role}-{rank}.alive"


def service_socket(runtime: Path) -> Path:
    """Where the target group's service listens."""
    return runtime / "service.sock"
