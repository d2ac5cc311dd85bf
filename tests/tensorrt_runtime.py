"""TensorRT's runtime and a CUDA stream on the CPU: what the engine's loop is run with where there is neither.

The runtime is held to the real bindings as the recorded network is: every call must fit a signature of the real class,
with arguments of the real types. What it adds are the rules that no signature states: shapes within the profile, an
address for everything, outputs that a plugin aliases bound to the input's memory, scratch memory that is large enough,
and for graphs that new shapes have been enqueued once before capture and that nothing of a context changes afterwards.
An execution reads and writes what lies at the addresses it was given, by evaluating the recorded network in torch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorrt_network import TORCH, Builder, Plan, Recorder, trt

from saguaro.build.tensorrt import compile_network  # isort: skip
from saguaro.engines.tensorrt.engine import TensorrtEngine  # isort: skip
from saguaro.engines.tensorrt.log import Log  # isort: skip
from saguaro.engines.tensorrt.network import DraftNetwork, Limits  # isort: skip

SCRATCH = 4096


def memory(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor at an address of the CPU."""
    data = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(data, dtype=dtype).view(shape)


@dataclass
class Stream:
    """What a stand-in for `Cuda` does: work runs when it is enqueued, or is kept while a graph is captured.

    `log` has what was done: "upload", "execute" or "replay".
    """

    capability: str = "9.0"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[str] = field(default_factory=list)
    _captured: list[Callable[[], None]] | None = None
    _entered: int = 0

    def __post_init__(self) -> None:
        self.stream = id(self)
        Context.streams[self.stream] = self

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        self._entered += 1
        yield
        self._entered -= 1

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self._entered
        assert self._captured is None, "an upload that is captured repeats old values"
        assert (source.dtype, source.shape) == (target.dtype, target.shape)
        self.log.append("upload")
        target.copy_(source)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        assert self._entered
        graph: list[Callable[[], None]] = []
        self._captured = graph
        enqueue()
        self._captured = None
        assert graph, "nothing was captured"

        def replay() -> None:
            assert self._entered
            self.log.append("replay")
            for work in graph:
                work()

        return replay

    @property
    def capturing(self) -> bool:
        return self._captured is not None

    def enqueue(self, work: Callable[[], None]) -> None:
        assert self._entered
        if self._captured is None:
            self.log.append("execute")
            work()
        else:
            self._captured.append(work)


_RUNTIME = trt.Runtime  # which a test may put the following in the place of


class Runtime(Recorder):
    def __init__(self, logger: Any) -> None:
        assert isinstance(logger, trt.ILogger)
        super().__init__(_RUNTIME)

    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        assert name == "deserialize_cuda_engine"
        plan = Plan.known.get(bytes(values["serialized_engine"]))
        return Engine(plan) if plan else None


class Engine(Recorder):
    """An ICudaEngine of a recorded network."""

    device_memory_size_v2 = SCRATCH

    def __init__(self, plan: Plan) -> None:
        super().__init__(trt.ICudaEngine)
        self.network = plan.network
        ((_, added),) = [call for call in plan.config.calls if call[0] == "add_optimization_profile"]
        self.profile = {call["input"]: (call["min"], call["opt"], call["max"]) for _, call in added["profile"].calls}
        # Addresses and shapes are all that an engine knows of a network: nothing of its tensors is left.
        self.tensors = {name: (trt.TensorIOMode.INPUT, *described) for name, described in self.network.inputs.items()}
        self.tensors |= {t.name: (trt.TensorIOMode.OUTPUT, t.dtype, tuple(t.shape)) for t in self.network.outputs}
        self.aliases = {name: name.removesuffix(".updated") for name in self.tensors if name.endswith(".updated")}
        self.contexts: list[Context] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        if name == "create_execution_context":
            assert values["strategy"] == trt.ExecutionContextAllocationStrategy.USER_MANAGED
            self.contexts.append(Context(self))
            return self.contexts[-1]
        if name == "get_tensor_name":
            return list(self.tensors)[values["index"]]
        mode, dtype, shape = self.tensors[values["name"]]
        if name == "get_tensor_profile_shape":
            assert values["profile_index"] == 0
            return [trt.Dims(each) for each in self.profile[values["name"]]]
        return {"get_tensor_mode": mode, "get_tensor_dtype": dtype, "get_tensor_shape": trt.Dims(shape)}[name]


