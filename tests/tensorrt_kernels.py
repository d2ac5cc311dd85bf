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

trt = load_tensorrt()

from saguaro.plugins import tensorrt as plugin  # noqa: E402
from saguaro.plugins.rows import MASK  # noqa: E402
from tensorrt_network import Network  # noqa: E402
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is made up need not be a number
def test_made_up_inputs_harm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a builder times kernels on. Reading or writing outside of the tensors would end this process."""
    monkeypatch.setattr(plugin, "_torch", memory)
    monkeypatch.setattr(plugin, "_on", lambda stream: nullcontext())
    generator = torch.Generator().manual_seed(0)

    def made_up(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    types = dict(zip(("key", "value", "key_pool", "value_pool", "query"), [trt.DataType.FLOAT] * 5))
    for draw in range(4):
        tensors = {
            "key": torch.ones(5, 2, 8),
            "value": torch.ones(5, 2, 8),
            "slots": made_up(5),
            "key_pool": torch.zeros(3, 4, 2, 8),
            "value_pool": torch.zeros(3, 4, 2, 8),
            "query": torch.ones(5, 4, 8),
            "block_table": made_up(2, 6),
            "sequences": made_up(2, 6).abs() if draw else made_up(2, 6),
            "fork": made_up(5),
            "branch": made_up(5),
        }
        if draw > 1:  # some rows, so that there is something to do
            tensors["sequences"][:, 4:] = torch.tensor([[0, 3], [3, 9]])
        network = Network(0)
        inputs = {
            name: network.add_input(name, types.get(name, trt.DataType.INT32), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        names = ("key", "value", "slots", "key_pool", "value_pool")
        options = {"capability": 90, "ahead_of_time": False}
        pools = plugin.update_kv(network, *(inputs[name] for name in names), **options)
        mask = [inputs[name] for name in MASK]
        output = plugin.fan_out_attention(
            network, inputs["query"], *pools, *mask, scale=1.0, usual_rows=2, splits=2, window=7 * (draw % 2), **options
        )
        network.mark_output(output)
        assert network.run(tensors)[output.name].shape == (5, 4, 8)
        assert not tensors["key_pool"].any()
