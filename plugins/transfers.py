"""Between host and device without hidden waits: uploads never wait, and what is read back together waits once.

A plain `.to("cuda")`, `.cpu()`, `.item()` or `.tolist()` each stops the host until the device has done all it was
given. On the CPU both functions hand back what they get.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device. torch keeps the pinned copy until the device has read it."""
    if torch.device(device).type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device in the host's memory, after one wait for all that its current stream has been given."""
    if not tensors[0].is_cuda:
        return tensors
    copies = tuple(map(_copy, tensors))
    # An event, because torch's check for hidden waits takes a wait for a stream for one.
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return copies


def _copy(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
