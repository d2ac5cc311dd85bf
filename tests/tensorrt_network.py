"""A TensorRT network that is recorded instead of built, and evaluated in torch.

The native network cannot be made without TensorRT's library, so this is a stand-in for it, held to the real bindings:
every call must fit a signature of the real class's method, parsed from what pybind11 says of it, with arguments of the
real classes and enums; every attribute set on a layer must be a settable one of the real layer class, of its type.
Plugins are the real thing: `tensorrt.plugin`'s own objects check schema and attributes, and give types, shapes and
aliases. What a layer computes is written here, with TensorRT's rules for a strongly typed network where they are
stricter than torch's (equal ranks and dtypes). What is *not* checked: that TensorRT accepts and compiles the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from tensorrt_stub import load_tensorrt

trt = load_tensorrt()
OPEN = 1009  # stands for every size that is open (-1) while shapes are inferred: a prime no model has
TORCH = {
    trt.DataType.FLOAT: torch.float32,
    trt.DataType.HALF: torch.float16,
    trt.DataType.BF16: torch.bfloat16,
    trt.DataType.INT32: torch.int32,
}
TYPES = {dtype: kind for kind, dtype in TORCH.items()}


# Signatures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    names: tuple[str, ...]  # without self
    types: tuple[str, ...]
    required: int
    returns: str


def signatures(function: Any, name: str) -> list[Signature]:
    """Every overload of a bound function, from its documentation."""
    found = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> (.+)$", function.__doc__, re.MULTILINE)
    result = []
    for arguments, returns in found:
        if "*args" in arguments:
            continue
        parts = re.split(r", (?=\w+: )", arguments)[1:]
        pairs = [part.split(": ", 1) for part in parts]
        kinds = [kind.split(" = ")[0] for _, kind in pairs]
        required = sum(" = " not in kind for _, kind in pairs)
        result.append(Signature(tuple(n for n, _ in pairs), tuple(kinds), required, returns.strip()))
    assert result, f"no signature of {name} was understood: {function.__doc__[:200]}"
    return result


def fits(value: Any, kind: str) -> bool:
    """Whether pybind11 would take the value for an argument of that type."""
    if kind.startswith("List["):
        return isinstance(value, (list, tuple)) and all(fits(each, kind[5:-1]) for each in value)
    if kind in ("tuple", "list"):
        return type(value).__name__ == kind
    if kind == "buffer":
        return isinstance(value, (bytes, bytearray, memoryview))
    if kind in ("int", "bool", "str", "float"):
        return type(value).__name__ == kind or (kind == "float" and type(value) is int)
    if kind == "function":
        return callable(value)
    name = kind.rpartition(".")[2]
    if name == "Dims":
        try:
            trt.Dims(value)
        except TypeError:
            return False
        return True
    return isinstance(value, getattr(trt, name))


def bind(cls: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The call's arguments by name, and the type it returns. Raises TypeError as the bindings do."""
    overloads = signatures(getattr(cls, name), name)
    for overload in overloads:
        values = dict(zip(overload.names, args)) | options
        if len(args) <= len(overload.names) and len(args) + len(options) == len(values):
            given = all(n in values for n in overload.names[: overload.required])
            kinds = dict(zip(overload.names, overload.types))
            if given and all(n in kinds and fits(v, kinds[n]) for n, v in values.items()):
                return values, overload.returns
    raise TypeError(f"{cls.__name__}.{name}{args}{options}: incompatible arguments; there is {overloads}")


# What is recorded -----------------------------------------------------------------------------------------------------


