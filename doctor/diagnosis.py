"""Everything that is looked at, put together: the machine always, a deployment where one is named."""

from __future__ import annotations

from pathlib import Path

from saguaro.doctor import deployment as deployments
from saguaro.doctor import gpus, machine
from saguaro.doctor.report import Check, Report, Section
from saguaro.errors import SaguaroError
from saguaro.orchestrator.config import ServingConfig, find_deployment, read_deployment
from saguaro.orchestrator.nvml import GpuNode, gpu_expected, read_node
from saguaro.supervisor.state import StateFolder


def diagnose(name: str | None, store: Path) -> Report:
    """`name`: a deployment's, or its file's. Raises ConfigError when that cannot be read; all else is a finding."""
    path = find_deployment(name) if name else None
    config = read_deployment(path) if path else None
    parts = deployments.parts_of(config, path, store) if config and path else {}
    on_gpus = any(part.demand.on_gpus for part in parts.values())
    node, hardware = _gpus(needed=on_gpus)
    sections = [
        Section("packages", tuple(machine.packages()), needed=False),
        Section("MPI", tuple(machine.mpi()), needed=True),
        Section("machine", (*machine.system(gpus=on_gpus), machine.store(store)), needed=True),
        # What is wrong with one GPU matters where it is used: the deployment's own section says so.
        Section("GPUs", tuple(hardware), needed=on_gpus and node is None),
    ]
    if config is None:
        return Report(None, tuple(sections))
    checks = [*deployments.engines(parts), *deployments.placement(parts, node), *_ports(config.name, config.serving)]
    return Report(config.name, (*sections, Section(f"deployment {config.name}", tuple(checks), needed=True)))


def _gpus(*, needed: bool) -> tuple[GpuNode | None, list[Check]]:
    try:
        node = read_node()
    except SaguaroError as error:
        if not needed and not gpu_expected():
            return None, [Check("GPUs", "ok", "none of NVIDIA's: engines run on the CPU")]
        return None, [Check("NVML", "problem", str(error))]
    return node, gpus.hardware(node)


def _ports(name: str, serving: ServingConfig) -> list[Check]:
    state = StateFolder(name).read()
    if state is not None and state.alive:
        return [Check("ports", "ok", f"in use by this deployment, which process {state.pid} serves")]
    return machine.ports(serving)
