"""The draft's engine on TensorRT: a compiled network (`network`), our paged KV pool, and a CUDA graph for each bucket.

A forward of few rows is bound by the time it takes to launch its kernels one by one. So batches that want logits of a
quarter of their rows or more, which trunks and branches do, are padded to the next power of two of rows and replay a
graph that was captured when the engine was loaded. Prompts run without a graph, in the size they have.

A graph holds addresses and shapes for good, and TensorRT wants its context left alone: each bucket has a context of its
own. Their scratch memory, the buffer of the inputs and that of the logits are shared, for all work is on one stream.

TensorRT does not report which output of a plugin is the memory of an input: the outputs for the pools are bound to the
pools here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorrt as trt
import torch
from torch import Tensor

from saguaro.engines.base import LOGIT_TOLERANCES, ForwardBatch, ForwardOutput, check_positions
from saguaro.engines.cuda import Cuda
from saguaro.engines.inputs import INPUTS, Layout, Part, parts
from saguaro.engines.kv_pool import require_memory
from saguaro.engines.manifest import Manifest
from saguaro.engines.tensor_parallel import TensorParallel
from saguaro.engines.tensorrt.log import Log
from saguaro.errors import EngineError
from saguaro.plugins.rows import RowTensors, check_rows
from saguaro.plugins.tensorrt import TORCH

PLAN = "rank0.engine"  # the compiled network's file, named as TensorRT-LLM names it
_log = logging.getLogger(__name__)


class TensorrtEngine:
    """Runs a deserialised `trt.ICudaEngine` of `DraftNetwork`; the sizes it allows are read from the engine itself.

    Raises EngineError when the engine is another network, CapacityError when pool and buffers do not fit.
    """

    asynchronous = True

    def __init__(self, engine: Any, *, vocab_size: int, max_model_len: int, num_blocks: int, cuda: Cuda) -> None:
        self._cuda = cuda
        pool_names = _check_tensors(engine, vocab_size)
        most = {
            letter: engine.get_tensor_profile_shape(name, 0)[2][axis]
            for name, shape in INPUTS.items()
            for axis, letter in enumerate(shape)
            if isinstance(letter, str)
        }
        shape = tuple(engine.get_tensor_shape(pool_names[0]))[1:]
        max_blocks = engine.get_tensor_profile_shape(pool_names[0], 0)[2][0]
        if num_blocks > max_blocks:
            raise EngineError(
                f"the deployment asks for {num_blocks} KV blocks, but the engine was compiled for {max_blocks}. Lower "
                "kv_tokens of the draft, or build it with a larger max_kv_tokens."
            )
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = int(shape[0])
        self.logit_tolerance = LOGIT_TOLERANCES[TORCH[engine.get_tensor_dtype(pool_names[0])]]
        self._most = most
        self._memory = _Memory.of(engine, pool_names, (num_blocks, *shape), Layout(most), most["L"], vocab_size, cuda)
        with cuda.on_stream():
            self._prompts = _Context(engine, self._memory, cuda)
            self._buckets = [_Bucket(engine, self._memory, cuda, self._layout(n, n)) for n in _powers(most["N"])]
        _log.info("captured %d graphs, of up to %d rows", len(self._buckets), most["N"])

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        block_size: int,
        num_blocks: int,
        group: TensorParallel | None = None,
        device: torch.device | None = None,
    ) -> TensorrtEngine:
        """The engine of a directory built by `saguaro build`, on a CUDA device: the current one if not given.

        Raises EngineError or CapacityError when it cannot be run here.
        """
        manifest = Manifest.load(directory)
        if group is not None:
            raise EngineError(f"{directory}: an engine for tensorrt runs on one rank, but is loaded on {group.size}.")
        built = manifest.versions.get("tensorrt")
        if built != trt.__version__:
            raise EngineError(
                f"{directory}: was compiled by TensorRT {built}, but {trt.__version__} is installed, which cannot read "
                "it. Build it again with this version."
            )
        cuda = Cuda(device)
        if manifest.device != cuda.capability:
            raise EngineError(
                f"{directory}: was compiled for devices of compute capability {manifest.device}, but {cuda.device} has "
                f"{cuda.capability}. Build it on this machine."
            )
        runtime = trt.Runtime(Log())
        engine = runtime.deserialize_cuda_engine((directory / PLAN).read_bytes())
        if engine is None:
            raise EngineError(f"{directory / PLAN}: TensorRT cannot read it; its log says why. Build it again.")
        made = cls(
            engine,
            vocab_size=manifest.vocab_size,
            max_model_len=manifest.max_model_len,
            num_blocks=num_blocks,
            cuda=cuda,
        )
        if block_size != made.block_size:
            raise EngineError(
                f"{directory}: was compiled for KV blocks of {made.block_size} tokens, but the deployment's draft has "
                f"block_size {block_size}. Set it to {made.block_size}, or build the engine with the other."
            )
        return made

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass; its logits are on the device. Raises EngineError for rows that cannot be computed."""
        check_positions(batch, self.max_model_len)
        mask = batch.positions if batch.fan_out is None else batch.fan_out
        check_rows(batch.rows, batch.block_tables, self.block_size, self.num_blocks, mask)
        rows = RowTensors.of(batch.rows, batch.block_tables, mask)
        if rows.most_columns > self._most["W"] * self.block_size:
            raise EngineError(
                f"a sequence of the batch takes {rows.most_columns} KV columns with its branches, but the engine was "
                f"compiled for {self._most['W'] * self.block_size}. Lower the fan-out's budget or the lookahead, or "
                "build the engine with more branch_columns."
            )
        # The caller's, on the caller's stream: the next forward overwrites the buffer.
        logits = torch.empty(len(batch.logit_rows), self.vocab_size, device=self._cuda.device)
        order: list[int] = []
        with self._cuda.on_stream():
            for part in parts(batch, rows, self._most):
                self._run(part)
                wanted = len(part.wanted)
                logits[len(order) : len(order) + wanted] = self._memory.logits[:wanted]
                order += part.wanted
        if order != sorted(order):  # only a batch of several parts whose logits are wanted in another order
            logits = logits[torch.tensor(order).argsort().to(logits.device)]
        return ForwardOutput(logits)

    def _run(self, part: Part) -> None:
        """Compute the part; its logits are the first of the shared buffer."""
        if 4 * len(part.wanted) >= part.rows:
            next(bucket for bucket in self._buckets if bucket.rows >= part.rows).run(part)
            return
        layout = self._layout(part.rows, max(1, len(part.wanted)))  # TensorRT wants at least one
        self._prompts.bind(layout)
        self._prompts.upload(layout, part.inputs)
        self._prompts.enqueue()

    def _layout(self, rows: int, logits: int) -> Layout:
        return Layout(self._most | {"N": rows, "L": logits})


