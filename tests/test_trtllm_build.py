"""Building for TensorRT-LLM with stand-ins for its programs: real processes, and what happens when one goes wrong."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saguaro.build import driver, trtllm
from saguaro.build.model_shape import read_shape
from saguaro.build.plan import Step
from saguaro.build.recipe import Recipe, Tiny, TrtllmOptions
from saguaro.build.steps import run_step
from saguaro.build.tiny import TinyWeights
from saguaro.build.trtllm_plan import plan_trtllm
from saguaro.engines.manifest import Manifest, compare_token_maps
from saguaro.engines.trtllm_config import VERSION, read_trtllm_config
from saguaro.errors import CapacityError, ConfigError, EngineError, ModelError
from tiny_models import tiny_model
from trtllm_tools import install

TINY = Tiny("llama", layers=1, hidden_size=32, heads=4, kv_heads=2, vocab_size=500, max_model_len=64)
OPTIONS = TrtllmOptions(max_batch_size=2, max_draft_len=4)


class Machine:
    """A GPU node with TensorRT-LLM, as far as a build looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"

    def behave(self, **programs: dict[str, Any]) -> None:
        names = {"build": "trtllm-build", "llama": "convert_checkpoint.py (llama)", "quantize": "quantize.py"}
        found = {names[name]: behaviour for name, behaviour in programs.items()}
        (self.folder / "behaviour.json").write_text(json.dumps(found))

    def calls(self) -> list[str]:
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    def recipe(self, **fields: Any) -> Recipe:
        model = str(self.folder / "llama3.1")
        options = {"model": model, "tp": 2, "max_model_len": 128, "trtllm": OPTIONS} | fields
        return Recipe("test", "trtllm", **options)

    def build(self, **fields: Any) -> Path:
        return driver.build(self.recipe(**fields), self.store, progress=False)

    def left(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.store / folder).glob("*"))


def installed(folder: Path, version: str) -> Path:
    """A folder for sys.path in which tensorrt_llm is installed, as far as its metadata goes."""
    metadata = folder / f"packages-{version}" / f"tensorrt_llm-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    return metadata.parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama3.1", "qwen3"):
        tiny_model(family, torch.bfloat16).save_pretrained(folder / family)
        TinyWeights(TINY).write_tokenizer(folder / family)
        (folder / family / "generation_config.json").write_text('{"eos_token_id": [499, 3]}')
    return folder