class Context(Recorder):
    """An IExecutionContext."""

    streams: dict[int, Stream] = {}

    def __init__(self, engine: Engine) -> None:
        super().__init__(trt.IExecutionContext)
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile_is_set = self.has_scratch = self.is_flushed = self.is_captured = False

    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        return getattr(self, f"_{name}")(**values)

    def _changed(self) -> None:
        assert not self.is_captured, "the context of a captured graph must be left alone"
        self.is_flushed = False

    def _set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._changed()
        self.profile_is_set = profile_index == 0 and stream_handle in self.streams
        return self.profile_is_set

    def _set_device_memory(self, memory: int, size: int) -> None:
        self._changed()
        self.has_scratch = memory != 0 and size >= SCRATCH

    def _set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._changed()
        least, _, most = self.engine.profile.get(name, ((), (), ()))
        if len(shape) != len(least) or not all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True)):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def _set_tensor_address(self, name: str, memory: int) -> bool:
        self._changed()
        if name not in self.engine.tensors or memory == 0:
            return False
        assert memory % 64 == 0, f"{name} is not aligned"
        self.addresses[name] = memory
        return True

    def _infer_shapes(self) -> list[str]:
        return [name for name in self.engine.network.inputs if name not in self.shapes]

    def _execute_async_v3(self, stream_handle: int) -> bool:
        stream = self.streams[stream_handle]
        if not (self.profile_is_set and self.has_scratch) or self._infer_shapes():
            return False
        if self.addresses.keys() != self.engine.tensors.keys():
            return False
        for output, source in self.engine.aliases.items():
            assert self.addresses[output] == self.addresses[source], f"{output} must be the memory of {source}"
        if stream.capturing:
            assert self.is_flushed, "what new shapes take once would be captured"
            self.is_captured = True
        self.is_flushed = True
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        stream.enqueue(lambda: self.engine_run(shapes, addresses))
        return True

    def engine_run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        inputs = {
            name: memory(addresses[name], TORCH[self.engine.tensors[name][1]], shape) for name, shape in shapes.items()
        }
        outputs = self.engine.network.run(inputs)
        for name, value in outputs.items():
            if name in self.engine.aliases:
                assert value is inputs[self.engine.aliases[name]]
            else:
                memory(addresses[name], value.dtype, tuple(value.shape)).copy_(value)


def compiled(
    model: Any, limits: Limits, *, vocab_size: int, max_model_len: int, block_size: int, **options: Any
) -> Plan:
    """A model's plan, as `saguaro build` makes it."""
    builder = Builder()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    sizes = {"vocab_size": vocab_size, "max_model_len": max_model_len, "block_size": block_size}
    draft = DraftNetwork(network, model, **sizes, capability=90, usual_rows=limits.usual_rows, **options)
    plan: Plan = compile_network(builder, network, draft, limits)
    return plan


def engine_of(
    model: Any, *, max_rows: int = 16, max_sequences: int = 2, num_blocks: int = 64, **options: Any
) -> TensorrtEngine:
    """The engine of a model on the stand-ins; its pools are NaN, so that reading what was never written is noticed."""
    sizes = {"vocab_size": 500, "max_model_len": 128, "block_size": 4}
    limits = Limits(max_sequences, max_rows, min(8, max_rows), max_blocks=num_blocks, table_width=64)
    plan = compiled(model, limits, **sizes | options)
    made = TensorrtEngine(
        Runtime(Log()).deserialize_cuda_engine(plan),
        vocab_size=sizes["vocab_size"],
        max_model_len=sizes["max_model_len"],
        num_blocks=num_blocks,
        cuda=Stream(),
    )
    for pool in made._memory.pools.values():
        pool.fill_(torch.nan)
    return made
