"""Linear layers in int8 and int4 on CPUs: W8A8 and W4A8, in groups of 32 weights, and of 32 activations, with a scale.

Decoding a few rows is reading weights: 8.5 bits each in int8, 4.75 in int4, whose groups have a zero too. The kernel is
ours, in C++ (`plugins/quantised_linear.cpp`): PyTorch's for 8 bits takes 1.7 times as long for 8 rows as for one, and
those for 4 bits are bound by unpacking them. A row's result is the same bits whichever rows share its batch. (One scale
for the activations of a batch, as dynamic quantisation usually has it, would let a sequence's tokens depend on its
neighbours.) Weights that were quantised to 4 bits in groups of 32 before, as most of a Q4_K_M file, keep their steps in
int4: what is added is a rounding of each scale to bfloat16.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saguaro.engines.linears import joined_bias, replace_linears
from saguaro.engines.manifest import Bits
from saguaro.errors import EngineError
from saguaro.plugins import cpp

_KERNEL = "quantised_linear"
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


class QuantisedLinear(nn.Module):
    """The twin in `bits` of linear layers that read the same rows: [N, in] -> [N, out] float32, outputs joined."""

    def __init__(self, *linears: nn.Linear, bits: Bits) -> None:
        super().__init__()
        self.bits = bits
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._tiles = pack([linear.weight.detach() for linear in linears], bits)
        padded = -(-self.out_features // _CHANNELS) * _CHANNELS
        self._bias = torch.zeros(padded)
        bias = joined_bias(linears)
        if bias is not None:
            self._bias[: self.out_features] = bias
        # Addresses, not tensors: what Python does between two products has to be read from memory again.
        self._weight_and_bias = (bits, self._tiles.data_ptr(), self._bias.data_ptr())
        self._kernel = _kernel().quantised_linear

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
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def quantise_linears(model: nn.Module, bits: Bits) -> None:
    """Replace every `nn.Linear` of the model by its twin in `bits`, in place; the model is to be run in float32.

    Raises EngineError where the kernel cannot be compiled, or for weights that are not finite.
    """
    replace_linears(model, partial(QuantisedLinear, bits=bits))


def pack(weights: list[Tensor], bits: Bits) -> Tensor:
    """Weights [out, in], one behind the other, in the kernel's tiles: uint8, 4.75 or 8.5 bits a weight and padding."""
    weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).to(torch.bfloat16).contiguous()
    outputs, inputs = weight.shape
    kernel = _kernel()
    tiles = torch.empty(kernel.quantised_bytes(bits, outputs, inputs), dtype=torch.uint8)
    if not kernel.quantised_pack(bits, weight.data_ptr(), outputs, inputs, tiles.data_ptr()):
        raise EngineError(
            f"int{bits}: a weight is not a finite number below 1e18. Get the model again, or build with another dtype."
        )
    return tiles


def unpack(tiles: Tensor, outputs: int, inputs: int, bits: Bits) -> Tensor:
    """The [out, in] float32 weights that tiles stand for."""
    weight = torch.empty(outputs, inputs)
    _kernel().quantised_unpack(bits, tiles.data_ptr(), outputs, inputs, weight.data_ptr())
    return weight


@cache
def _kernel() -> ctypes.CDLL:
    library, pointer, size = cpp.load(_KERNEL), ctypes.c_void_p, ctypes.c_long
    bits = flag = ctypes.c_int
    library.quantised_bytes.restype = size
    library.quantised_bytes.argtypes = [bits, size, size]
    library.quantised_pack.argtypes = [bits, pointer, size, size, pointer]
    library.quantised_unpack.argtypes = [bits, pointer, size, size, pointer]
    library.quantised_linear.argtypes = [bits, *[pointer] * 4, ctypes.c_float, flag, pointer, flag, *[size] * 3]
    for function in (library.quantised_unpack, library.quantised_linear):
        function.restype = None
    return library
