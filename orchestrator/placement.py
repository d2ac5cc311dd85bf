"""Which process gets which GPU and which CPU cores: decided before anything is started, and pure.

A group on the CPU has `threads` cores for each rank. A group on GPUs has one for each rank that computes; the target's
should all reach each other over NVLink, the draft's is another one. TensorRT-LLM's target has one rank more: rank 0
asks, ranks 1 to tp compute (its "pre-spawned orchestrator"), so that the leader is never inside an executor's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from saguaro.engines.manifest import EngineName
from saguaro.errors import LaunchError
from saguaro.orchestrator.config import DraftConfig, ModelConfig
from saguaro.orchestrator.nvml import Gpu, GpuNode
from saguaro.orchestrator.plan import GroupPlan, RankPlan, section_of

_ON_GPUS: tuple[EngineName, ...] = ("trtllm", "tensorrt")  # wherever they are; pytorch where `devices` says so


@dataclass(frozen=True)
class Demand:
    """What one group needs of the machine."""

    model: ModelConfig
    engine: EngineName
    tp: int
    directory: str  # of the engine

    @property
    def ranks(self) -> int:
        """Processes: one for each share of the model, and TensorRT-LLM's leader, which holds none."""
        return self.tp + (self.engine == "trtllm")

    @property
    def on_gpus(self) -> bool:
        return self.model.devices is not None or self.engine in _ON_GPUS

    @property
    def devices(self) -> tuple[int, ...] | None:
        """Those fixed by hand; None: any."""
        return self.model.devices if isinstance(self.model.devices, tuple) else None


def place(
    demands: Mapping[str, Demand],
    cores: Sequence[int],
    node: GpuNode | None = None,
    visible: str | None = None,
) -> dict[str, GroupPlan]:
    """Every group's ranks, by role and in the order given. `cores` are those this process may use.

    `node` is needed as soon as one group is on GPUs; `visible` is CUDA_VISIBLE_DEVICES. Raises LaunchError naming role
    and key.
    """
    on_gpus = {role: demand for role, demand in demands.items() if demand.on_gpus}
    if on_gpus and node is None:
        raise LaunchError(f"the {' and the '.join(on_gpus)} group need GPUs, and nobody has looked at them")
    devices = choose_gpus(on_gpus, node, visible) if node is not None else {}
    taken: list[int] = []
    plans: dict[str, GroupPlan] = {}

    def free() -> list[int]:
        """Cores that nobody has; then, on a small machine, at least none of the first group's, the target's."""
        first = next((core for plan in plans.values() for member in plan.members for core in member.cores), None)
        left = [core for core in sorted(cores) if core not in taken]
        return left or [core for core in sorted(cores) if core != first] or sorted(cores)

    for role, demand in demands.items():
        if demand.model.cores is not None and not set(demand.model.cores) <= set(cores):
            raise LaunchError(
                f"{section_of(role)}.cores names {list(demand.model.cores)}{_for(role)}, but this process may only use "
                f"{sorted(cores)}"
            )
        if role in devices:
            continue
        own = demand.model.cores or tuple(free()[: demand.model.threads * demand.ranks])
        taken += own
        members = [RankPlan(None, share_of(own, rank, demand.ranks)) for rank in range(demand.ranks)]
        plans[role] = GroupPlan(demand.model, demand.directory, tuple(members))
    if devices and node is not None:
        plans |= _gpu_groups(on_gpus, devices, node, free())
    users = Counter(core for plan in plans.values() for member in plan.members for core in member.cores)
    shared = {core for core, count in users.items() if count > 1}
    return {
        role: replace(plan, shares_cores=any(not shared.isdisjoint(member.cores) for member in plan.members))
        for role, plan in ((role, plans[role]) for role in demands)
    }


def replica_of(model: DraftConfig, replica: int) -> DraftConfig:
    """What one replica may use of the cores and GPUs that are named for all of them."""
    cores, devices, count = model.cores, model.devices, model.replicas
    return replace(
        model,
        cores=share_of(cores, replica, count) if cores else None,
        devices=share_of(devices, replica, count) if isinstance(devices, tuple) else devices,
    )


def visible_gpus(node: GpuNode, visible: str | None) -> tuple[Gpu, ...]:
    """Those CUDA would show: of CUDA_VISIBLE_DEVICES, as indexes or as (beginnings of) UUIDs; all without it.

    As CUDA does, an entry that names no GPU ends the list. Indexes are nvidia-smi's (CUDA_DEVICE_ORDER=PCI_BUS_ID).
    """
    if visible is None:
        return node.gpus
    found: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        match = [gpu for gpu in node.gpus if (entry.isdigit() and gpu.index == int(entry)) or _names(entry, gpu)]
        if len(match) != 1 or match[0] in found:
            break
        found += match
    return tuple(found)


def _names(entry: str, gpu: Gpu) -> bool:
    return entry.startswith("GPU-") and gpu.uuid.startswith(entry)


