"""The GPUs of this machine, as NVIDIA's management library tells them: memory, processes, links, cores nearby.

No CUDA context is made, so looking costs a GPU nothing and works while it is in use. It knows nothing of deployments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import pynvml

from saguaro.errors import LaunchError

T = TypeVar("T")
Between = Literal["one board", "a PCIe switch", "PCIe switches", "a host bridge", "a NUMA node", "the sockets' link"]

_DEVICES = Path("/sys/bus/pci/devices")
_DRIVER = Path("/proc/driver/nvidia")  # while its kernel module is loaded
_PATHS: dict[int, Between] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "a PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "a host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "a NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "the sockets' link",
}
# What the library says when it knows the question, but not for this GPU, driver or user.
_UNANSWERED = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION)
_REMEDIES = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install NVIDIA's driver, or start the container with its GPUs (--gpus all)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver (`modprobe nvidia`), or look at `dmesg`",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under a running kernel module: reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "let this user read and write /dev/nvidia*",
}


@dataclass(frozen=True)
class GpuProcess:
    pid: int  # 0 where a container hides it
    memory: int | None  # bytes


@dataclass(frozen=True)
class Gpu:
    """One GPU. What the library does not tell is None."""

    index: int  # as nvidia-smi counts them
    name: str
    uuid: str
    memory: int  # bytes
    free: int  # bytes
    capability: tuple[int, int]
    processes: tuple[GpuProcess, ...] | None  # that compute on it
    mig: bool  # cut into instances
    cores: tuple[int, ...]  # CPU cores near it; () where nobody says
    numa_node: int | None
    nvlinks: int  # active ones
    fabric: bool | None  # whether its NVSwitch fabric is up; None: it has none

    @property
    def busy(self) -> bool:
        """Whether somebody uses it: a process, or memory that no process of this container accounts for."""
        return bool(self.processes) or self.free < 0.9 * self.memory


@dataclass(frozen=True)
class GpuNode:
    """All GPUs of a machine."""

    driver: str
    cuda: tuple[int, int]  # newest CUDA the driver knows
    gpus: tuple[Gpu, ...]
    nvlink: frozenset[frozenset[int]]  # pairs that reach each other over NVLink, directly or through switches
    paths: dict[frozenset[int], Between]  # what else lies between two GPUs
    lost: dict[int, str]  # index -> why that GPU cannot be used at all

    def gpu(self, index: int) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.index == index), None)

    def linked(self, one: int, other: int) -> bool:
        return frozenset((one, other)) in self.nvlink


def read_node(library: ModuleType | Any = pynvml) -> GpuNode:
    """Look at every GPU. Raises LaunchError with a remedy when there is no driver, or it does not answer."""
    with _session(library):
        gpus: list[Gpu] = []
        handles: dict[int, Any] = {}
        lost: dict[int, str] = {}
        for index in range(library.nvmlDeviceGetCount()):
            try:
                handles[index] = library.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_gpu(library, index, handles[index]))
            except pynvml.NVMLError as error:  # one that has fallen off the bus; the others can be used
                lost[index] = str(error)
        pairs = [frozenset(pair) for pair in combinations([gpu.index for gpu in gpus], 2)]
        return GpuNode(
            driver=_text(library.nvmlSystemGetDriverVersion()),
            cuda=divmod(library.nvmlSystemGetCudaDriverVersion_v2() // 10, 100),
            gpus=tuple(gpus),
            nvlink=frozenset(pair for pair in pairs if _linked(library, *(handles[index] for index in sorted(pair)))),
            paths={
                pair: _PATHS[level]
                for pair in pairs
                if (level := _ancestor(library, *(handles[index] for index in sorted(pair)))) is not None
            },
            lost=lost,
        )


def gpu_expected() -> bool:
    """Whether the kernel knows an NVIDIA GPU or its driver, so that the library not answering is a fault."""
    return _DRIVER.exists() or any(
        _system_file(device.name, "vendor") == "0x10de" and _system_file(device.name, "class").startswith("0x03")
        for device in _DEVICES.glob("*")
    )


@contextmanager
def _session(library: Any) -> Iterator[None]:
    try:
        library.nvmlInit()
    except pynvml.NVMLError as error:
        remedy = _REMEDIES.get(error.value, "look at `nvidia-smi`")
        raise LaunchError(f"no GPU can be looked at ({error}): {remedy}") from error
    try:
        yield
    except pynvml.NVMLError as error:
        raise LaunchError(f"the driver does not answer ({error}): look at `nvidia-smi` and `dmesg`") from error
    finally:
        with suppress(pynvml.NVMLError):  # the driver may be what has failed
            library.nvmlShutdown()


def _gpu(library: Any, index: int, handle: Any) -> Gpu:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    bus = _text(library.nvmlDeviceGetPciInfo(handle).busId)
    processes = _ask(lambda: library.nvmlDeviceGetComputeRunningProcesses(handle))
    mig = _ask(lambda: library.nvmlDeviceGetMigMode(handle))
    return Gpu(
        index=index,
        name=_text(library.nvmlDeviceGetName(handle)),
        uuid=_text(library.nvmlDeviceGetUUID(handle)),
        memory=int(memory.total),
        free=int(memory.free),
        capability=tuple(library.nvmlDeviceGetCudaComputeCapability(handle)),
        processes=None if processes is None else tuple(GpuProcess(p.pid, p.usedGpuMemory) for p in processes),
        mig=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        cores=_cores(library, handle) or _listed(_system_file(bus, "local_cpulist")),
        numa_node=_numa_node(bus),
        nvlinks=sum(1 for _ in _active_links(library, handle)),
        fabric=_fabric(library, handle),
    )


def _ask(question: Callable[[], T]) -> T | None:
    """The answer; None when this GPU, driver or user gets none. Any other error is the caller's."""
    try:
        return question()
    except pynvml.NVMLError as error:
        if error.value in _UNANSWERED:
            return None
        raise


