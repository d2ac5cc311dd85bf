"""Who gets which GPU, which cores and which environment, and how either MPI is told: pure, on described machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pynvml
import pytest

from fake_nvml import SWITCH, FakeNvml, bridged, changed, hgx, pcie
from saguaro.engines.manifest import EngineName
from saguaro.errors import ConfigError, LaunchError
from saguaro.orchestrator.config import ModelConfig
from saguaro.orchestrator.mpi_command import Mpi, parse_version
from saguaro.orchestrator.nvml import read_node
from saguaro.orchestrator.placement import Demand, choose_gpus, place, visible_gpus
from saguaro.orchestrator.plan import GroupPlan


def demand(engine: EngineName, tp: int = 1, **options: object) -> Demand:
    return Demand(ModelConfig("any", **options), engine, tp, "engine")  # type: ignore[arg-type]


def pair(tp: int, **options: object) -> dict[str, Demand]:
    return {"target": demand("trtllm", tp), "draft": demand("tensorrt", **options)}


def chosen(
    node: FakeNvml, tp: int, visible: str | None = None, **options: object
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = choose_gpus(pair(tp, **options), read_node(node), visible)
    return found["target"], found["draft"]


# What NVML says ------------------------------------------------------------------------------------------------------


def test_an_hgx_machine_is_read_as_it_is() -> None:
    library = hgx()
    node = read_node(library)
    assert library.open == 0  # closed again
    assert (node.driver, node.cuda) == ("590.48.01", (13, 1))
    assert len(node.gpus) == 8
    assert len(node.nvlink) == 28
    gpu = node.gpus[5]
    assert (gpu.index, gpu.name, gpu.capability, gpu.nvlinks) == (5, "NVIDIA H100 80GB HBM3", (9, 0), 18)
    assert (gpu.cores, gpu.fabric, gpu.mig, gpu.busy) == (tuple(range(8, 16)), True, False, False)
    assert node.paths[frozenset((0, 1))] == "a NUMA node"
    assert node.paths[frozenset((0, 7))] == "the sockets' link"


@pytest.mark.parametrize("machine", [hgx(), bridged(), pcie()])
def test_a_driver_that_does_not_tell_pairs_gives_the_same_links(machine: FakeNvml) -> None:
    assert read_node(replace(machine, old=True)).nvlink == read_node(machine).nvlink


def test_what_a_gpu_does_not_tell_is_left_open_and_a_lost_one_left_out() -> None:
    machine = replace(changed(hgx(), 2, fails=pynvml.NVML_ERROR_GPU_IS_LOST), hides_processes=True)
    node = read_node(machine)
    assert [gpu.index for gpu in node.gpus] == [0, 1, 3, 4, 5, 6, 7]
    assert "lost" in node.lost[2].lower()
    assert node.gpus[0].processes is None
    assert not node.gpus[0].busy
    assert read_node(changed(hgx(), 0, used=20 << 30)).gpus[0].busy  # of a container that is not ours
    assert not read_node(pcie()).gpus[0].mig


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "install NVIDIA's driver, or start the container"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "read and write /dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "look at `nvidia-smi`"),
    ],
)
def test_no_library_or_driver_is_an_error_with_its_remedy(error: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_node(replace(hgx(), broken=error))


# Which GPUs ----------------------------------------------------------------------------------------------------------


def test_target_and_draft_on_one_nvlink_island() -> None:
    assert chosen(hgx(), 4) == ((0, 1, 2, 3), (4,))
    assert chosen(bridged(), 1) == ((0,), (1,))  # both ends of one bridge
    assert chosen(bridged(), 2) == ((0, 1), (2,))


def test_idle_gpus_go_before_linked_ones_and_linked_ones_before_low_numbers() -> None:
    busy = changed(hgx(), 1, processes=((4711, 8 << 30),))
    assert chosen(busy, 4) == ((0, 2, 3, 4), (5,))
    assert chosen(changed(bridged(), 0, used=60 << 30), 2) == ((2, 3), (1,))
    unlinked = changed(bridged(), 0, links=())
    assert chosen(unlinked, 2)[0] == (2, 3)


def test_a_target_leaves_a_linked_gpu_for_the_draft() -> None:
    """GPUs 0 and 1 have no NVLink, 2, 3 and 4 reach each other."""
    links = {0: (), 1: (), 2: (3, 4), 3: (2, 4), 4: (2, 3)}
    machine = FakeNvml(tuple(replace(gpu, links=links[i]) for i, gpu in enumerate(bridged().gpus)))
    assert chosen(machine, 1) == ((2,), (3,))
    assert chosen(machine, 2) == ((2, 3), (4,))
    assert chosen(machine, 3) == ((2, 3, 4), (0,))


def test_the_numa_node_decides_between_equals() -> None:
    machine = changed(hgx(), 0, processes=((1, None),))
    machine = changed(machine, 1, processes=((1, None),))
    node = read_node(machine)
    boards = {gpu.index: gpu.index // 4 for gpu in node.gpus}
    node = replace(node, gpus=tuple(replace(gpu, numa_node=boards[gpu.index]) for gpu in node.gpus))
    assert choose_gpus({"target": demand("trtllm", 4)}, node, None)["target"] == (4, 5, 6, 7)


def test_only_what_cuda_shows_is_used() -> None:
    assert chosen(hgx(), 4, "2,3,4,5,6") == ((2, 3, 4, 5), (6,))
    uuid = read_node(hgx()).gpus[7].uuid
    assert [gpu.index for gpu in visible_gpus(read_node(hgx()), f"{uuid[:12]},1")] == [7, 1]
    assert visible_gpus(read_node(hgx()), "") == ()
    assert [gpu.index for gpu in visible_gpus(read_node(hgx()), "3,-1,4")] == [3]  # as CUDA does
    with pytest.raises(LaunchError, match=r"the draft has 0 GPUs left and needs 1: .*can use 4 of 8.*devices:"):
        chosen(hgx(), 4, "0,1,2,3")
    with pytest.raises(LaunchError, match=r"target has 7 GPUs left and needs 8.*\(1 in MIG mode\)"):
        chosen(changed(hgx(), 3, mig=True), 8)


def test_gpus_named_by_hand_are_taken_as_they_are() -> None:
    assert chosen(hgx(), 4, devices=(2,)) == ((0, 1, 3, 4), (2,))
    node = read_node(hgx())
    shared = {"target": demand("trtllm", 1, devices=(3,)), "draft": demand("tensorrt", devices=(3,))}
    assert choose_gpus(shared, node, None) == {"target": (3,), "draft": (3,)}
    for devices, visible, message in (
        ((9,), None, r"draft.devices names GPU 9, which this process cannot use; it can use: 0, 1"),
        ((1,), "0,2", "CUDA_VISIBLE_DEVICES"),
        ((1, 2), None, r"draft.devices names 2 GPUs \(\[1, 2\]\), but its engine has 1 shares"),
    ):
        with pytest.raises(LaunchError, match=message):
            choose_gpus({"draft": demand("tensorrt", devices=devices)}, node, visible)
    of_replicas = {f"draft-{replica}": demand("tensorrt", devices=(1, 2)) for replica in range(2)}
    with pytest.raises(LaunchError, match=r"^draft.devices names 2 GPUs .* for draft-0, .*: name 1 for each replica"):
        choose_gpus(of_replicas, node, None)
    with pytest.raises(LaunchError, match="GPU 1, which is cut into MIG instances"):
        choose_gpus({"draft": demand("tensorrt", devices=(1,))}, read_node(changed(hgx(), 1, mig=True)), None)
    for bad in ((), (1, 1), (-1,)):
        with pytest.raises(ConfigError, match="devices must be left out"):
            ModelConfig("any", devices=bad)


def test_every_choice_on_a_random_machine_is_the_best_by_enumeration() -> None:
    """The target's GPUs have as many links between them as any idle ones could have."""
    for mask in range(0, 1 << 10, 7):
        edges = {pair for bit, pair in enumerate(combinations(range(5), 2)) if mask >> bit & 1}
        links = {i: tuple(j for j in range(5) if (min(i, j), max(i, j)) in edges) for i in range(5)}
        machine = FakeNvml(tuple(replace(gpu, links=links[i]) for i, gpu in enumerate(bridged().gpus)))
        machine = changed(machine, mask % 5, processes=((1, 1),))
        node = read_node(machine)
        target, draft = chosen(machine, 3)
        assert len({*target, *draft}) == 4
        idle = [gpu.index for gpu in node.gpus if not gpu.busy]
        assert set(target) <= set(idle)

        def count(group: tuple[int, ...]) -> int:
            return sum(node.linked(*two) for two in combinations(group, 2))  # noqa: B023

        assert count(target) == max(map(count, combinations(idle, 3)))