@pytest.fixture
def machine(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    programs, examples = install(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(trtllm, "EXAMPLES", (tmp_path / "none", examples))
    monkeypatch.syspath_prepend(installed(tmp_path, VERSION))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for family in ("llama3.1", "qwen3"):
        (tmp_path / family).symlink_to(models / family)
    return Machine(tmp_path)


# What comes out ---------------------------------------------------------------------------------------------------


def test_an_engine_directory(machine: Machine) -> None:
    directory = machine.build()
    manifest = Manifest.load(directory)
    assert (manifest.engine, manifest.dtype, manifest.tp, manifest.device) == ("trtllm", "bfloat16", 2, "9.0")
    assert (manifest.family, manifest.max_model_len, manifest.eos_token_ids) == ("llama", 128, (499, 3))
    assert manifest.vocab_size == 500  # of the tokenizer; the model has 512 rows
    assert manifest.versions["tensorrt_llm"] == VERSION
    assert {"config.json", "rank0.engine", "rank1.engine", "tokenizer.json"} <= manifest.files.keys()
    assert manifest.damaged(directory) == []
    config = read_trtllm_config(directory)
    assert (config.vocab_size, config.max_seq_len, config.max_num_tokens) == (512, 132, 256)
    assert (config.speculative_decoding_mode, config.max_draft_len) == ("draft_tokens_external", 4)
    assert (config.rotary_type, config.rotary_factor) == ("llama3", 8.0)
    assert (directory / "rank0.engine").stat().st_nlink == 1  # nothing else holds its bytes
    compare_token_maps(directory, directory)


def test_each_step_is_done_once(machine: Machine) -> None:
    directory = machine.build()
    assert machine.calls() == ["convert_checkpoint.py (llama)", "trtllm-build"]
    assert machine.build() == directory
    assert len(machine.calls()) == 2
    other = machine.build(trtllm=dataclasses.replace(OPTIONS, max_batch_size=4))
    assert other != directory
    assert machine.calls()[2:] == ["trtllm-build"]  # the checkpoint is the same
    machine.build(tp=1)
    assert machine.calls()[3:] == ["convert_checkpoint.py (llama)", "trtllm-build"]
    assert len(machine.left("steps")) == 2  # two checkpoints; engines are in their directories
    assert machine.left("timing") == ["test-sm90.cache"]
    assert len(machine.left("engines")) == 3


def test_the_other_forms(machine: Machine) -> None:
    qwen = machine.build(model=str(machine.folder / "qwen3"))
    assert read_trtllm_config(qwen).architecture == "Qwen3ForCausalLM"
    assert Manifest.load(qwen).family == "qwen3"
    fp8 = machine.build(dtype="fp8")
    assert Manifest.load(fp8).dtype == "fp8"
    assert (read_trtllm_config(fp8).quant_algo, read_trtllm_config(fp8).kv_cache_quant_algo) == ("FP8", "FP8")
    plain = machine.build(trtllm=dataclasses.replace(OPTIONS, max_draft_len=0, gather_generation_logits=True))
    config = read_trtllm_config(plain)
    assert (config.speculative_decoding_mode, config.max_seq_len) == ("none", 128)
    assert config.gather_generation_logits
    assert machine.calls() == [
        "convert_checkpoint.py (qwen)",
        "trtllm-build",
        "quantize.py",
        "trtllm-build",
        "convert_checkpoint.py (llama)",
        "trtllm-build",
    ]


def test_what_changes_nothing_does_not_compile_again(machine: Machine) -> None:
    plan = plan_trtllm(machine.recipe(), read_shape(machine.folder / "llama3.1"))
    few = plan_trtllm(
        machine.recipe(trtllm=dataclasses.replace(OPTIONS, workers=1)), read_shape(machine.folder / "llama3.1")
    )
    assert plan.steps != few.steps
    assert trtllm.step_keys(plan, "a") == trtllm.step_keys(few, "a")
    checkpoint, engine = trtllm.step_keys(plan, "b")
    assert checkpoint not in trtllm.step_keys(plan, "a")
    assert engine not in trtllm.step_keys(plan, "a")


# What goes wrong --------------------------------------------------------------------------------------------------


def test_a_failed_step_shows_the_end_of_its_log_and_is_resumed(machine: Machine) -> None:
    machine.behave(build={"says": "line one\nCUDA error: out of memory", "status": 3})
    with pytest.raises(EngineError) as caught:
        machine.build()
    said = str(caught.value)
    assert "the step compile failed (exit status 3)" in said
    assert "A GPU ran out of memory" in said
    log = next((machine.store / "logs").glob("test-compile-*.log"))
    assert f"The end of {log}:" in said
    assert said.endswith("\n  CUDA error: out of memory")
    assert machine.left("engines") == []
    assert [name.partition("-")[0] for name in machine.left("steps")] == ["convert"]  # and nothing half-made
    machine.behave()
    assert Manifest.load(machine.build()).tp == 2
    assert machine.calls() == ["convert_checkpoint.py (llama)", "trtllm-build", "trtllm-build"]


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"llama": {"kill": int(signal.SIGKILL)}}, "killed by SIGKILL.*run out of main memory"),
        ({"llama": {"nothing": True}}, "the step convert ended well but made no rank0.safetensors"),
        ({"build": {"nothing": True}}, "the step compile ended well but made no rank0.engine"),
        (
            {"build": {"change": {"pretrained_config": {"vocab_size": 128}}}},
            "not what recipe test asks for: vocab_size is 128, not 512.*Delete the folder",
        ),
        (
            {"build": {"change": {"build_config": {"max_draft_len": 3, "max_seq_len": 131}}}},
            "max_seq_len is 131, not 132; max_draft_len is 3, not 4",
        ),
        ({"build": {"change": {"build_config": {"max_num_tokens": 9}}}}, "max_num_tokens is 9, not 256"),
        (
            {"build": {"change": {"build_config": {"kv_cache_type": "CONTINUOUS"}}}},
            "kv_cache_type is continuous, not paged.*Delete .*test-compile",
        ),
    ],
)
def test_a_step_that_ends_badly(machine: Machine, behaviour: dict[str, Any], said: str) -> None:
    machine.behave(**behaviour)
    with pytest.raises(EngineError, match=rf"(?s){said}"):
        machine.build()
    assert machine.left("engines") == []


