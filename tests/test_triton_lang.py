"""The attention kernel without a GPU: run by Triton's interpreter, and built for every architecture it is meant for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernel language comes with torch's CUDA builds and the extra `kernels`")

from compile_kernels import attention_resources, merge_resources, variant_of
from saguaro.errors import EngineError
from saguaro.plugins.triton_lang import compile_attention
from saguaro.plugins.variant import Variant
from scripts import load_script

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def interpret(cases: int, seconds: float) -> str:
    """Run `kernel_cases.py` in a process whose kernels are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "SAGUARO_KERNEL_CASES": str(cases)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and they are slow to import
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "kernel_cases.py"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_interpreted_kernel_equals_the_definition() -> None:
    assert " passed" in interpret(6, 300)


@pytest.mark.soak
def test_the_interpreted_kernel_equals_the_definition_in_300_random_batches() -> None:
    assert "311 passed" in interpret(300, 3600)


def test_the_gpu_script_checks_in_the_interpreter_where_there_is_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "gpu/fan_out.py", "--out", str(tmp_path / "found.json")]
    options = {"cwd": HERE, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*command, "--cpu", "--cases", "2"], **options)
    assert done.returncode == 0, done.stderr
    assert "2 random batches on cpu: 0 wrong" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())["wrong"] == []
    if not torch.cuda.is_available():
        refused = subprocess.run(command, **options)
        assert refused.returncode == 2
        assert "no CUDA device; --cpu checks the kernel" in refused.stderr


def test_the_gpu_script_s_table_names_what_was_left_out() -> None:
    script = load_script("tests/gpu/fan_out.py")
    us = {"kernel": 12.34, "dense": 56.78, "flex": "skipped: time", "flashinfer": "not installed"}
    page = script.table([script.Result((32, 8, 64), 4, 16, 4096, 8, us, 0.756)], 4.1e12)
    assert "Copy ceiling 4100 GB/s" in page
    assert page.endswith("| 32/8/64 | 4 | 16 | 4096 | 8 | 12.3 | 56.8 | skipped: time | not installed | 0.76 |\n")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_heads_of_128_spill_nothing(capability: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = attention_resources(variant_of(torch.bfloat16, 128, 16, 8), capability)
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")
    assert found.fits


def test_the_merge_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    found = merge_resources(variant_of(torch.bfloat16, 128, 16, 32), 90)
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")
    assert found.fits


def test_without_splits_the_binary_ends_with_the_output() -> None:
    """What a host other than Triton's launcher has to pass: eleven arguments, then the two that may be null."""
    compiled = compile_attention(variant_of(torch.float16, 64, 4, 1), 90)
    entry = compiled.ptx[compiled.ptx.index(".entry") :]
    assert compiled.name in entry[: entry.index("(")]
    assert entry[: entry.index(")")].count(".param") == 11 + 2
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.threads == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "dtype: the attention kernel computes float16, bfloat16 and float32"),
        ({"heads": 7}, "heads: needs a multiple of the 2 KV heads, got 7"),
        ({"head_dim": 256}, "head_dim: the attention kernel takes heads of 1 to 128, got 256"),
        ({"splits": 3}, "splits: needs a power of two from 1 to 32, got 3"),
        ({"most_rows": 0}, "most_rows"),
        ({"window": -1}, "window"),
    ],
)
def test_a_variant_that_cannot_be_built_is_refused(change: dict[str, object], message: str) -> None:
    fields = {"dtype": torch.float16, "heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 16, "scale": 0.1}
    with pytest.raises(EngineError, match=message):
        Variant(**fields | {"most_rows": 4} | change)