@dataclass(frozen=True)
class _Memory:
    """All device memory of an engine, for good: addresses are bound once, and captured in graphs."""

    pools: dict[str, Tensor]  # of each of the network's pools, [num_blocks, block_size, KV heads, head dim]
    inputs: Tensor  # int32: the inputs of the largest forward
    logits: Tensor  # [largest L, V] float32
    scratch: Tensor  # TensorRT's own, of one execution

    @staticmethod
    def of(
        engine: Any, pools: list[str], shape: tuple[int, ...], inputs: Layout, logits: int, vocab_size: int, cuda: Cuda
    ) -> _Memory:
        """Raises CapacityError when it does not fit."""
        dtype = TORCH[engine.get_tensor_dtype(pools[0])]
        scratch = max(1, engine.device_memory_size_v2)
        needed = len(pools) * math.prod(shape) * dtype.itemsize + 4 * (inputs.size + logits * vocab_size) + scratch
        what = f"the KV pool ({shape[0]} blocks of {shape[1]} tokens) and the buffers of a forward"
        require_memory(needed, what, cuda.device)
        # Zeros, not empty: the memory is taken now, while failing is cheap, and what is in it are numbers.
        return _Memory(
            {name: torch.zeros(shape, dtype=dtype, device=cuda.device) for name in pools},
            torch.zeros(inputs.size, dtype=torch.int32, device=cuda.device),
            torch.zeros(logits, vocab_size, device=cuda.device),
            torch.zeros(scratch, dtype=torch.uint8, device=cuda.device),
        )