class Recorder:
    """Any object of the bindings whose calls are only kept: `calls` of a builder's configuration or profile."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        getattr(self.cls, name)

        def call(*args: Any, **options: Any) -> Any:
            values, returns = bind(self.cls, name, args, options)
            self.calls.append((name, values))
            return self.result(name, values, returns)

        return call

    @property
    def __class__(self) -> Any:
        return self.cls  # so that it fits where the bindings ask for one

    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        return 0 if returns == "int" else None


_BUILDER = trt.Builder  # which a test may put the following in the place of


class Builder(Recorder):
    """A `trt.Builder` whose plan is the recorded network and configuration."""

    def __init__(self, logger: Any = None) -> None:
        assert logger is None or isinstance(logger, trt.ILogger)
        super().__init__(_BUILDER)

    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        if name == "create_network":
            return Network(values.get("flags", 0))
        if name == "create_builder_config":
            return BuilderConfig(trt.IBuilderConfig)
        if name == "build_serialized_network":
            return Plan.make(values["network"], values["config"])
        return Recorder(getattr(trt, returns.rpartition(".")[2]))


class BuilderConfig(Recorder):
    """A `trt.IBuilderConfig`, with a timing cache of a few bytes."""

    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        if name in ("create_timing_cache", "get_timing_cache"):
            return TimingCache(trt.ITimingCache)
        return name == "set_timing_cache" or super().result(name, values, returns)


class TimingCache(Recorder):
    def result(self, name: str, values: dict[str, Any], returns: str) -> Any:
        return b"times" if name == "serialize" else super().result(name, values, returns)


class Plan(bytes):
    """Stands for an IHostMemory with a serialised engine: bytes that a runtime of this process knows."""

    network: Network
    config: Recorder
    known: ClassVar[dict[bytes, Plan]] = {}

    @classmethod
    def make(cls, network: Network, config: Recorder) -> Plan:
        plan = cls(b"plan %d" % len(cls.known))
        plan.network, plan.config = network, config
        for layer in network.layers:  # as a plan does, it has the weights: what they lay in may go
            weights = layer.arguments.get("weights")
            if layer.kind == "add_constant" and weights.dtype != trt.DataType.BF16:
                layer.arguments["weights"] = torch.from_numpy(weights.numpy().copy())
        cls.known[bytes(plan)] = plan
        return plan


class Tensor(trt.ITensor):  # type: ignore[misc]
    """Passes for an ITensor; nothing native is behind it, so nothing but this may be asked of it."""

    layer: Any
    index: int
    name = dtype = shape = None  # over the native ones

    @classmethod
    def make(cls, layer: Any, index: int, name: str) -> Tensor:
        tensor: Tensor = cls.__new__(cls)
        tensor.layer, tensor.index, tensor.name = layer, index, name
        return tensor

    def __getattribute__(self, name: str) -> Any:
        if name in ("dtype", "shape"):
            dtype, shape = self.layer.network.infer(self)
            return dtype if name == "dtype" else trt.Dims(shape)
        if name.startswith("__") or name in ("layer", "index", "name"):
            return super().__getattribute__(name)
        raise AttributeError(f"the stand-in for ITensor has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("layer", "index") or (name == "name" and type(value) is str), name
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Layer:
    """A layer: the call that added it, and the attributes set since."""

    def __init__(self, network: Network, kind: str, arguments: dict[str, Any], cls: Any, outputs: int = 1) -> None:
        self.__dict__.update(network=network, kind=kind, arguments=arguments, cls=cls, settings={})
        self.__dict__["outputs"] = [Tensor.make(self, i, f"{kind}.{len(network.layers)}.{i}") for i in range(outputs)]

    def __setattr__(self, name: str, value: Any) -> None:
        setter = getattr(self.cls, name).fset
        assert setter is not None, f"{self.cls.__name__}.{name} cannot be set"
        kind = re.search(r"arg1: (.+)\) -> None", setter.__doc__)
        assert kind is not None
        if not fits(value, kind[1]):
            raise TypeError(f"{self.cls.__name__}.{name} = {value!r}: must be {kind[1]}")
        self.settings[name] = value

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class Network:
    """Stands for an INetworkDefinition. `run` computes its outputs."""

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.inputs: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self.outputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self._inferred: dict[Tensor, tuple[Any, tuple[int, ...]]] = {}

    @property
    def __class__(self) -> Any:
        return trt.INetworkDefinition

    def __getattr__(self, name: str) -> Callable[..., Any]:
        getattr(trt.INetworkDefinition, name)

        def call(*args: Any, **options: Any) -> Any:
            return self._record(name, *bind(trt.INetworkDefinition, name, args, options))

        return call

    def _record(self, name: str, values: dict[str, Any], returns: str) -> Any:
        if name == "add_input":
            assert values["name"] not in self.inputs, f"two inputs are called {values['name']}"
            self.inputs[values["name"]] = (values["dtype"], tuple(values["shape"]))
        elif name == "mark_output":
            self.outputs.append(values["tensor"])
            return None
        elif name == "add_plugin":
            aot = trt.QuickPluginCreationRequest
            tensors, _, plugin = values["func"](aot.STRICT_AOT if values.get("aot") else aot.STRICT_JIT)
            values = {"inputs": tensors, "plugin": plugin}
        cls = trt.ILayer if name == "add_input" else getattr(trt, returns.rpartition(".")[2])
        layer = Layer(self, name, values, cls, values["plugin"].num_outputs if name == "add_plugin" else 1)
        self.layers.append(layer)
        if name == "add_input":
            layer.outputs[0].name = values["name"]
            return layer.outputs[0]
        return layer

    def infer(self, tensor: Tensor) -> tuple[Any, tuple[int, ...]]:
        """Type and shape, -1 where open, of a tensor: what its layer makes of tensors without data."""
        if tensor not in self._inferred:
            layer = tensor.layer
            if layer.kind == "add_input":
                self._inferred[tensor] = self.inputs[tensor.name]
            elif layer.kind == "add_plugin":
                described = describe(layer.arguments["plugin"], [self.infer(t) for t in layer.arguments["inputs"]])
                self._inferred |= dict(zip(layer.outputs, described))
            else:
                result = compute(layer, lambda other: _empty(*self.infer(other)))
                shape = tuple(-1 if size == OPEN else size for size in result.shape)
                self._inferred[tensor] = (TYPES[result.dtype], shape)
        return self._inferred[tensor]

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name. Pools are updated in place, as their aliases promise."""
        assert inputs.keys() == self.inputs.keys(), inputs.keys() ^ self.inputs.keys()
        known: dict[Tensor, torch.Tensor] = {}
        for layer in self.layers:
            if layer.kind == "add_input":
                (tensor,) = layer.outputs
                dtype, shape = self.inputs[tensor.name]
                given = inputs[tensor.name]
                assert TYPES[given.dtype] == dtype, tensor.name
                assert all(w in (-1, g) for w, g in zip(shape, given.shape, strict=True))
                known[tensor] = given
            elif layer.kind == "add_plugin":
                self._check_aliases(layer)
                arguments = [known[t] for t in layer.arguments["inputs"]]
                known |= dict(zip(layer.outputs, run_plugin(layer.arguments["plugin"], arguments), strict=True))
            else:
                known[layer.outputs[0]] = compute(layer, known.__getitem__)
        return {tensor.name: known[tensor] for tensor in self.outputs}

    def _check_aliases(self, layer: Layer) -> None:
        """What a plugin changes in place nobody else may read: TensorRT would be free to run that one first or last."""
        plugin = layer.arguments["plugin"]
        self.infer(layer.outputs[0])
        for source in map(plugin.get_aliased_input, range(plugin.num_outputs)):
            if source != -1:
                changed = layer.arguments["inputs"][source]
                readers = [
                    other
                    for other in self.layers
                    for value in other.arguments.values()
                    if value is changed or (isinstance(value, list) and any(each is changed for each in value))
                ]
                assert readers == [layer], f"{changed.name} is changed in place, but others read it"


