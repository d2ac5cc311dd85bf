"""The GPUs as they are, and what of them keeps a deployment from running, or from running fast. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

from saguaro.doctor.report import Check, Level, size
from saguaro.orchestrator.nvml import Gpu, GpuNode
from saguaro.orchestrator.placement import Demand
from saguaro.orchestrator.plan import GroupPlan

# NVIDIA's Triton image with TensorRT-LLM 1.2.1 (26.04 to 26.07): CUDA 13.1, and this driver or a later one.
CONTAINER_DRIVER = (590, 44, 1)
CUDA_13_DRIVER = 580  # the oldest line that runs programs of any CUDA 13


def hardware(node: GpuNode) -> list[Check]:
    """Each GPU, the driver, and how the GPUs are linked. Problems are of GPUs that nobody could use."""
    checks = [driver(node, needed=False)]
    for index, reason in node.lost.items():
        checks.append(
            Check(f"GPU {index}", "problem", reason, "reset it or reboot (`nvidia-smi -i INDEX -r`, `dmesg`)")
        )
    checks += [_gpu(gpu) for gpu in node.gpus]
    if not node.gpus:
        checks.append(Check("GPUs", "problem", "the driver shows none", "start the container with --gpus all"))
    if len(node.gpus) > 1:
        checks.append(_links(node))
    return checks


def driver(node: GpuNode, *, needed: bool) -> Check:
    """Against what TensorRT-LLM's image wants; `needed` by the deployment."""
    text = f"{node.driver}, CUDA {node.cuda[0]}.{node.cuda[1]}"
    found = tuple(int(part) for part in node.driver.split(".") if part.isdigit())
    if found >= CONTAINER_DRIVER:
        return Check("driver", "ok", text)
    wanted = "590.44.01"
    if found[:1] >= (CUDA_13_DRIVER,):
        return Check("driver", "warning", text, f"TensorRT-LLM's image was made for {wanted}: update when you can")
    remedy = f"TensorRT-LLM's image needs {wanted} (or its CUDA compatibility package): update the driver"
    return Check("driver", "problem" if needed else "warning", text, remedy)


def _gpu(gpu: Gpu) -> Check:
    major, minor = gpu.capability
    text = f"{gpu.name}, sm_{major}{minor}, {size(gpu.free)} free of {size(gpu.memory)}"
    if gpu.nvlinks:
        text += f", {gpu.nvlinks} NVLinks"
    if gpu.numa_node is not None:
        text += f", NUMA node {gpu.numa_node}"
    name = f"GPU {gpu.index}"
    if gpu.mig:
        return Check(name, "warning", f"{text}, in MIG mode", f"to use it: nvidia-smi -i {gpu.index} -mig 0")
    if gpu.fabric is False:
        return Check(name, "problem", f"{text}; its NVSwitch fabric is not up", "start nvidia-fabricmanager")
    if gpu.busy:
        return Check(name, "warning", f"{text}; {_use_of(gpu)}", "another one is taken where there is an idle one")
    return Check(name, "ok", text)


def _use_of(gpu: Gpu) -> str:
    others = ", ".join(
        f"process {process.pid or 'in another container'}{f' ({size(process.memory)})' if process.memory else ''}"
        for process in gpu.processes or ()
    )
    return f"busy: {size(gpu.memory - gpu.free)} taken{f' by {others}' if others else ''}"


def _links(node: GpuNode) -> Check:
    islands = nvlink_islands(node)
    if not islands:
        return Check("NVLink", "ok", "none: GPUs reach each other over PCIe")
    return Check("NVLink", "ok", "; ".join(f"GPUs {_numbers(island)} reach each other" for island in islands))


def nvlink_islands(node: GpuNode) -> list[tuple[int, ...]]:
    """Groups of two GPUs and more that are joined by NVLink, if not each with each."""
    of: dict[int, set[int]] = {gpu.index: {gpu.index} for gpu in node.gpus}
    for pair in node.nvlink:
        one, other = pair
        joined = of[one] | of[other]
        for index in joined:
            of[index] = joined
    return sorted({tuple(sorted(island)) for island in of.values() if len(island) > 1})


