"""The network with plugins that run from Python, their kernels in Triton's interpreter: nothing is replaced by torch.

    TRITON_INTERPRET=1 pytest tests/tensorrt_kernels.py

The interpreter replaces the compiler for a whole process, so this test has one to itself, which `test_tensorrt.py`
starts.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton

from tensorrt_stub import load_tensorrt

load_tensorrt()

from saguaro.plugins import tensorrt as plugin  # noqa: E402
from test_tensorrt import Draft, batches, pytestmark, pytorch  # noqa: E402, F401
from tiny_models import tiny_model  # noqa: E402


def memory(tensor: Any) -> torch.Tensor:
    """The tensor at an address of the CPU."""
    dtype, shape = plugin.TORCH[tensor.dtype], tuple(tensor.shape)
    data = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(tensor.data_ptr)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def test_the_plugins_compute_what_the_pytorch_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three: the attention in two parts. In one it is the same kernel but for its last lines."""
    assert triton.knobs.runtime.interpret, "start with TRITON_INTERPRET=1"
    monkeypatch.setattr(plugin, "_torch", memory)
    monkeypatch.setattr(plugin, "_on", lambda stream: nullcontext())
    options = {"num_hidden_layers": 1, "num_attention_heads": 4}
    draft = Draft(tiny_model("qwen3", **options), splits=2, ahead_of_time=False)
    reference = pytorch(tiny_model("qwen3", **options))
    for step, batch in enumerate(batches(seed=1)[:3]):
        torch.testing.assert_close(
            draft.forward(batch),
            reference.forward(batch).logits,
            rtol=0,
            atol=1e-4,
            msg=lambda m, step=step: f"step {step}: {m}",
        )