def _empty(dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty([OPEN if size == -1 else size for size in shape], dtype=TORCH[dtype], device="meta")


# What layers compute --------------------------------------------------------------------------------------------------


def compute(layer: Layer, of: Callable[[Tensor], torch.Tensor]) -> torch.Tensor:
    """A built-in layer's output."""
    arguments = {k: of(v) if isinstance(v, Tensor) else v for k, v in layer.arguments.items()}
    return COMPUTE[layer.kind](**arguments, **layer.settings)


def constant(shape: Any, weights: Any) -> torch.Tensor:
    if isinstance(weights, torch.Tensor):
        return weights.view(tuple(shape))
    assert math.prod(shape) == weights.size
    if weights.dtype == trt.DataType.BF16:  # numpy has none: shapes only
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device="meta")
    return torch.from_numpy(weights.numpy()).view(tuple(shape))


def elementwise(input1: torch.Tensor, input2: torch.Tensor, op: Any) -> torch.Tensor:
    assert input1.dtype == input2.dtype
    assert input1.dim() == input2.dim(), "TensorRT broadcasts sizes of 1, but adds no dimensions"
    operation = {trt.ElementWiseOperation.SUM: torch.add, trt.ElementWiseOperation.PROD: torch.mul}[op]
    return operation(*_together(input1, input2))


def matrix_multiply(input0: torch.Tensor, op0: Any, input1: torch.Tensor, op1: Any) -> torch.Tensor:
    assert input0.dtype == input1.dtype
    assert input0.dim() == input1.dim() >= 2
    turn = {trt.MatrixOperation.NONE: lambda x: x, trt.MatrixOperation.TRANSPOSE: lambda x: x.mT}
    left, right = _together(input0, input1)
    return turn[op0](left) @ turn[op1](right)


