"""The GPU as an engine uses it: one stream, uploads to it, and graphs of what is enqueued on it.

All that is asked of streams and graphs is here, through torch, so that an engine's loop can be run without a GPU on a
stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Cuda:
    """A device, the current one if not given, and a stream: TensorRT is slow on the default one, which no graph takes.

    The device becomes the current one, which is where TensorRT puts an engine.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None  # the last one captured, whose memory the next one shares

    @property
    def capability(self) -> str:
        """Compute capability, such as 9.0."""
        return "{}.{}".format(*torch.cuda.get_device_capability(self.device))

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """What is enqueued inside comes after all that the caller has enqueued, and before all that it will."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy from the host without waiting. torch keeps the pinned copy until the device has read it."""
        target.copy_(source.pin_memory(), non_blocking=True)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """A function that repeats, in one launch, what `enqueue` enqueues. Called within `on_stream`.

        What a first run compiles or loads cannot be captured: `enqueue` has run before. What torch allocates inside is
        shared by all graphs of this object, which run one after the other: what one has left there is gone with the
        next replay.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        with torch.cuda.graph(graph, pool=self._graph.pool() if self._graph else None, stream=self._stream):
            enqueue()
        self._graph = graph
        return graph.replay
