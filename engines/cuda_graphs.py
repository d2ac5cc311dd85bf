"""CUDA graphs of small forwards: what a forward of few rows takes is mostly the launching of its kernels, one by one.

A graph repeats what was enqueued while it was captured, with the same sizes and addresses. So there is one for 1, 2, 4,
… rows, captured when the engine is loaded; all read one buffer of inputs, which one upload fills, and leave their
logits in another. A batch is padded to the next size: rows of padding are of no sequence, so attention reads and writes
nothing for them, their KV goes to a block behind the pool's, which no block table can name, and nobody takes their
logits.

Which batches are run so follows from their sizes alone (`fits`). Nothing here is CUDA's own: that is in `cuda`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.engines.base import ForwardBatch
from saguaro.engines.cuda import Cuda
from saguaro.engines.inputs import INPUTS, Layout, parts
from saguaro.engines.kv_pool import require_memory
from saguaro.plugins.rows import RowTensors

MAX_ROWS = 256  # of a graph, a power of two; above, the work of a forward hides the launches
BRANCH_COLUMNS = 1024  # behind the longest context, for trunk and branches: as many as a budget of 64 takes with K = 15
# The block tables come last, T of them: only those in use are uploaded.
_INPUTS: Mapping[str, tuple[int | str, ...]] = {
    **{name: shape for name, shape in INPUTS.items() if name != "block_table"},
    "block_table": ("T", "W"),
}


@dataclass(frozen=True)
class GraphInputs:
    """What a captured forward of N rows reads; every tensor has its address for good."""

    token_ids: Tensor  # [N] int32
    positions: Tensor  # [N] int32
    slots: Tensor  # [N] int64; a row of padding has the first slot behind the pool
    rows: RowTensors  # of N sequences, those of padding without rows


@dataclass(frozen=True)
class _Graph:
    rows: int
    logit_rows: Tensor  # [rows] int32, of the inputs
    replay: Callable[[], None]


def buffer_bytes(vocab_size: int, max_model_len: int, block_size: int, num_blocks: int, dtype: torch.dtype) -> int:
    """Bytes of the inputs and logits that the graphs of an engine share; the arguments are those of `CudaGraphs`."""
    inputs = Layout(_most(max_model_len, block_size, num_blocks), _INPUTS).size * torch.int32.itemsize
    return inputs + MAX_ROWS * vocab_size * dtype.itemsize


def _most(max_model_len: int, block_size: int, num_blocks: int) -> dict[str, int]:
    """The sizes of the largest graph's inputs."""
    width = min(num_blocks, math.ceil((max_model_len + BRANCH_COLUMNS) / block_size))
    return dict.fromkeys("NSLT", MAX_ROWS) | {"W": width}


class CudaGraphs:
    """Graphs of `compute`, which gives the logits [N, vocab_size] of all rows of its inputs.

    Contexts have up to `max_model_len` tokens, in `num_blocks` blocks of `block_size` slots; the KV pool has one block
    more. `dtype` is the logits'. Raises CapacityError when the buffers do not fit.
    """

    def __init__(
        self,
        cuda: Cuda,
        compute: Callable[[GraphInputs], Tensor],
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
    ) -> None:
        self._cuda = cuda
        self._compute = compute
        self._most = _most(max_model_len, block_size, num_blocks)
        self._columns = self._most["W"] * block_size
        self._behind = num_blocks * block_size  # the slot for what is padding
        needed = buffer_bytes(vocab_size, max_model_len, block_size, num_blocks, dtype)
        require_memory(needed, "the inputs and logits of CUDA graphs", cuda.device)
        self._inputs = torch.zeros(Layout(self._most, _INPUTS).size, dtype=torch.int32, device=cuda.device)
        self._logits = torch.zeros(MAX_ROWS, vocab_size, dtype=dtype, device=cuda.device)
        with cuda.on_stream():
            # The largest first: the others then find its memory large enough.
            sizes = [1 << i for i in reversed(range(MAX_ROWS.bit_length()))]
            self._graphs = [self._capture(rows) for rows in sizes][::-1]

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the batch is run by a graph. A prompt, which wants few logits, is not: a graph computes them all."""
        rows = len(batch.token_ids)
        return (
            max(rows, len(batch.rows)) <= MAX_ROWS
            and 4 * len(batch.logit_rows) >= rows
            and max(map(len, batch.block_tables), default=0) <= self._most["W"]
        )

    def run(self, batch: ForwardBatch, rows: RowTensors) -> Tensor:
        """Logits [L, vocab_size] of a batch that fits; `rows` are its own, on the host. Waits for nothing."""
        (part,) = parts(batch, rows, self._most)
        sequences = len(part.inputs["sequences"])
        graph = next(graph for graph in self._graphs if graph.rows >= max(part.rows, sequences))
        packed = self._layout(graph.rows, sequences).pack(part.inputs)
        with self._cuda.on_stream():
            self._cuda.upload(packed, self._inputs[: len(packed)])
            graph.replay()
            # A copy, the caller's own: the next replay overwrites the buffer.
            return self._logits.index_select(0, graph.logit_rows[: len(part.wanted)])

    def _layout(self, rows: int, tables: int) -> Layout:
        return Layout(self._most | {"N": rows, "S": rows, "L": rows, "T": tables}, _INPUTS)

    def _capture(self, rows: int) -> _Graph:
        layout = self._layout(rows, rows)
        at = {
            name: self._inputs[layout.offsets[name] :][: math.prod(shape)].view(shape)
            for name, shape in layout.shapes.items()
        }
        of = RowTensors(
            at["block_table"], at["sequences"], at["fork"], at["branch"], most_rows=rows, most_columns=self._columns
        )

        def enqueue() -> None:
            # Padding has the slot -1, and -1 modulo n is n - 1.
            slots = at["slots"].long().remainder(self._behind + 1)
            self._logits[:rows].copy_(self._compute(GraphInputs(at["token_ids"], at["positions"], slots, of)))

        self._cuda.upload(layout.pack({}), self._inputs[: layout.size])  # nothing but padding
        enqueue()
        return _Graph(rows, at["logit_rows"], self._cuda.capture(enqueue))