def assigned(
    node: GpuNode,
    demands: Mapping[str, Demand],
    plans: Mapping[str, GroupPlan],
    memory: Mapping[str, int | None],
    capabilities: Mapping[str, str],
) -> list[Check]:
    """The GPUs a deployment would get. By role: `memory` in bytes of each GPU (None: not known yet), and the compute
    capability each engine was compiled for ("any")."""
    checks = [driver(node, needed=any(demand.engine in ("trtllm", "tensorrt") for demand in demands.values()))]
    used: dict[int, dict[str, int | None]] = defaultdict(dict)
    for role, plan in plans.items():
        for index in plan.devices:
            used[index][role] = memory[role]
    for index, roles in used.items():
        if (gpu := node.gpu(index)) is not None:
            checks += _use(gpu, roles)
    for role, plan in plans.items():
        checks += _compiled_for(role, plan, node, capabilities[role])
    if "target" in plans:
        checks += _target_links(node, plans["target"])
        for role, plan in plans.items():
            if role != "target":
                checks += _draft_links(node, role, plan, plans["target"])
    return checks


def _use(gpu: Gpu, roles: Mapping[str, int | None]) -> list[Check]:
    name = f"GPU {gpu.index}"
    checks = []
    if gpu.fabric is False:
        checks.append(Check(name, "problem", "its NVSwitch fabric is not up", "start nvidia-fabricmanager"))
    if gpu.busy:
        remedy = "stop what uses it (`nvidia-smi`), or name other GPUs under devices:"
        checks.append(Check(name, "warning", _use_of(gpu), remedy))
    known = {role: need for role, need in roles.items() if need is not None}
    if len(known) == len(roles):
        needed = sum(known.values())
        parts = " + ".join(f"{size(need)} for the {role}" for role, need in known.items())
        text = f"{parts} needed, {size(gpu.free)} free of {size(gpu.memory)}"
        level: Level = "ok" if needed <= gpu.free else "problem"
        remedy = (
            "" if level == "ok" else "lower kv_tokens, build for more shares (tp), or in a smaller dtype; or free some"
        )
        checks.append(Check(f"{name} memory", level, text, remedy))
    return checks


def _compiled_for(role: str, plan: GroupPlan, node: GpuNode, capability: str) -> list[Check]:
    checks = []
    for index in plan.devices:
        gpu = node.gpu(index)
        if gpu is None or capability == "any":
            continue
        here = f"{gpu.capability[0]}.{gpu.capability[1]}"
        if here != capability:
            text = f"the engine is for compute capability {capability}, GPU {index} has {here}"
            checks.append(Check(f"{role} engine", "problem", text, "build it on such a GPU"))
    return checks


def _target_links(node: GpuNode, plan: GroupPlan) -> list[Check]:
    apart = [pair for pair in combinations(plan.devices, 2) if not node.linked(*pair)]
    if len(plan.devices) < 2:
        return []
    if not apart:
        return [Check("target NVLink", "ok", f"GPUs {_numbers(plan.devices)} reach each other over NVLink")]
    pairs = ", ".join(f"{one} and {other}" for one, other in apart)
    between = {node.paths[pair] for one, other in apart if (pair := frozenset((one, other))) in node.paths}
    return [
        Check(
            "target NVLink",
            "warning",
            f"none between GPUs {pairs}: their sums go through {' and '.join(sorted(between)) or 'PCIe'}",
            "expect each round to be several times slower; use GPUs of one NVLink island, or a smaller tp",
        )
    ]


def _draft_links(node: GpuNode, role: str, plan: GroupPlan, target: GroupPlan) -> list[Check]:
    shared = sorted(set(plan.devices) & set(target.devices))
    if shared:
        text = f"shares GPU {_numbers(shared)} with the target"
        return [
            Check(
                f"{role} GPU", "warning", text, "they take turns on it: speculation pays less; give it one of its own"
            )
        ]
    apart = [index for index in plan.devices if not all(node.linked(index, other) for other in target.devices)]
    if not apart:
        return (
            [Check(f"{role} NVLink", "ok", f"GPU {_numbers(plan.devices)} reaches the target's")]
            if plan.devices
            else []
        )
    elsewhere = [gpu.index for gpu in node.gpus if _would_link(node, gpu, plan, target)]
    remedy = (
        f"set {role}.devices to [{elsewhere[0]}]"
        if elsewhere and len(plan.devices) == 1 and role == "draft"
        else ("only tokens pass between the two, through host memory, so it runs at nearly full speed")
    )
    return [Check(f"{role} NVLink", "warning", f"none between GPU {_numbers(apart)} and the target's", remedy)]


def _would_link(node: GpuNode, gpu: Gpu, plan: GroupPlan, target: GroupPlan) -> bool:
    free = gpu.index not in (*plan.devices, *target.devices) and not gpu.mig and not gpu.busy
    return free and all(node.linked(gpu.index, other) for other in target.devices)


def _numbers(indexes: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, indexes))
