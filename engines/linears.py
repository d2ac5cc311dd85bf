"""Other ways to compute a model's linear layers on the CPU, put in place of `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

# Layers of one module that read the same activations, by the name they have when they are one.
TOGETHER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)


def replace_linears(model: nn.Module, twin: Callable[..., nn.Module]) -> None:
    """Put `twin(layer)` in the place of every `nn.Linear` of the model; of those `TOGETHER`, one for all.

    A model whose layers were put together is no longer Hugging Face's to run, but `Decoder`'s.
    """
    for parent in list(model.modules()):
        children = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
        for joint, names in TOGETHER.items():
            if children.keys() >= set(names):
                setattr(parent, joint, twin(*(children.pop(name) for name in names)))
                for name in names:
                    delattr(parent, name)
        for name, child in children.items():
            setattr(parent, name, twin(child))


def joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The float32 [out] biases of layers, one after another; None where no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    biases: list[Tensor] = [
        zero if linear.bias is None else linear.bias for linear, zero in zip(linears, zeros, strict=True)
    ]
    return torch.cat(biases).detach().float()


class PackedLinear(nn.Module):
    """The float32 twin of linear layers: [..., in] -> [..., out], outputs joined, weights in oneDNN's blocked layout.

    PyTorch hands oneDNN plain weights, which are laid out anew on every call with more than one row. A verification has
    a handful of rows, so that this costs it half its time.
    """

    bias: Tensor | None

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach().float() for linear in linears])
        # The number of rows is a hint for the layout, not a limit: those of a speculation under verification.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        self.register_buffer("bias", joined_bias(linears), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return output


def pack_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` of the model by its packed float32 twin, in place."""
    replace_linears(model, PackedLinear)