def choose_gpus(demands: Mapping[str, Demand], node: GpuNode, visible: str | None) -> dict[str, tuple[int, ...]]:
    """Indexes of each group's GPUs, one for each share of its model.

    What is fixed by hand is taken as it is, also the same GPU for two groups. Otherwise each group gets GPUs of its
    own: idle ones first, then those with most NVLink between them, then those that leave linked ones for the groups to
    come, then close to each other, then the lowest. Raises LaunchError.
    """
    usable = [gpu for gpu in visible_gpus(node, visible) if not gpu.mig]
    chosen = {role: _by_hand(role, demand, node, usable) for role, demand in demands.items() if demand.devices}
    taken = {index for devices in chosen.values() for index in devices}
    waiting = [role for role in demands if role not in chosen]
    for turn, role in enumerate(waiting):
        needed = demands[role].tp
        left = [gpu for gpu in usable if gpu.index not in taken]
        if len(left) < needed:
            raise LaunchError(_too_few(role, demands, node, usable, left))
        later = sum(demands[other].tp for other in waiting[turn + 1 :])
        best = max(combinations(left, needed), key=lambda group: _score(group, left, later, taken, node))
        chosen[role] = tuple(gpu.index for gpu in best)
        taken |= set(chosen[role])
    return chosen


def _score(
    group: Sequence[Gpu], left: Sequence[Gpu], later: int, taken: set[int], node: GpuNode
) -> tuple[int | tuple[int, ...], ...]:
    mine = {gpu.index for gpu in group}
    links = sum(node.linked(one, other) for one, other in combinations(sorted(mine), 2))
    to_taken = sum(node.linked(one, other) for one in mine for other in taken)
    followers = [gpu for gpu in left if gpu.index not in mine and not gpu.busy]
    reachable = sum(all(node.linked(gpu.index, one) for one in mine) for gpu in followers)
    return (
        sum(not gpu.busy for gpu in group),
        links,
        to_taken,
        min(later, reachable),
        min(later, len(followers)),
        -len({gpu.numa_node for gpu in group}),
        tuple(-gpu.index for gpu in group),
    )


def _by_hand(role: str, demand: Demand, node: GpuNode, usable: Sequence[Gpu]) -> tuple[int, ...]:
    devices = demand.devices or ()
    if len(devices) != demand.tp:
        raise LaunchError(
            f"{section_of(role)}.devices names {len(devices)} GPUs ({list(devices)}){_for(role)}, but its engine has "
            f"{demand.tp} shares (tp of the recipe): name {demand.tp}{' for each replica' if _for(role) else ''}"
        )
    for index in devices:
        gpu = node.gpu(index)
        if gpu is not None and gpu.mig:
            raise LaunchError(f"{section_of(role)}.devices names GPU {index}, which {_MIG}")
        if gpu not in usable:
            there = ", ".join(str(gpu.index) for gpu in usable) or "none"
            raise LaunchError(
                f"{section_of(role)}.devices names GPU {index}, which this process cannot use; it can use: {there}. "
                "Indexes are those of nvidia-smi; look at CUDA_VISIBLE_DEVICES"
            )
    return devices


def _for(role: str) -> str:
    """Which replica gets these, where they are shared out."""
    return "" if section_of(role) == role else f" for {role}"


_MIG = "is cut into MIG instances: a rank needs a whole one (`nvidia-smi -i INDEX -mig 0`)"


def _too_few(
    role: str, demands: Mapping[str, Demand], node: GpuNode, usable: Sequence[Gpu], left: Sequence[Gpu]
) -> str:
    needed = ", ".join(f"{demand.tp} for the {name}" for name, demand in demands.items())
    mig = sum(gpu.mig for gpu in node.gpus)
    return (
        f"the {role} has {len(left)} GPUs left and needs {demands[role].tp}: the deployment wants {needed}, and this "
        f"process can use {len(usable)} of {len(node.gpus)}{f' ({mig} in MIG mode)' if mig else ''}. Build for a "
        "smaller tp, look at CUDA_VISIBLE_DEVICES, or let groups share GPUs by naming them under `devices:` of each"
    )


def share_of(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """One of `count` parts of the cores; all of them where there are too few for each to have one."""
    if len(cores) < count:
        return tuple(cores)
    return tuple(cores[index * len(cores) // count : (index + 1) * len(cores) // count])


def _gpu_groups(
    demands: Mapping[str, Demand], devices: Mapping[str, tuple[int, ...]], node: GpuNode, free: Sequence[int]
) -> dict[str, GroupPlan]:
    """Each rank gets its part of the cores near its GPU, which it shares with the other ranks that are near them.

    TensorRT-LLM and NCCL have threads of their own, so a rank gets all there is, not `threads` cores.
    """
    seats: list[tuple[str, int | None, tuple[str, tuple[int, ...]]]] = []  # role, GPU, and whose cores they are
    for role, demand in demands.items():
        first = demand.ranks - demand.tp  # rank that computes
        for rank in range(demand.ranks):
            gpu = node.gpu(devices[role][max(0, rank - first)])
            near = tuple(core for core in free if gpu is not None and core in gpu.cores) or tuple(free)
            cores = (role, demand.model.cores) if demand.model.cores else ("", near)
            seats.append((role, gpu.index if gpu is not None and rank >= first else None, cores))
    groups = {role: GroupPlan(demand.model, demand.directory, ()) for role, demand in demands.items()}
    for number, (role, device, cores) in enumerate(seats):
        sharing = [other for other, (_, _, theirs) in enumerate(seats) if theirs == cores]
        rank_plan = RankPlan(device, share_of(cores[1], sharing.index(number), len(sharing)))
        groups[role] = replace(groups[role], members=(*groups[role].members, rank_plan))
    return groups
