"""Dockerfile, compose file and the examples of docs/deployment: linted, parsed, and held to what the package says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from saguaro.doctor.machine import SHARED_CPU, SHARED_GPU
from saguaro.engines.schema import parse
from saguaro.orchestrator.config import DeploymentConfig, ServingConfig, shipped_deployments
from scripts import load_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "deployment" / "examples"
SERVING = ServingConfig()
PORTS = {SERVING.http_port, SERVING.grpc_port, SERVING.triton_metrics_port, SERVING.monitor_port, SERVING.openai_port}
STORE = "/var/lib/saguaro"
GIB = 1 << 30


def stages() -> dict[str, list[str]]:
    """Instructions of each stage of the Dockerfile, comments and line ends taken out."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    stage: list[str] = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("FROM "):
            stage = found.setdefault(line.split()[-1], [])
        stage.append(line)
    return found


def instruction(stage: str, name: str) -> str:
    """The last one of that name, which is the one that counts."""
    return [line.removeprefix(f"{name} ") for line in stages()[stage] if line.startswith(f"{name} ")][-1]


def test_the_dockerfile_is_linted() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_either_image_serves_as_a_user_and_can_be_asked_for_its_health(stage: str) -> None:
    assert instruction(stage, "USER") == "10001:10001"
    entry = json.loads(instruction(stage, "ENTRYPOINT"))
    assert entry == ["tini", "--", "saguaro", "serve", "--host", "0.0.0.0"]
    assert {int(port) for port in instruction(stage, "EXPOSE").split()} == PORTS
    assert f"http://127.0.0.1:{SERVING.monitor_port}/health" in instruction(stage, "HEALTHCHECK")
    assert instruction(stage, "VOLUME") == STORE
    assert f"XDG_CACHE_HOME={STORE}/cache" in instruction(stage, "ENV")
    assert not [line for line in stages()[stage] if re.search(r"models pull|saguaro build|\.safetensors|\.gguf", line)]


def test_the_images_are_made_of_what_the_contract_names() -> None:
    assert json.loads(instruction("cpu", "CMD"))[0] in shipped_deployments()
    assert "ARG GPU_BASE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in (ROOT / "Dockerfile").read_text()
    assert stages()["gpu"][0] == "FROM ${GPU_BASE} AS gpu"


def test_what_is_added_to_nvidias_image_replaces_nothing_of_it() -> None:
    module = load_script("docker/requirements.py")
    added = {re.split(r"[\[<>=]", one)[0] for one in module.requirements(ROOT / "pyproject.toml")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = {
        re.split(r"[\[<>=; ]", one)[0] for one in project["dependencies"] + project["optional-dependencies"]["serve"]
    }
    assert added == everything - module.OF_THE_IMAGE
    assert everything >= module.OF_THE_IMAGE  # a name that is in neither is misspelt
    assert {"msgspec", "pyzmq", "fastapi", "nvidia-ml-py"} <= added


def test_the_build_context_has_the_package_and_nothing_heavy() -> None:
    ignored = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")}
    assert {".git", ".venv", ".cache", "tests"} <= ignored
    assert "build" not in ignored  # a reflex elsewhere; here it is a package
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert not ignored & {package.removeprefix("saguaro.").split(".")[0] for package in packages}


# compose -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """As the specification reads it: anything it does not know is an error."""
    return PyCompose.from_yaml((ROOT / "compose.yaml").read_text()).to_dict()


def test_a_compose_file_that_is_not_one_is_refused() -> None:
    with pytest.raises(ValueError, match="shm_sise"):
        PyCompose.from_yaml((ROOT / "compose.yaml").read_text().replace("shm_size", "shm_sise"))


@pytest.mark.parametrize(("service", "shared"), [("cpu", SHARED_CPU), ("gpu", SHARED_GPU)])
def test_compose_gives_each_image_what_the_doctor_asks_for(compose: dict[str, Any], service: str, shared: int) -> None:
    raw = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]
    assert set(raw) == set(compose["services"][service])
    assert raw["build"]["target"] in stages()
    size, unit = re.fullmatch(r"(\d+)([mg])b", raw["shm_size"]).groups()  # type: ignore[union-attr]
    assert int(size) << {"m": 20, "g": 30}[unit] >= shared
    published = [entry.split(":") for entry in raw["ports"]]
    assert all(host == "127.0.0.1" and outside == inside for host, outside, inside in published)
    assert {int(inside) for _, _, inside in published} <= PORTS
    assert f"store:{STORE}" in raw["volumes"]
    assert raw["profiles"] == [service]


def test_compose_reserves_gpus_by_number(compose: dict[str, Any]) -> None:
    raw = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["gpu"]
    (device,) = raw["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0", "1", "2", "3", "4"], "capabilities": ["gpu"]}
    assert raw["ulimits"]["memlock"] == -1


