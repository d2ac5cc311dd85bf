"""Linear layers in int8 on x86 CPUs: W8A8, weights scaled per output channel, activations per row as they come.

A row's scale depends on that row alone, and the products are summed as exact integers: a row's result is the same bits
whichever rows share its batch. (One scale per batch, as dynamic quantisation usually has it, would let a sequence's
tokens depend on its neighbours.)

The kernel multiplies 8-bit by 8-bit and, on CPUs without VNNI, first adds pairs of products in 16 bits, which would
saturate. There the weights get 7 bits; that costs less accuracy than 7-bit activations, which have the longer tails.
This module knows nothing of models beyond their `nn.Linear` layers.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from saguaro.engines.linears import joined_bias, replace_linears
from saguaro.errors import EngineError

ACTIVATION_LEVELS = 127
_ZERO_POINT = 128
# An operator's one overload, looked up once: what Python does between two products has to be read from memory again.
_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_TINY = torch.finfo(torch.float32).tiny
_QUANTISED_ROWS = 4096  # output channels quantised at a time: bounds the float32 copy of a large LM head


class Int8Linear(nn.Module):
    """The int8 twin of linear layers that read the same rows: [N, in] -> [N, out] float32, outputs joined."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        levels = weight_levels()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        _check_kernel(self.in_features, levels)
        weights, scales = zip(*(quantise_weight(linear.weight.detach(), levels) for linear in linears))
        self._packed = _pack(torch.cat(weights), torch.cat(scales))
        self.bias = joined_bias(linears)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY)
        # Rows of absolute maximum 1: one activation scale, 1 / 127, now serves them all.
        output = self.product(x / scale)
        return output.mul_(scale) if self.bias is None else torch.addcmul(self.bias, output, scale)

    def product(self, x: Tensor) -> Tensor:
        """What reads the weights, and nothing beside it: for rows of absolute maximum 1, without the bias."""
        output: Tensor = _product(x, 1 / ACTIVATION_LEVELS, _ZERO_POINT, self._packed)
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantise_linears(model: nn.Module, *, skip: nn.Module | None = None) -> None:
    """Replace every `nn.Linear` of the model except `skip` by its int8 twin, in place.

    What is not a linear layer keeps its weights; the model is to be run in float32. Raises EngineError where the int8
    kernel is missing or cannot hold a layer.
    """
    replace_linears(model, Int8Linear, skip=skip)


def weight_levels() -> int:
    """Largest weight integer with which 255 * w + 255 * w fits the sums of this CPU's kernel."""
    return 127 if torch.cpu._is_vnni_supported() else 64


def quantise_weight(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """[out, in] floats -> int8 [out, in] in ±levels, and the float32 [out] scale of each output channel."""
    scale = (weight.abs().amax(dim=1).float() / levels).clamp_min_(_TINY)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), _QUANTISED_ROWS):
        part = slice(start, start + _QUANTISED_ROWS)
        integers[part] = (weight[part].float() / scale[part, None]).round_()
    return integers, scale


def _pack(weight: Tensor, scale: Tensor) -> object:
    """The kernel's own layout of the weights."""
    with warnings.catch_warnings():
        # PyTorch announces the end of its quantised dtypes; the kernel's packing takes its weights in one of them.
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel")
        quantised = torch._make_per_channel_quantized_tensor(
            weight, scale.double(), torch.zeros(len(scale), dtype=torch.int64), 0
        )
        return torch.ops.quantized.linear_prepack(quantised, None)


def _check_kernel(in_features: int, levels: int) -> None:
    engine = torch.backends.quantized.engine
    if engine not in ("x86", "fbgemm"):
        raise EngineError(
            f"int8 needs PyTorch's x86 kernels, but this process uses its '{engine}' ones. Build the engine with "
            "dtype bfloat16 or float32, or run it on an x86 CPU."
        )
    limit = (2**31 - 1) // (255 * levels)
    if in_features > limit:
        raise EngineError(
            f"int8: a linear layer has {in_features} inputs, but sums of 32 bits hold at most {limit}. "
            "Build the engine with dtype bfloat16 or float32."
        )