class _Context:
    """A `trt.IExecutionContext` on the engine's memory."""

    def __init__(self, engine: Any, memory: _Memory, cuda: Cuda) -> None:
        self._memory = memory
        self._cuda = cuda
        self._context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise EngineError("TensorRT could not create an execution context; its log says why.")
        self._require(self._context.set_optimization_profile_async(0, cuda.stream), "the optimisation profile")
        self._context.set_device_memory(memory.scratch.data_ptr(), memory.scratch.nbytes)
        for name, pool in memory.pools.items():
            self._set(name, tuple(pool.shape), pool.data_ptr())
            self._address(f"{name}.updated", pool.data_ptr())
        self._address("logits", memory.logits.data_ptr())

    def bind(self, layout: Layout) -> None:
        """Set shapes and addresses of the small inputs."""
        for name, shape in layout.shapes.items():
            self._set(name, shape, self._memory.inputs.data_ptr() + 4 * layout.offsets[name])
        if missing := self._context.infer_shapes():
            raise EngineError(f"TensorRT does not know the shape of {', '.join(missing)}; its log says why.")

    def upload(self, layout: Layout, inputs: Mapping[str, Tensor]) -> None:
        self._cuda.upload(layout.pack(inputs), self._memory.inputs[: layout.size])

    def enqueue(self) -> None:
        self._require(self._context.execute_async_v3(self._cuda.stream), "a forward")

    def _set(self, name: str, shape: tuple[int, ...], address: int) -> None:
        self._require(self._context.set_input_shape(name, shape), f"the shape {list(shape)} of {name}")
        self._address(name, address)

    def _address(self, name: str, address: int) -> None:
        self._require(self._context.set_tensor_address(name, address), f"the address of {name}")

    @staticmethod
    def _require(done: bool, what: str) -> None:
        if not done:
            raise EngineError(f"TensorRT refused {what}; its log says why.")


class _Bucket:
    """Forwards of up to `rows` rows as one CUDA graph. The context is the graph's alone."""

    def __init__(self, engine: Any, memory: _Memory, cuda: Cuda, layout: Layout) -> None:
        self.rows = layout.shapes["token_ids"][0]
        self._layout = layout
        self._context = _Context(engine, memory, cuda)
        self._context.bind(layout)
        self._context.upload(layout, {})  # nothing but padding
        self._context.enqueue()  # what new shapes take TensorRT once must not be captured
        self._replay = cuda.capture(self._context.enqueue)

    def run(self, part: Part) -> None:
        self._context.upload(self._layout, part.inputs)
        self._replay()


def _powers(largest: int) -> list[int]:
    """1, 2, 4, … and the largest itself."""
    return [1 << i for i in range((largest - 1).bit_length())] + [largest]


def _check_tensors(engine: Any, vocab_size: int) -> list[str]:
    """Names of the pools. Raises EngineError for an engine whose tensors are not those of a `DraftNetwork`."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
    pools = sorted(inputs - INPUTS.keys())
    outputs = {f"{name}.updated" for name in pools} | {"logits"}
    wrong = (set(names) ^ (INPUTS.keys() | set(pools) | outputs)) | {name for name in pools if "_pool." not in name}
    if wrong or not pools:
        raise EngineError(
            "the compiled network is not a draft of this version: "
            f"{', '.join(sorted(wrong)) or 'there are no KV pools'}. Build it again."
        )
    found = tuple(engine.get_tensor_shape("logits"))[1]
    if found != vocab_size:
        raise EngineError(
            f"the compiled network has logits of {found} token ids, but the tokenizer {vocab_size}: the engine "
            "directory mixes two builds. Build it again."
        )
    return pools