# Ranks ---------------------------------------------------------------------------------------------------------------


def seats(plan: GroupPlan) -> list[tuple[int | None, tuple[int, ...]]]:
    return [(member.device, member.cores) for member in plan.members]


def test_the_rank_map_of_a_tensorrt_llm_pair() -> None:
    """Rank 0 leads, 1 to 4 compute; six processes share the eight cores of a socket with five GPUs nearby, fairly."""
    plans = place(pair(4), range(16), read_node(hgx()))
    assert seats(plans["target"]) == [
        (None, (0,)),
        (0, (1, 2)),
        (1, (3,)),
        (2, (4, 5)),
        (3, (6, 7)),
    ]
    assert seats(plans["draft"]) == [(4, tuple(range(8, 16)))]
    assert plans["target"].environment == {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }
    assert plans["draft"].environment["CUDA_VISIBLE_DEVICES"] == "4"
    assert [plans["target"].ordinal(rank) for rank in range(5)] == [None, 0, 1, 2, 3]
    assert plans["draft"].ordinal(0) == 0


def test_threads_wait_asleep_where_cores_are_shared() -> None:
    """A model that is done would keep its threads spinning on cores that the other one computes on."""
    own = place({"target": demand("pytorch", threads=2), "draft": demand("pytorch")}, range(3))
    assert all("OMP_WAIT_POLICY" not in plan.environment for plan in own.values())
    shared = place({"target": demand("pytorch", threads=2), "draft": demand("pytorch", cores=(1,))}, range(2))
    assert {plan.environment["OMP_WAIT_POLICY"] for plan in shared.values()} == {"passive"}


