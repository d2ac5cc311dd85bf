"""The attention kernels built ahead of time, and what the assembler says they take: `python tests/compile_kernels.py`.

Prints one line for each of the variants a GPU may run; exits with 1 when one takes more shared memory than its device
has, or spills registers: none in half precision at heads of 128, which everything else is sized for, and no more than a
few elsewhere, where the assembler trades them for programs that run at once. Needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton

from saguaro.plugins.triton_lang import Compiled, compile_attention, compile_merge
from saguaro.plugins.variant import Variant

FEW_BYTES = 64  # of spilled registers, stored and loaded
# Shared memory of one program, in bytes (CUDA C programming guide, table of compute capabilities).
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Resources:
    what: str
    registers: int  # of a thread
    shared_bytes: int
    spilled_bytes: int
    fits: bool

    def __str__(self) -> str:
        return (
            f"{self.what:52} {self.registers:3} registers  {self.shared_bytes:6} B shared  "
            f"{self.spilled_bytes} B spilled{'' if self.fits else '  TOO MUCH'}"
        )


def resources(what: str, compiled: Compiled, capability: int, spillable: int) -> Resources:
    """What the assembler that comes with the compiler reports; the options are the compiler's own."""
    assembler = triton.knobs.nvidia.ptxas_blackwell if capability >= 100 else triton.knobs.nvidia.ptxas
    target = re.search(r"^\.target (\S+?)[,\s]", compiled.ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.ptx)
        command = [assembler.path, "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}", str(source)]
        report = subprocess.run(
            [*command, "-o", f"{folder}/cubin"], capture_output=True, text=True, timeout=300, check=True
        ).stderr
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", report))
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", report))
    fits = spilled <= spillable and compiled.shared_bytes <= SHARED[capability]
    return Resources(f"sm_{capability} {what}", registers, compiled.shared_bytes, spilled, fits)


def attention_resources(variant: Variant, capability: int) -> Resources:
    what = (
        f"attention {str(variant.dtype)[6:]} D={variant.head_dim} M={variant.block_m} splits={variant.splits}"
        f"{' window cap' if variant.window else ''}"
    )
    strict = variant.head_dim == 128 and variant.dtype != torch.float32
    return resources(what, compile_attention(variant, capability), capability, 0 if strict else FEW_BYTES)


def merge_resources(variant: Variant, capability: int) -> Resources:
    what = f"merge {str(variant.dtype)[6:]} D={variant.head_dim} splits={variant.splits}"
    return resources(what, compile_merge(variant, capability), capability, 0)


def variant_of(dtype: torch.dtype, head_dim: int, most_rows: int, splits: int, special: bool = False) -> Variant:
    window, soft_cap = (1024, 50.0) if special else (0, 0.0)
    return Variant(dtype, 32, 8, head_dim, 16, head_dim**-0.5, most_rows, splits, window, soft_cap)


def all_resources() -> Iterator[Resources]:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for capability, dtype, head_dim, splits in product(SHARED, dtypes, (64, 96, 128), (1, 8)):
        variants = (variant_of(dtype, head_dim, rows, splits) for rows in (1, 8, 16))
        for variant in {v.block_m: v for v in variants}.values():
            yield attention_resources(variant, capability)
        if splits == 8:
            yield attention_resources(variant_of(dtype, head_dim, 64, splits, special=True), capability)
            yield merge_resources(variant, capability)


if __name__ == "__main__":
    good = True
    for found in all_resources():
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
        good &= found.fits
    sys.exit(not good)
