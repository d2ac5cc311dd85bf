"""Other ways to compute a model's linear layers on the CPU, put in place of `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def replace_linears(model: nn.Module, twin: Callable[[nn.Linear], nn.Module], *, skip: nn.Module | None = None) -> None:
    """Put `twin(layer)` in the place of every `nn.Linear` of the model except `skip`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child is not skip:
                setattr(parent, name, twin(child))


class PackedLinear(nn.Module):
    """The float32 twin of a linear layer: [..., in] -> [..., out], its weights in oneDNN's own blocked layout.

    PyTorch hands oneDNN plain weights, which are laid out anew on every call with more than one row. A verification has
    a handful of rows, so that this costs it half its time.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # The number of rows is a hint for the layout, not a limit: those of a speculation under verification.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().float(), 8)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return output


def pack_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` of the model by its packed float32 twin, in place."""
    replace_linears(model, PackedLinear)