def test_pytorch_is_on_gpus_where_devices_say_so() -> None:
    demands = {"target": demand("pytorch", 2, devices="auto"), "draft": demand("pytorch", threads=3)}
    plans = place(demands, range(16), read_node(hgx()))
    assert [device for device, _ in seats(plans["target"])] == [0, 1]
    assert seats(plans["draft"]) == [(None, (0, 1, 2))]
    assert all(not set(cores) & {0, 1, 2} for _, cores in seats(plans["target"]))
    assert plans["draft"].environment["CUDA_VISIBLE_DEVICES"] == ""  # nobody takes memory on a GPU by accident
    with pytest.raises(LaunchError, match="nobody has looked"):
        place(demands, range(16))


def test_cores_by_hand_and_where_there_are_too_few() -> None:
    plans = place({"target": demand("trtllm", 2, cores=(3, 4, 5))}, range(16), read_node(hgx()))
    assert [cores for _, cores in seats(plans["target"])] == [(3,), (4,), (5,)]
    plans = place(pair(4), (0, 1), read_node(hgx()))  # a container with two cores: nobody is left without
    assert {cores for plan in plans.values() for _, cores in seats(plan)} == {(0, 1)}
    far = place(pair(1), (20, 21, 22), read_node(hgx()))  # none of them near a GPU
    assert [cores for plan in far.values() for _, cores in seats(plan)] == [(20,), (21,), (22,)]
    with pytest.raises(LaunchError, match=r"target.cores names \[99\], but"):
        place({"target": demand("pytorch", cores=(99,))}, range(4))