def test_a_checked_engine_is_not_lost_with_the_directory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of compiling survive what goes wrong after it."""

    def fail(*arguments: Any) -> None:
        raise ModelError("no tokenizer")

    with monkeypatch.context() as patch:
        patch.setattr(trtllm, "_write_manifest", fail)
        with pytest.raises(ModelError):
            machine.build()
    assert machine.left("engines") == []
    machine.build()
    assert machine.calls() == ["convert_checkpoint.py (llama)", "trtllm-build"]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "1.3.0rc29",
            r"tensorrt_llm is 1\.3\.0rc29, and from 1\.3 on TensorRT-LLM has no compiled engines.*versions\.md",
        ),
        ("1.4.0rc1", r"from 1\.3 on TensorRT-LLM has no compiled engines"),
        ("1.2.0", r"tensorrt_llm is 1\.2\.0; engines are built and run with 1\.2\.1"),
        ("1.2.1rc2", r"tensorrt_llm is 1\.2\.1rc2; engines"),
        ("0.21.0", r"tensorrt_llm is 0\.21\.0; engines"),
    ],
)
def test_other_versions_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, said: str) -> None:
    monkeypatch.syspath_prepend(installed(machine.folder, version))
    with pytest.raises(EngineError, match=said):
        machine.build()
    assert machine.calls() == []


def test_a_machine_without_tensorrt_llm(models: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"needs TensorRT-LLM 1\.2\.1, and tensorrt_llm is not installed.*--dry-run"):
        driver.build(Recipe("test", "trtllm", model=str(models / "qwen3")), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False), EngineError, "CUDA finds none here"),
        (
            lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0)),
            EngineError,
            r"trtllm\.gpu is h100-80gb, of compute capability 9\.0; this machine's GPU has 8\.0",
        ),
        (lambda patch: patch.setattr(trtllm, "EXAMPLES", (Path("/none"),)), EngineError, "is in none of /none"),
        (lambda patch: patch.setenv("PATH", "/none"), EngineError, "trtllm-build is not installed here"),
    ],
)
def test_a_machine_that_lacks_something(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
    said: str,
) -> None:
    change(monkeypatch)
    with pytest.raises(error, match=said):
        machine.build()


def test_models_that_are_not_for_it(machine: Machine) -> None:
    (machine.folder / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a GGUF file; TensorRT-LLM builds from safetensors"):
        machine.build(model=str(machine.folder / "m.gguf"))
    with pytest.raises(ConfigError, match="tiny is not for the engine trtllm"):
        machine.build(model=None, tiny=TINY)


def test_no_disk_space_is_said_before_the_step(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saguaro.build.store.shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(CapacityError, match="for the step convert of test"):
        machine.build()
    assert machine.calls() == []


# Steps ------------------------------------------------------------------------------------------------------------


def step(*command: str, timeout_s: float = 60) -> Step:
    return Step("work", "ENGINE", command, "", timeout_s)


def shell(text: str, **options: Any) -> Step:
    return step("/bin/sh", "-c", text, **options)


def test_a_step_that_hangs_is_stopped_with_its_workers(tmp_path: Path) -> None:
    hanging = shell("sleep 600 & echo $$! > $ENGINE.pid; echo started; wait", timeout_s=3)
    with pytest.raises(EngineError, match=r"(?s)work did not end within 3 s and was stopped.*\n  started$"):
        run_step(hanging, {}, tmp_path / "made", tmp_path / "work.log")
    worker = int((tmp_path / ".partial-made.pid").read_text())
    ends(worker)
    assert not (tmp_path / "made").exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell without job control has its background processes ignore SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_build_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / ".partial-made.pid").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_step(
            shell("echo $$$$ > $ENGINE.new; mv $ENGINE.new $ENGINE.pid; exec sleep 600"),
            {},
            tmp_path / "made",
            tmp_path / "work.log",
        )
    ends(int((tmp_path / ".partial-made.pid").read_text()))


def test_an_interrupt_while_a_step_is_started_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when there is a process and nobody knows its number yet."""
    started: list[int] = []
    fork = subprocess._fork_exec  # type: ignore[attr-defined]

    def interrupted(*arguments: Any) -> int:
        started.append(fork(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "_fork_exec", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_step(shell("touch $ENGINE.ran; exec sleep 600"), {}, tmp_path / "made", tmp_path / "work.log")
    ends(*started)
    assert not (tmp_path / ".partial-made.ran").exists()


def ends(process: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    pytest.fail(f"process {process} goes on")


def test_a_step_says_what_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saguaro.build.steps._SAY_S", 0.0)
    monkeypatch.setattr("saguaro.build.steps._LOOK_S", 0.01)
    with caplog.at_level(logging.INFO, logger="saguaro"):
        # Progress bars end in carriage returns.
        run_step(
            shell("printf 'old\\r[50%%] new\\n'; sleep 0.3; echo x > $ENGINE/f"),
            {},
            tmp_path / "made",
            tmp_path / "log",
        )
        run_step(shell("exit 1"), {}, tmp_path / "made", tmp_path / "log")
    assert (tmp_path / "made" / "f").read_text() == "x\n"
    said = [record.getMessage() for record in caplog.records]
    assert any(message.endswith(": [50%] new") for message in said)
    assert said[-1] == f"work: {tmp_path / 'made'} is there already"


# config.json ------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(machine: Machine) -> Path:
    return machine.build()


@pytest.mark.parametrize("mode", [2, "2", "DRAFT_TOKENS_EXTERNAL", "SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL"])
def test_the_speculative_mode_is_read_in_any_spelling(engine: Path, mode: object) -> None:
    document = json.loads((engine / "config.json").read_text())
    document["build_config"]["speculative_decoding_mode"] = mode
    (engine / "config.json").write_text(json.dumps(document))
    assert read_trtllm_config(engine).speculative_decoding_mode == "draft_tokens_external"


def test_a_config_that_cannot_be_run(engine: Path) -> None:
    text = (engine / "config.json").read_text()

    def refused(change: Callable[[dict[str, Any]], None], said: str) -> None:
        document = json.loads(text)
        change(document)
        (engine / "config.json").write_text(json.dumps(document))
        with pytest.raises(EngineError, match=said):
            read_trtllm_config(engine)

    def update(*path: str, **values: Any) -> Callable[[dict[str, Any]], None]:
        def change(document: dict[str, Any]) -> None:
            for key in path:
                document = document[key]
            document.update(values)

        return change

    refused(
        update(version="1.2.0"), r"built with TensorRT-LLM 1\.2\.0; this version of saguaro runs engines of 1\.2\.1"
    )
    refused(update("pretrained_config", "mapping", pp_size=2), "pp_size is not 1")
    refused(update("pretrained_config", "mapping", world_size=4), "world_size is not tp_size")
    refused(update("pretrained_config", "mapping", world_size=4, tp_size=4), r"rank2\.engine: is missing or empty")
    refused(update("build_config", max_beam_width=2), "max_beam_width is not 1")
    refused(
        update("build_config", speculative_decoding_mode=1), "max_draft_len is 4 with speculative_decoding_mode none"
    )
    refused(update("build_config", "plugin_config", use_paged_context_fmha=False), "which block reuse needs")
    refused(update("build_config", "plugin_config", paged_kv_cache=None), "paged_kv_cache is off")
    refused(update("build_config", "plugin_config", remove_input_padding=False), "remove_input_padding is off")
    refused(update("build_config", "plugin_config", gpt_attention_plugin=None), "gpt_attention_plugin is off")
    refused(lambda document: document["build_config"].pop("max_num_tokens"), "KeyError: 'max_num_tokens'")
    refused(update(build_config=[]), "TypeError")
    # Calibration may name the same activation after its gate.
    document = json.loads(text)
    document["pretrained_config"]["hidden_act"] = "swiglu"
    (engine / "config.json").write_text(json.dumps(document))
    assert read_trtllm_config(engine).hidden_act == "silu"
    (engine / "config.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        read_trtllm_config(engine)
    (engine / "config.json").write_text(text)
    (engine / "rank1.engine").write_bytes(b"")
    with pytest.raises(EngineError, match=r"rank1\.engine: is missing or empty"):
        read_trtllm_config(engine)
