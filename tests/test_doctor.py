"""`saguaro doctor`: on this machine for real, and what it says of machines that are described."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from fake_nvml import GIB, FakeNvml, bridged, changed, hgx, pcie
from saguaro import cli
from saguaro.build.driver import build, find_recipe, plan
from saguaro.doctor import deployment, diagnosis, gpus, machine
from saguaro.doctor.deployment import Part
from saguaro.doctor.report import Check, Report, Section, size
from saguaro.engines.cuda_graphs import MAX_ROWS
from saguaro.engines.manifest import FORMAT, QUANTISED, EngineName, Manifest
from saguaro.engines.pytorch import memory_needed
from saguaro.errors import ConfigError, LaunchError
from saguaro.orchestrator import nvml
from saguaro.orchestrator.config import DraftConfig, ModelConfig, ServingConfig
from saguaro.orchestrator.mpi_command import Mpi
from saguaro.orchestrator.nvml import read_node


def found(checks: list[Check], name: str) -> list[tuple[str, str, str]]:
    return [(check.level, check.found, check.remedy) for check in checks if check.name == name]


def part(recipe: str, folder: Path, *, tp: int | None = None, device: str = "9.0", **options: Any) -> Part:
    """A model of a shipped recipe, whose engine was built for that kind of GPU."""
    found = find_recipe(recipe)
    found = replace(found, tp=tp or found.tp)
    manifest = Manifest(
        FORMAT, recipe, "0" * 64, found.engine, "any", "0" * 64, "llama", "bfloat16", found.tp, 128_000, 8192, (2,),
        "0" * 64, device, {}, {},
    )  # fmt: skip
    return Part(ModelConfig(recipe, **({"kv_tokens": 65536} | options)), found, folder, folder / recipe, manifest)


@pytest.fixture
def llama(tmp_path: Path) -> dict[str, Part]:
    """A 70B target on four GPUs and a 1B draft, as their engines would be."""
    return {"target": part("llama-3.1-70b-h100", tmp_path), "draft": part("llama-3.2-1b-h100", tmp_path)}


def placed(parts: Mapping[str, Part], node: FakeNvml) -> list[Check]:
    return deployment.placement(parts, read_node(node))


# GPUs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_healthy_hgx_machine_has_nothing_to_be_mended(llama: dict[str, Part]) -> None:
    checks = [*gpus.hardware(read_node(hgx())), *placed(llama, hgx())]
    assert [check for check in checks if check.level != "ok"] == []
    assert found(checks, "driver")[0] == ("ok", "590.48.01, CUDA 13.1", "")
    assert found(checks, "GPU 3") == [("ok", "NVIDIA H100 80GB HBM3, sm_90, 79.1 GiB free of 79.6 GiB, 18 NVLinks", "")]
    assert found(checks, "NVLink") == [("ok", "GPUs 0, 1, 2, 3, 4, 5, 6, 7 reach each other", "")]
    assert "rank 0 leads" in found(checks, "target ranks")[0][1]
    assert "rank 4 GPU 3" in found(checks, "target ranks")[0][1]
    # The plan of the build, and 65536 tokens x 2 x 80 layers x 2 of the 8 heads x 128 x 2 bytes = 5 GiB.
    needed = plan(llama["target"].recipe, Path()).memory.fixed + 5 * GIB
    assert needed > 4 * GIB + 70e9 * 2 / 4
    text = f"{size(needed)} for the target needed, 79.1 GiB free of 79.6 GiB"
    assert [found(checks, f"GPU {index} memory") for index in range(4)] == [[("ok", text, "")]] * 4
    # 65536 x 2 x 16 layers x 8 heads x 64 x 2 bytes = 2 GiB.
    draft = plan(llama["draft"].recipe, Path()).memory.fixed + 2 * GIB
    assert found(checks, "GPU 4 memory")[0][1].startswith(f"{size(draft)} for the draft needed")


def test_a_draft_gpu_without_nvlink_is_flagged(llama: dict[str, Part], tmp_path: Path) -> None:
    machine = changed(hgx(), 6, links=())
    named = llama | {"draft": replace(llama["draft"], model=ModelConfig("any", devices=(6,)))}
    level, text, remedy = found(placed(named, machine), "draft NVLink")[0]
    assert (level, text) == ("warning", "none between GPU 6 and the target's")
    assert remedy == "set draft.devices to [4]"
    pair = {"target": part("llama-3.1-8b-h100", tmp_path, tp=2), "draft": llama["draft"]}
    level, _, remedy = found(placed(pair, bridged()), "draft NVLink")[0]
    assert level == "warning"
    assert remedy.startswith("only tokens pass between the two")  # there is no better one
    assert found(placed(llama, hgx()), "draft NVLink") == [("ok", "GPU 4 reaches the target's", "")]


def test_every_replica_of_the_draft_is_placed(llama: dict[str, Part]) -> None:
    model = DraftConfig("llama-3.2-1b-h100", kv_tokens=65536, replicas=3, devices=(7, 5, 6))
    checks = placed(llama | {"draft": replace(llama["draft"], model=model)}, hgx())
    assert [found(checks, f"draft-{replica} ranks")[0][1][:12] for replica in range(3)] == [
        "rank 0 GPU 7",
        "rank 0 GPU 5",
        "rank 0 GPU 6",
    ]
    assert all(found(checks, f"GPU {index} memory") for index in range(8) if index != 4)
    assert {check.level for check in checks} == {"ok"}


def test_a_target_without_nvlink_is_flagged(llama: dict[str, Part], tmp_path: Path) -> None:
    small = part("llama-3.1-8b-h100", tmp_path, tp=2, device="8.9")
    checks = placed({"target": small}, pcie())
    assert found(checks, "target NVLink")[0][:2] == (
        "warning",
        "none between GPUs 0 and 1: their sums go through a NUMA node",
    )
    assert found(gpus.hardware(read_node(pcie())), "NVLink") == [("ok", "none: GPUs reach each other over PCIe", "")]


def test_too_little_memory_is_flagged(llama: dict[str, Part]) -> None:
    need, small = (one.memory for one in llama.values())
    assert need is not None
    assert small is not None

    def cards(total: int) -> FakeNvml:
        return FakeNvml(tuple(replace(gpu, total=total, used=0) for gpu in hgx().gpus))

    checks = placed(llama, cards(need - 1))
    for index in range(4):
        level, text, remedy = found(checks, f"GPU {index} memory")[0]
        assert (level, text.partition(" needed")[0]) == ("problem", f"{size(need)} for the target")
        assert "lower kv_tokens" in remedy
    assert found(checks, "GPU 4 memory")[0][0] == "ok"
    assert {check.level for check in placed(llama, cards(need))} == {"ok"}
    shared = {
        "target": replace(llama["target"], model=replace(llama["target"].model, devices=(0, 1, 2, 3))),
        "draft": replace(llama["draft"], model=replace(llama["draft"].model, devices=(0,))),
    }
    checks = placed(shared, cards(need + small - 1))
    level, text, _ = found(checks, "GPU 0 memory")[0]
    assert (level, text.partition(" needed")[0]) == (
        "problem",
        f"{size(need)} for the target + {size(small)} for the draft",
    )
    assert found(checks, "draft GPU")[0][:2] == ("warning", "shares GPU 0 with the target")
    assert found(checks, "GPU 1 memory")[0][0] == "ok"


def test_a_busy_gpu_is_flagged_where_it_would_be_used(llama: dict[str, Part]) -> None:
    four = FakeNvml(hgx().gpus[:5])
    busy = changed(four, 2, processes=((4711, 30 * GIB), (0, None)), used=31 * GIB)
    level, text, remedy = found(placed(llama, busy), "GPU 2")[0]
    assert (level, text) == (
        "warning",
        "busy: 31.0 GiB taken by process 4711 (30.0 GiB), process in another container",
    )
    assert "nvidia-smi" in remedy
    level, text, _ = found(gpus.hardware(read_node(busy)), "GPU 2")[0]
    assert (level, text.partition("; ")[2][:5]) == ("warning", "busy:")
    hidden = replace(changed(four, 2, used=31 * GIB), hides_processes=True)
    assert found(placed(llama, hidden), "GPU 2")[0][1] == "busy: 31.0 GiB taken"
    assert found(placed(llama, changed(hgx(), 2, used=31 * GIB)), "GPU 2") == []  # another one is taken instead


@pytest.mark.parametrize(
    ("driver", "engine", "level"),
    [
        ("590.44.01", "trtllm", "ok"),
        ("595.10", "trtllm", "ok"),
        ("590.40.02", "trtllm", "warning"),
        ("580.95.05", "trtllm", "warning"),
        ("570.86.15", "trtllm", "problem"),
        ("570.86.15", "pytorch", "warning"),  # a build of PyTorch may be made for it
    ],
)
def test_an_old_driver_is_flagged(driver: str, engine: EngineName, level: str, tmp_path: Path) -> None:
    some = part("llama-3.1-8b-h100" if engine == "trtllm" else "tiny-target", tmp_path, devices="auto")
    some = replace(some, manifest=None)
    assert found(placed({"target": some}, replace(hgx(), driver=driver)), "driver")[0][0] == level


def test_mig_a_lost_gpu_and_a_fabric_that_is_down_are_flagged(llama: dict[str, Part]) -> None:
    five = FakeNvml(hgx().gpus[:5])
    mig = changed(five, 1, mig=True)
    assert found(gpus.hardware(read_node(mig)), "GPU 1")[0][::2] == ("warning", "to use it: nvidia-smi -i 1 -mig 0")
    assert (
        "needs 1: the deployment wants 4 for the target, 1 for the draft"
        in found(placed(llama, mig), "placement")[0][1]
    )
    lost = changed(five, 1, fails=pynvml.NVML_ERROR_GPU_IS_LOST)
    assert found(gpus.hardware(read_node(lost)), "GPU 1")[0][0] == "problem"
    down = changed(five, 1, fabric=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS)
    for checks in (gpus.hardware(read_node(down)), placed(llama, down)):
        assert ("problem", "start nvidia-fabricmanager") in [
            (level, remedy) for level, _, remedy in found(checks, "GPU 1")
        ]
    assert found(gpus.hardware(read_node(FakeNvml(()))), "GPUs")[0][0] == "problem"


def test_an_engine_for_another_gpu_is_flagged(llama: dict[str, Part], tmp_path: Path) -> None:
    draft = part("llama-3.2-1b-h100", tmp_path, device="8.0")
    checks = placed(llama | {"draft": draft}, hgx())
    assert found(checks, "draft engine")[0][:2] == (
        "problem",
        "the engine is for compute capability 8.0, GPU 4 has 9.0",
    )


def test_what_an_engine_will_take_is_known_before_it_is_built(llama: dict[str, Part]) -> None:
    unbuilt = {role: replace(one, manifest=None) for role, one in llama.items()}
    checks = [*deployment.engines(unbuilt), *placed(unbuilt, hgx())]
    assert found(checks, "target engine")[0] == (
        "warning",
        "llama-3.1-70b-h100 (trtllm, tp 4) is not built",
        "saguaro build llama-3.1-70b-h100",
    )
    assert found(checks, "GPU 0 memory") == found(placed(llama, hgx()), "GPU 0 memory") != []
    assert found(checks, "target package")[0][:2] == ("problem", "needs tensorrt_llm 1.2.1, which is not installed")
    unknown = replace(unbuilt["target"], recipe=replace(llama["target"].recipe, model="somebody/something"))
    assert found(placed({"target": unknown}, hgx()), "GPU 0 memory") == []


# The machine ---------------------------------------------------------------------------------------------------------


def test_this_machine_is_looked_at_without_a_deployment(tmp_path: Path, nothing_left: None) -> None:
    """For real: MPI's two jobs meet, and what is missing for GPUs is said, whatever there is."""
    done = subprocess.run(
        [sys.executable, "-m", "saguaro.cli", "doctor", "--json", "--store", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    sections = {section["title"]: section["checks"] for section in report["sections"]}
    assert set(sections) == {"packages", "MPI", "machine", "GPUs"}
    assert [check["level"] for check in sections["MPI"]] == ["ok"] * 3
    levels = {check["level"] for checks in sections.values() for check in checks}
    assert levels <= {"ok", "warning", "problem"}
    silent = [c for checks in sections.values() for c in checks if c["level"] == "warning" and not c["remedy"]]
    assert silent == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without starting MPI jobs."""
    monkeypatch.setattr(machine, "mpi", lambda: [])


def test_a_deployment_on_the_cpu_can_run_here_and_says_what_it_takes(
    quick: None, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    text = "name: mine\ntarget: {recipe: tiny-target}\ndraft: {recipe: tiny-draft}\n"
    text += "serving: {http_port: 0, grpc_port: 0, triton_metrics_port: 0, monitor_port: 0, openai_port: 0}\n"
    path.write_text(text)
    directory = build(find_recipe("tiny-target"), store)
    build(find_recipe("tiny-draft"), store)
    assert cli.main(["doctor", str(path), "--store", str(store)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("mine can run here\n")
    assert "tiny-target (pytorch) is built in" in printed
    assert "target and draft mean the same by each" in printed
    # The same sum as the engine's own when it is loaded.
    need = memory_needed(directory, Manifest.load(directory), block_size=16, num_blocks=1024)
    assert f"{need / 2**20:.0f} MiB for the target" in printed
    weights = (directory / "model.safetensors").stat().st_size
    assert need == weights + 16384 * 2 * 4 * 2 * 8 * 4  # 4 layers, 2 heads of 8 values in float32

    path.write_text(text.replace("openai_port: 0", "openai_port: 0, max_queue: 1") + "speculation: {mode: ar}\n")
    assert cli.main(["doctor", str(path), "--store", str(store)]) == 0
    assert "draft" not in capsys.readouterr().out.partition("deployment mine")[2]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_quantised_model_needs_a_compiler(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"target": part(f"qwen2.5-coder-1.5b-{dtype}-cpu", tmp_path), "draft": part("tiny-draft", tmp_path)}
    monkeypatch.setenv("CXX", "sh")
    assert found(machine.packages(), "C++ compiler")[0][0] == "ok"
    assert "problem" not in {check.level for check in deployment.engines(parts) if "compiler" in check.name}
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found(machine.packages(), "C++ compiler")[0][:2] == ("warning", "not found")
    (check,) = [check for check in deployment.engines(parts) if "compiler" in check.name]
    assert (check.name, check.level) == ("target compiler", "problem")
    assert "g++" in check.remedy


def test_what_keeps_a_deployment_from_running_is_the_exit_status(
    quick: None, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        path.write_text(
            "name: mine\ntarget: {recipe: tiny-target, kv_tokens: 100000000000}\nspeculation: {mode: ar}\n"
            f"serving: {{http_port: {port}, grpc_port: 0, triton_metrics_port: 0, monitor_port: 0, openai_port: 0}}\n"
        )
        build(find_recipe("tiny-target"), store)
        assert cli.main(["doctor", str(path), "--json", "--store", str(store)]) == 1
    report = json.loads(capsys.readouterr().out)
    problems = {c["name"] for c in report["sections"][-1]["checks"] if c["level"] == "problem"}
    assert problems == {"memory", "serving.http_port"}
    assert not report["can_run"]
    path.write_text("name: mine\ntarget: {recipe: tiny-target, divices: [0]}\nspeculation: {mode: ar}\n")
    assert cli.main(["doctor", str(path), "--store", str(store)]) == 1
    assert "did you mean devices?" in capsys.readouterr().err


def test_a_deployment_on_gpus_cannot_run_without_them(
    quick: None, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        diagnosis, "read_node", lambda: read_node(FakeNvml((), broken=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    )
    path = tmp_path / "gpu.yaml"
    path.write_text("name: gpu\ntarget: {recipe: tiny-target, devices: auto}\nspeculation: {mode: ar}\n")
    report = diagnosis.diagnose(str(path), store)
    assert not report.can_run
    checks = [check for section in report.sections for check in section.checks]
    assert "NVML Shared Library Not Found" in found(checks, "NVML")[0][1]
    assert found(checks, "placement")[0][0] == "problem"
    assert "locked memory" in {check.name for check in checks}
    monkeypatch.setattr(diagnosis, "read_node", lambda: read_node(hgx()))
    checks = [check for section in diagnosis.diagnose(str(path), store).sections for check in section.checks]
    assert found(checks, "target ranks")[0][1].startswith("rank 0 GPU 0 on cores")
    with pytest.raises(ConfigError, match="there is no deployment named"):
        diagnosis.diagnose("tiny-tp5", store)


def test_only_a_gpu_that_is_there_or_needed_can_be_a_problem(
    quick: None, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists a network card of NVIDIA's, a GPU of somebody else's, then one of theirs; or knows a driver."""
    monkeypatch.setattr(
        diagnosis, "read_node", lambda: read_node(FakeNvml((), broken=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    )
    monkeypatch.setattr(nvml, "_DEVICES", tmp_path)
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "driver")

    def said() -> tuple[str, str]:
        (section,) = (section for section in diagnosis.diagnose(None, store).sections if section.title == "GPUs")
        (check,) = section.checks
        return check.name, check.level

    for index, (vendor, kind) in enumerate((("0x10de", "0x020000"), ("0x1002", "0x030000"), ("0x10de", "0x030200"))):
        assert said() == ("GPUs", "ok")
        device = tmp_path / f"0000:0{index}:00.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert said() == ("NVML", "problem")
    (device / "vendor").unlink()
    assert said() == ("GPUs", "ok")
    (tmp_path / "driver").mkdir()
    assert said() == ("NVML", "problem")


def test_graphs_take_memory_of_a_gpu_alone_and_where_they_are_on(store: Path) -> None:
    recipe = find_recipe("tiny-target")
    directory = build(recipe, store)
    manifest = Manifest.load(directory)

    def memory(**options: Any) -> int:
        found = Part(ModelConfig("tiny-target", **options), recipe, store, directory, manifest).memory
        assert found is not None
        return found

    logits = MAX_ROWS * manifest.vocab_size * 4
    assert memory(devices="auto") - memory(devices="auto", cuda_graphs=False) >= logits
    assert memory() == memory(cuda_graphs=False)


def test_only_problems_that_concern_the_deployment_count() -> None:
    bad = Check("x", "problem", "broken", "mend it")
    assert Report(None, (Section("GPUs", (bad,), needed=True),)).can_run  # nobody asked for anything
    assert Report("d", (Section("GPUs", (bad,), needed=False),)).can_run
    report = Report("d", (Section("GPUs", (replace(bad, level="warning"),), needed=True),))
    assert report.can_run
    assert report.as_text() == "GPUs\n  warning  x:                   broken -> mend it\nd can run here"
    assert not Report("d", (Section("GPUs", (bad,), needed=True),)).can_run


def test_an_mpi_that_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Mpi:
        raise LaunchError("no MPI was found: install one")

    assert [check.level for check in machine.mpi(none)] == ["problem"]
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho 'libmpi.so: cannot open' >&2\nexit 3\n")
    broken.chmod(0o755)
    checks = machine.mpi(lambda: Mpi(str(broken), "mpich", "5"))
    assert found(checks, "mpi4py")[0][:2] == ("problem", "a rank cannot load it: libmpi.so: cannot open")
    broken.write_text("#!/bin/sh\nprintf '[proxy:0@vm] no folder\\n[mpiexec@vm] and so on\\n' >&2\nexit 255\n")
    (check,) = machine.mpi(lambda: Mpi(str(broken), "mpich", "5"))
    assert (check.name, check.level) == ("mpiexec", "problem")
    assert check.found == f"{broken} cannot start a rank: [proxy:0@vm] no folder"
    broken.write_text("#!/bin/sh\necho 'UCX ERROR of no consequence'; echo 'library: Open MPI 4.1.4'\n")
    checks = machine.mpi(lambda: Mpi(str(broken), "mpich", "5"))
    assert found(checks, "mpi4py")[0][:2] == ("problem", "loads Open MPI 4.1.4, which that mpiexec does not start")
    checks = machine.mpi(lambda: Mpi(str(broken), "openmpi", "4.1.4"))
    assert [check.level for check in checks] == ["ok"] * 3
    broken.write_text("#!/bin/sh\ncase \"$*\" in *library*) echo 'library: MPICH 5.0.2';; *) exit 1;; esac\n")
    checks = machine.mpi(lambda: Mpi(str(broken), "mpich", "5"))
    assert found(checks, "joining two jobs")[0][0] == "problem"


def test_limits_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._shared(tmp_path / "nowhere", 1).level == "problem"
    assert machine._shared(tmp_path, 1).level == "ok"
    assert "--shm-size=2g" in machine._shared(tmp_path, 1 << 60).remedy
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1024, 4096))
    assert machine._files().level == "warning"
    assert machine._locked().level == "warning"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert "take turns" in machine._cores().remedy
    assert machine.store(tmp_path / "a" / "b").level in ("ok", "warning")
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine.store(tmp_path / "closed" / "store").level == "problem"


def test_ports_are_looked_at_one_by_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        serving = ServingConfig(http_port=port, grpc_port=0, triton_metrics_port=port, monitor_port=0, openai_port=0)
        checks = machine.ports(serving)
    assert [check.level for check in checks] == ["ok", "problem", "ok", "problem", "ok", "problem"]
    assert "cannot be used (Address already in use)" in checks[1].found