def _linked(library: Any, one: Any, other: Any) -> bool:
    """Over NVLink. Older drivers do not say it of a pair: there, links that end at one GPU or at a switch do."""
    status = _ask(lambda: library.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK))
    if status is not None:
        return bool(status == pynvml.NVML_P2P_STATUS_OK)
    bus = _text(library.nvmlDeviceGetPciInfo(other).busId)
    ends = {end for link in _active_links(library, one) if (end := _far_end(library, one, link))}
    return bus in ends or (
        "switch" in ends and any(_far_end(library, other, link) == "switch" for link in _active_links(library, other))
    )


def _active_links(library: Any, handle: Any) -> Iterator[int]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = library.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError as error:
            if error.value in (*_UNANSWERED, pynvml.NVML_ERROR_INVALID_ARGUMENT):  # it has no such link
                return
            raise
        if active == pynvml.NVML_FEATURE_ENABLED:
            yield link


def _far_end(library: Any, handle: Any, link: int) -> str | None:
    """ "switch", or the bus id of what is there."""
    kind = _ask(lambda: library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return "switch"
    remote = _ask(lambda: library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    return None if remote is None else _text(remote.busId)


def _ancestor(library: Any, one: Any, other: Any) -> int | None:
    level = _ask(lambda: library.nvmlDeviceGetTopologyCommonAncestor(one, other))
    return level if level in _PATHS else None


def _fabric(library: Any, handle: Any) -> bool | None:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    if _ask(lambda: library.nvmlDeviceGetGpuFabricInfo(handle, byref(info))) is None:
        return None
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return bool(info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS)


def _cores(library: Any, handle: Any) -> tuple[int, ...]:
    words = _ask(lambda: library.nvmlDeviceGetCpuAffinity(handle, ((os.cpu_count() or 1) + 63) // 64))
    if words is None:
        return ()
    return tuple(64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _system_file(bus: str, name: str) -> str:
    """What the kernel says of a PCI device; "" where it says nothing. Its bus ids have a shorter domain."""
    with suppress(OSError):
        return (_DEVICES / bus.lower()[-12:] / name).read_text().strip()
    return ""


def _listed(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list such as `0-3,8-11`."""
    ranges = [part.split("-") for part in text.split(",") if part]
    return tuple(number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1))


def _numa_node(bus: str) -> int | None:
    node = _system_file(bus, "numa_node")
    return int(node) if node and int(node) >= 0 else None  # -1: the machine has one, or does not know


def _text(value: str | bytes) -> str:
    """Older versions of the bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
