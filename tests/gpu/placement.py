"""On a machine with GPUs: is what NVML says what nvidia-smi shows and CUDA gives? `python tests/gpu/placement.py`

Prints pass or fail for each check; the exit status is the number of failures.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from saguaro.orchestrator.config import ModelConfig
from saguaro.orchestrator.nvml import GpuNode, read_node
from saguaro.orchestrator.plan import GroupPlan, RankPlan

_UUIDS = "import torch; print(*[torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())])"


def smi(*fields: str) -> list[list[str]]:
    """A row for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]


def gpus_are_those_of_nvidia_smi(node: GpuNode) -> bool:
    shown = smi("index", "uuid", "memory.total", "driver_version", "compute_cap")
    return [
        [str(gpu.index), gpu.uuid, str(gpu.memory >> 20), node.driver, ".".join(map(str, gpu.capability))]
        for gpu in node.gpus
    ] == shown


def cuda_gives_a_group_the_gpus_it_was_given(node: GpuNode) -> bool:
    """The last GPU and the first, so that an order by speed or by number of the request would show."""
    devices = tuple(dict.fromkeys((node.gpus[-1].index, node.gpus[0].index)))
    plan = GroupPlan(ModelConfig("any"), "", tuple(RankPlan(device, (0,)) for device in devices))
    done = subprocess.run(
        [sys.executable, "-c", _UUIDS], env=os.environ | plan.environment, capture_output=True, text=True, timeout=120
    )
    by_index = {gpu.index: gpu.uuid.removeprefix("GPU-") for gpu in node.gpus}
    return done.stdout.split() == [by_index[device] for device in devices]


def nvlink_is_what_the_topology_matrix_shows(node: GpuNode) -> bool:
    text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    shown = {
        frozenset((int(row[0][3:]), other))
        for row in rows
        for other in range(len(node.gpus))
        if row[1 + other].startswith("NV")
    }
    return shown == node.nvlink


def cores_near_a_gpu_are_known(node: GpuNode) -> bool:
    return all(gpu.cores for gpu in node.gpus)


CHECKS: list[Callable[[GpuNode], bool]] = [
    gpus_are_those_of_nvidia_smi,
    cuda_gives_a_group_the_gpus_it_was_given,
    nvlink_is_what_the_topology_matrix_shows,
    cores_near_a_gpu_are_known,
]


def main() -> int:
    node = read_node()
    results = {check.__name__: check(node) for check in CHECKS}
    for name, passed in results.items():
        sys.stdout.write(f"{'pass' if passed else 'fail'} {name}\n")
    return list(results.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