def gather(input: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    assert indices.dtype in (torch.int32, torch.int64)
    input, indices = _together(input, indices)
    picked = input.index_select(axis, indices.flatten())
    return picked.view(*input.shape[:axis], *indices.shape, *input.shape[axis + 1 :])


def shuffle(input: torch.Tensor, reshape_dims: Any = ()) -> torch.Tensor:
    return input.reshape([input.shape[i] if size == 0 else size for i, size in enumerate(reshape_dims)])


def reduce(input: torch.Tensor, op: Any, axes: int, keep_dims: bool) -> torch.Tensor:
    assert op == trt.ReduceOperation.AVG
    return input.mean([i for i in range(input.dim()) if axes >> i & 1], keepdim=keep_dims)


def unary(input: torch.Tensor, op: Any) -> torch.Tensor:
    assert input.is_floating_point()
    return {trt.UnaryOperation.SQRT: torch.sqrt, trt.UnaryOperation.RECIP: torch.reciprocal}[op](input)


def activation(input: torch.Tensor, type: Any) -> torch.Tensor:
    return {trt.ActivationType.SIGMOID: torch.sigmoid}[type](input)


def cast(input: torch.Tensor, to_type: Any) -> torch.Tensor:
    return input.to(TORCH[to_type])


def _together(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All without data if one is: constants have data while shapes are inferred."""
    return [t.to("meta") for t in tensors] if any(t.is_meta for t in tensors) else list(tensors)


COMPUTE: dict[str, Callable[..., torch.Tensor]] = {
    "add_constant": constant,
    "add_elementwise": elementwise,
    "add_matrix_multiply": matrix_multiply,
    "add_gather": gather,
    "add_shuffle": shuffle,
    "add_reduce": reduce,
    "add_unary": unary,
    "add_activation": activation,
    "add_cast": cast,
}


# Plugins --------------------------------------------------------------------------------------------------------------

Described = tuple[Any, tuple[int, ...]]  # type and shape


class Registry:
    """Stands for the native plugin registry, which the stub has not: what `tensorrt.plugin` registers, it can get."""

    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        assert isinstance(creator, trt.IPluginCreatorV3Quick)
        self._creators[creator.name, creator.plugin_version, plugin_namespace] = creator
        return True

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self._creators[type, version, plugin_namespace]


if trt.get_plugin_registry() is None:
    _registry = Registry()
    trt.get_plugin_registry = lambda: _registry


class Size(trt.IDimensionExpr):  # type: ignore[misc]
    """A size in a shape expression; -1 is one that is not known."""

    value: int

    @classmethod
    def make(cls, value: int) -> Size:
        size: Size = cls.__new__(cls)
        size.value = value
        return size

    def is_constant(self) -> bool:
        return self.value != -1

    def get_constant_value(self) -> int:
        return self.value


class Expressions:
    """Stands for an IExprBuilder."""

    def constant(self, value: int) -> Size:
        return Size.make(value)

    def operation(self, operation: Any, first: Size, second: Size) -> Size:
        a, b = first.value, second.value
        if -1 in (a, b):
            return Size.make(-1)
        kinds = trt.DimensionOperation
        return Size.make({kinds.SUM: a + b, kinds.PROD: a * b, kinds.CEIL_DIV: -(-a // max(b, 1))}[operation])


def describe(plugin: Any, inputs: Sequence[Described]) -> list[Described]:
    """What the plugin says of its outputs, asked as TensorRT asks."""
    types = plugin.get_output_data_types([dtype for dtype, _ in inputs], [len(shape) for _, shape in inputs])
    sizes = [[Size.make(size) for size in shape] for _, shape in inputs]
    with patch.object(trt, "DimsExprs", lambda length: [None] * length):  # the real one holds native pointers
        shapes = plugin.get_output_shapes(sizes, [], Expressions())
    return [(dtype, tuple(size.value for size in shape)) for dtype, shape in zip(types, shapes, strict=True)]


def descriptions(described: Sequence[Described]) -> list[Any]:
    """The same as the bindings' own structures."""
    result = []
    for dtype, shape in described:
        given = trt.DynamicPluginTensorDesc()
        given.desc.type, given.desc.dims, given.desc.format = dtype, trt.Dims(shape), trt.TensorFormat.LINEAR
        given.min = given.opt = given.max = trt.Dims([abs(size) for size in shape])
        result.append(given)
    return result


def supported(plugin: Any, inputs: Sequence[Described], outputs: Sequence[Described]) -> list[tuple[Any, ...]]:
    """The combinations of types the plugin offers for inputs and outputs."""
    every = descriptions([*inputs, *outputs])
    offered = plugin.get_supported_format_combinations(every, len(inputs))
    assert all(each.format == trt.TensorFormat.LINEAR for each in offered)
    return [tuple(each.type for each in offered[i : i + len(every)]) for i in range(0, len(offered), len(every))]


def run_plugin(plugin: Any, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the plugin's kernel does, and that it is what the plugin describes.

    A plugin that is to run from Python runs as it is. The kernel of one compiled ahead of time is replaced by torch.
    """
    outputs = _checked_outputs(plugin, tuple((TYPES[a.dtype], tuple(a.shape)) for a in arguments))
    if hasattr(plugin, "enqueue"):
        results = _enqueue(plugin, arguments, outputs)
    else:
        results = RUN[plugin.plugin_name](*arguments, **plugin.attrs)
    for i, (result, (dtype, shape)) in enumerate(zip(results, outputs, strict=True)):
        assert (TYPES[result.dtype], tuple(result.shape)) == (dtype, shape), plugin.plugin_name
        source = plugin.get_aliased_input(i)
        assert source == -1 or result is arguments[source]
        assert source != -1 or all(result is not argument for argument in arguments)
    return results


@lru_cache(maxsize=1024)  # what the bindings take most of a small network's time for
def _checked_outputs(plugin: Any, inputs: tuple[Described, ...]) -> list[Described]:
    outputs = describe(plugin, inputs)
    assert tuple(dtype for dtype, _ in [*inputs, *outputs]) in supported(plugin, inputs, outputs)
    return outputs


def _enqueue(plugin: Any, arguments: list[torch.Tensor], outputs: Sequence[Described]) -> list[torch.Tensor]:
    results = []
    for i, (dtype, shape) in enumerate(outputs):
        source = plugin.get_aliased_input(i)
        poison = torch.full(shape, torch.nan, dtype=TORCH[dtype])
        results.append(poison if source == -1 else arguments[source])
    arguments = [argument.contiguous() for argument in arguments]
    given, made = (
        [each.desc for each in descriptions([(TYPES[t.dtype], tuple(t.shape)) for t in tensors])]
        for tensors in (arguments, results)
    )
    pointers = ([t.data_ptr() for t in tensors] for tensors in (arguments, results))
    strides = ([tuple(t.stride()) for t in tensors] for tensors in (arguments, results))
    plugin.enqueue(given, made, *pointers, *strides, 0)
    return results


def update_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    capability: int,
) -> list[torch.Tensor]:
    inside = (slots >= 0) & (slots < key_pool.shape[0] * key_pool.shape[1])
    key_pool.flatten(0, 1)[slots[inside]] = key[inside]
    value_pool.flatten(0, 1)[slots[inside]] = value[inside]
    return [key_pool, value_pool]


def attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    sequences: torch.Tensor,
    fork: torch.Tensor,
    branch: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    splits: int,
    usual_rows: int,
    capability: int,
) -> list[torch.Tensor]:
    """By the meaning of the kernel's arguments, one row at a time; part i of the columns is every splits-th."""
    assert not window
    assert not soft_cap
    rows, heads, dim = query.shape
    block_size, kv_heads = key_pool.shape[1:3]
    parts = torch.full((splits, rows, heads, dim), torch.nan)
    lse = torch.full((splits, rows, heads), torch.nan)
    for table, (prefix, trunk, branches, steps, first, count) in zip(block_table, sequences.tolist()):
        for row in range(first, first + count):
            own = torch.arange(steps)[:, None] * branches + branch[row] if steps else torch.empty(0, 1)
            columns = torch.cat([torch.arange(prefix + int(fork[row]) + 1), prefix + trunk + own.flatten()]).long()
            slots = table[columns // block_size] * block_size + columns % block_size
            keys, values = (
                pool.flatten(0, 1)[slots].float().repeat_interleave(heads // kv_heads, 1)
                for pool in (key_pool, value_pool)
            )
            scores = torch.einsum("hd,chd->ch", query[row].float(), keys) * scale
            for part in range(splits):
                mine = scores[part::splits]
                lse[part, row] = mine.logsumexp(0) / math.log(2)
                parts[part, row] = torch.einsum("ch,chd->hd", mine.softmax(0), values[part::splits])
    return [parts[0].to(query.dtype) if splits == 1 else parts, lse]


def merge(parts: torch.Tensor, lse: torch.Tensor, dtype: str, capability: int) -> list[torch.Tensor]:
    weights = torch.softmax(lse * math.log(2), 0)
    return [(parts * weights[..., None]).sum(0).to(TORCH[trt.DataType.__members__[dtype]])]


RUN = {"UpdateKv": update_kv, "FanOutAttention": attention, "MergeParts": merge}
