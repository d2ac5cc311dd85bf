"""Linear layers in int4 on CPUs: W4A8, weights in groups of 32 with a scale and a zero each, activations likewise.

Decoding a few rows is reading weights: at 4.75 bits each there are 0.6 times the bytes of int8. The kernel is ours, in
C++ (`plugins/int4_linear.cpp`), because PyTorch's for 4-bit weights is bound by unpacking them. As with int8, a row's
result is the same bits whichever rows share its batch. Weights that were quantised to 4 bits in groups of 32 before,
as most of a Q4_K_M file, keep their steps: what is added is a rounding of each scale to bfloat16.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saguaro.engines.linears import joined_bias, replace_linears
from saguaro.errors import EngineError
from saguaro.plugins import cpp

_KERNEL = "int4_linear"
_CHANNELS = 16  # of a tile


class Norm(NamedTuple):
    """An RMSNorm as the kernel takes it: the address of its float32 weights, 0 for none, and its epsilon."""

    weight: int
    epsilon: float

    @staticmethod
    def of(norm: Any) -> Norm:
        """Of a model's module, which has to outlive it."""
        return Norm(norm.weight.data_ptr(), norm.variance_epsilon)


NO_NORM = Norm(0, 0.0)


class Int4Linear(nn.Module):
    """The int4 twin of linear layers that read the same rows: [N, in] -> [N, out] float32, outputs joined."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._tiles = pack([linear.weight.detach() for linear in linears])
        padded = -(-self.out_features // _CHANNELS) * _CHANNELS
        self._bias = torch.zeros(padded)
        bias = joined_bias(linears)
        if bias is not None:
            self._bias[: self.out_features] = bias
        # Addresses, not tensors: what Python does between two products has to be read from memory again.
        self._weight_and_bias = (self._tiles.data_ptr(), self._bias.data_ptr())
        self._kernel = _kernel().int4_linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.to(torch.float32).contiguous())

    def product(self, x: Tensor, *, norm: Norm = NO_NORM, gated: bool = False, add_to: Tensor | None = None) -> Tensor:
        """[N, out] float32 of contiguous float32 rows, added to the rows `add_to` if there are any, in place.

        The rows are [N, in], or [N, 2 in] if `gated`: silu of the first half of each times the second. `norm` is the
        RMSNorm that they pass first.
        """
        output = torch.empty(len(x), self.out_features) if add_to is None else add_to
        self._kernel(
            *self._weight_and_bias,
            x.data_ptr(),
            norm.weight,
            norm.epsilon,
            gated,
            output.data_ptr(),
            add_to is not None,
            len(x),
            self.out_features,
            self.in_features,
        )
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def quantise_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` of the model by its int4 twin, in place; the model is to be run in float32.

    Raises EngineError where the kernel cannot be compiled, or for weights that are not finite.
    """
    replace_linears(model, Int4Linear)


def pack(weights: list[Tensor]) -> Tensor:
    """Weights [out, in], one behind the other, in the kernel's tiles: uint8, 4.75 bits a weight and padding."""
    weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).to(torch.bfloat16).contiguous()
    outputs, inputs = weight.shape
    kernel = _kernel()
    tiles = torch.empty(kernel.int4_bytes(outputs, inputs), dtype=torch.uint8)
    if not kernel.int4_pack(weight.data_ptr(), outputs, inputs, tiles.data_ptr()):
        raise EngineError(
            "int4: a weight is not a finite number below 1e18. Get the model again, or build with another dtype."
        )
    return tiles


def unpack(tiles: Tensor, outputs: int, inputs: int) -> Tensor:
    """The [out, in] float32 weights that tiles stand for."""
    weight = torch.empty(outputs, inputs)
    _kernel().int4_unpack(tiles.data_ptr(), outputs, inputs, weight.data_ptr())
    return weight


@cache
def _kernel() -> ctypes.CDLL:
    library, pointer, size = cpp.load(_KERNEL), ctypes.c_void_p, ctypes.c_long
    library.int4_bytes.restype = size
    library.int4_bytes.argtypes = [size, size]
    library.int4_pack.argtypes = [pointer, size, size, pointer]
    library.int4_unpack.argtypes = [pointer, size, size, pointer]
    flag = ctypes.c_int
    library.int4_linear.argtypes = [*[pointer] * 4, ctypes.c_float, flag, pointer, flag, *[size] * 3]
    for function in (library.int4_unpack, library.int4_linear):
        function.restype = None
    return library