@pytest.mark.parametrize(
    ("cores", "shares"),
    [((4, 5, 6, 7), [(4, 5), (6, 7)]), ((1, 2, 3), [(1,), (2, 3)]), ((3,), [(3,), (3,)])],
)
def test_ranks_share_cores_out_and_share_them_when_there_are_too_few(
    cores: tuple[int, ...], shares: list[tuple[int, ...]]
) -> None:
    plan = place({"target": demand("pytorch", 2, cores=cores)}, range(8))["target"]
    assert [member.cores for member in plan.members] == shares


def test_groups_on_the_cpu_get_the_first_free_cores() -> None:
    demands = {"target": demand("pytorch", 2, threads=2), "draft": demand("pytorch")}
    plans = place(demands, range(2, 8))
    assert seats(plans["target"]) == [(None, (2, 3)), (None, (4, 5))]
    assert seats(plans["draft"]) == [(None, (6,))]
    one = place({"target": demand("pytorch"), "draft": demand("pytorch")}, [0])
    assert seats(one["target"]) == seats(one["draft"]) == [(None, (0,))]


# MPI -----------------------------------------------------------------------------------------------------------------

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: Fri Sep 25\n"


def test_either_mpi_is_known_by_what_it_says() -> None:
    assert parse_version("m", HYDRA) == Mpi("m", "mpich", "5.0.2")
    assert parse_version("m", "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to …") == Mpi("m", "openmpi", "4.1.4")
    assert parse_version("m", "mpirun (Open MPI) 4.1.9a1\n") == Mpi("m", "openmpi", "4.1.9a1")
    assert parse_version("m", "mpiexec (Open MPI) 5.0.11\n") == Mpi("m", "openmpi", "5.0.11")
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701"
    with pytest.raises(LaunchError, match=r"neither MPICH's nor Open MPI's \(it says: Intel"):
        parse_version("m", intel)
    with pytest.raises(LaunchError, match="it says: nothing"):
        parse_version("m", "")


def test_the_command_line_of_each() -> None:
    program = ["python", "-m", "saguaro.orchestrator.rank", "target", "/run"]
    tail = ["-n", "5", *program]
    for root in (False, True):
        assert Mpi("mpiexec", "mpich", "5").command(5, program, root=root) == ["mpiexec", *tail]
    flags = ["--oversubscribe", "--bind-to", "none"]
    assert Mpi("mpiexec", "openmpi", "4").command(5, program, root=False) == ["mpiexec", *flags, *tail]
    assert Mpi("mpiexec", "openmpi", "4").command(5, program, root=True) == [
        "mpiexec",
        "--allow-run-as-root",
        *flags,
        *tail,
    ]


def test_a_group_does_not_take_itself_for_part_of_the_job_it_is_started_from() -> None:
    inherited = {
        "PATH": "/bin",
        "OMPI_COMM_WORLD_RANK": "3",
        "PMI_RANK": "3",
        "SLURM_JOB_ID": "7",
        "NCCL_DEBUG": "INFO",
    }
    kept = {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    assert Mpi("m", "mpich", "5").environment(inherited) == kept
    assert Mpi("m", "openmpi", "4").environment(inherited) == kept | {
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none"
    }
    assert (Mpi("m", "mpich", "5").join, Mpi("m", "openmpi", "5").join) == ("mpi", "unix")


def test_nvlink_through_a_switch_needs_both_ends() -> None:
    machine = changed(hgx(), 7, links=())
    node = read_node(replace(machine, old=True))
    assert not any(node.linked(7, other) for other in range(7))
    assert SWITCH in machine.gpus[0].links