# Kubernetes ----------------------------------------------------------------------------------------------------------


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def pod(name: str) -> dict[str, Any]:
    """The pod template of an example."""
    found = documents(name)
    kinds = {document["kind"]: document["spec"] for document in found if "spec" in document}
    if "Deployment" in kinds:
        return kinds["Deployment"]["template"]  # type: ignore[no-any-return]
    if "LeaderWorkerSet" in kinds:
        return kinds["LeaderWorkerSet"]["leaderWorkerTemplate"]["workerTemplate"]  # type: ignore[no-any-return]
    return kinds["MPIJob"]["mpiReplicaSpecs"]["Launcher"]["template"]  # type: ignore[no-any-return]


ALL = ["kubernetes.yaml", "leaderworkerset.yaml", "mpijob.yaml"]


def test_kubernetes_objects_are_what_its_schema_says() -> None:
    version = kubernetes_validate.latest_version()
    for document in documents("kubernetes.yaml"):
        kubernetes_validate.validate(document, version, strict=True)
    for name in ALL:
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod(name)}
        kubernetes_validate.validate(template, version, strict=True)
    template["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(template, version, strict=True)


def test_every_example_runs_the_same_pod() -> None:
    one, other, third = (pod(name)["spec"] for name in ALL)
    assert one == other == third


def test_the_pod_has_what_a_deployment_needs() -> None:
    spec = pod("kubernetes.yaml")["spec"]
    (container,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "openai": SERVING.openai_port,
        "http": SERVING.http_port,
        "grpc": SERVING.grpc_port,
        "monitor": SERVING.monitor_port,
    }
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "monitor"}
    assert container["livenessProbe"]["tcpSocket"] == {"port": "monitor"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert int(mounts["/dev/shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB >= SHARED_GPU
    assert STORE in mounts
    assert spec["securityContext"]["runAsUser"] == int(instruction("gpu", "USER").split(":")[0])


def test_the_deployment_in_the_configmap_fits_probes_and_gpus() -> None:
    config_map, *_ = documents("kubernetes.yaml")
    config = parse(yaml.safe_load(config_map["data"]["deployment.yaml"]), DeploymentConfig, "deployment.yaml")
    spec = pod("kubernetes.yaml")["spec"]
    (container,) = spec["containers"]
    assert container["args"] == ["/etc/saguaro/deployment.yaml"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= config.serving.start_timeout_s
    assert spec["terminationGracePeriodSeconds"] >= config.serving.grace_s + 60
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 5  # tp 4 and the draft


def test_the_operators_objects_have_their_keys() -> None:
    """Neither schema is in a registry: the keys that the operators' own validation asks for."""
    (lws,) = documents("leaderworkerset.yaml")
    assert (lws["apiVersion"], lws["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert set(lws["spec"]) == {"replicas", "leaderWorkerTemplate"}
    template = lws["spec"]["leaderWorkerTemplate"]
    assert set(template) == {"size", "restartPolicy", "workerTemplate"}
    assert (template["size"], template["restartPolicy"]) == (1, "RecreateGroupOnPodRestart")
    (job,) = documents("mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(job["spec"]) == {
        "slotsPerWorker",
        "mpiImplementation",
        "sshAuthMountPath",
        "runPolicy",
        "mpiReplicaSpecs",
    }
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert set(job["spec"]["mpiReplicaSpecs"]) == {"Launcher"}
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]
    assert (launcher["replicas"], launcher["restartPolicy"]) == (1, "OnFailure")


# Slurm ---------------------------------------------------------------------------------------------------------------


def sbatch(tmp_path: Path, saguaro: str) -> subprocess.Popen[str]:
    """The example in a shell, with a `saguaro` that is `saguaro` (shell text)."""
    command = tmp_path / "saguaro"
    command.write_text(f'#!/bin/bash\necho "$@" >> {shlex.quote(str(tmp_path / "calls"))}\n{saguaro}\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "TMPDIR": str(tmp_path),
    }
    return subprocess.Popen(
        ["bash", EXAMPLES / "saguaro.sbatch", "mine.yaml"], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_the_batch_script_hands_the_warning_on_and_waits(tmp_path: Path) -> None:
    serve = '[ "$1" = doctor ] && exit 0\ntrap "sleep 0.3; echo drained; exit 5" TERM\necho up\nsleep 60 & wait'
    with sbatch(tmp_path, serve) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        assert job.stdout.readline() == "drained\n"
        assert job.wait(20) == 5  # the server's own status
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "doctor mine.yaml"
    assert calls[1].startswith("serve mine.yaml --host ")


@pytest.mark.parametrize(("doctor", "serve", "status", "calls"), [(1, 0, 1, 1), (0, 3, 3, 2), (0, 0, 0, 2)])
def test_the_batch_script_ends_with_what_failed(
    tmp_path: Path, doctor: int, serve: int, status: int, calls: int
) -> None:
    with sbatch(tmp_path, f'[ "$1" = doctor ] && exit {doctor}\nexit {serve}') as job:
        assert job.wait(20) == status
    assert len((tmp_path / "calls").read_text().splitlines()) == calls


def test_the_batch_job_asks_for_one_task_on_one_node() -> None:
    options = re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S+)", (EXAMPLES / "saguaro.sbatch").read_text())
    assert {"nodes": "1", "ntasks": "1", "gpus-per-node": "5"}.items() <= dict(options).items()
