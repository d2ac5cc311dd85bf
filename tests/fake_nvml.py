"""A stand-in for NVIDIA's management library: machines as they are described here, answering as the library does.

Constants, structures and errors are the real package's; a function that is not simulated fails the test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pynvml

SWITCH = "switch"
GIB = 1 << 30


@dataclass(frozen=True)
class FakeGpu:
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = int(79.6 * GIB)
    used: int = 1 * GIB // 2
    capability: tuple[int, int] = (9, 0)
    processes: tuple[tuple[int, int | None], ...] = ()  # process id, bytes
    mig: bool | None = False  # None: the card has no such mode
    cores: tuple[int, ...] = tuple(range(8))
    links: tuple[int | str, ...] = ()  # the GPU (its index) or SWITCH at the other end of each
    fabric: int = pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    board: int = 0  # GPUs of one number are on one NUMA node
    fails: int = 0  # error of everything asked about it


@dataclass
class FakeNvml:
    """Pass it to `read_node` in place of the module."""

    gpus: tuple[FakeGpu, ...]
    driver: str = "590.48.01"
    cuda: int = 13010
    broken: int = 0  # error of nvmlInit
    old: bool = False  # a driver that does not tell whether two GPUs can reach each other
    hides_processes: bool = False  # from a user without rights
    open: int = field(default=0, init=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            raise AssertionError(f"{name} is not simulated")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.broken:
            raise pynvml.NVMLError(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        assert self.open
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.gpus[index].fails:
            raise pynvml.NVMLError(self.gpus[index].fails)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.gpus[handle].name

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08x}-aaaa-bbbb-cccc-000000000000"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        # A domain that no machine has, so that the kernel has nothing to say of it.
        return SimpleNamespace(busId=f"0000FFFF:{0x18 + handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        gpu = self.gpus[handle]
        return SimpleNamespace(total=gpu.total, free=gpu.total - gpu.used, used=gpu.used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.gpus[handle].capability

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if self.hides_processes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.gpus[handle].processes]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        mig = self.gpus[handle].mig
        if mig is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(mig), int(mig)]

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:
        cores = self.gpus[handle].cores
        return [sum(1 << core % 64 for core in cores if core // 64 == word) for word in range(max(words, 4))]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        links = self.gpus[handle].links
        if not links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return pynvml.NVML_FEATURE_ENABLED

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        switch = self.gpus[handle].links[link] == SWITCH
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return self.nvmlDeviceGetPciInfo(self.gpus[handle].links[link])  # type: ignore[arg-type]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        if self.old:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        ends, others = self.gpus[one].links, self.gpus[other].links
        joined = other in ends or (SWITCH in ends and SWITCH in others)
        return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        same = self.gpus[one].board == self.gpus[other].board
        return pynvml.NVML_TOPOLOGY_NODE if same else pynvml.NVML_TOPOLOGY_SYSTEM

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, reference: Any) -> int:
        reference._obj.state = self.gpus[handle].fabric
        reference._obj.status = pynvml.NVML_SUCCESS
        return pynvml.NVML_SUCCESS


def hgx() -> FakeNvml:
    """Eight H100 behind NVSwitches, four of them near each of two sockets with eight cores."""
    up = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return FakeNvml(
        tuple(
            FakeGpu(
                links=(SWITCH,) * 18,
                fabric=up,
                board=index // 4,
                cores=tuple(range(index // 4 * 8, index // 4 * 8 + 8)),
            )
            for index in range(8)
        )
    )


def pcie(count: int = 4) -> FakeNvml:
    """Cards without NVLink."""
    return FakeNvml((FakeGpu("NVIDIA L40S", int(44.4 * GIB), capability=(8, 9), mig=None),) * count)


def bridged() -> FakeNvml:
    """Five H100 PCIe: 0 with 1, and 2 with 3, under NVLink bridges; 4 alone."""
    card = FakeGpu("NVIDIA H100 PCIe", board=0)
    other = {0: 1, 1: 0, 2: 3, 3: 2}
    return FakeNvml(tuple(replace(card, links=(other[i],) * 12 if i in other else ()) for i in range(5)))


def changed(node: FakeNvml, index: int, **changes: Any) -> FakeNvml:
    """The same machine with one GPU in another state."""
    gpus = tuple(replace(gpu, **changes) if i == index else gpu for i, gpu in enumerate(node.gpus))
    return FakeNvml(gpus, node.driver, node.cuda, node.broken, node.old, node.hides_processes)
