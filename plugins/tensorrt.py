"""The fan-out attention as TensorRT plugins, from the kernels of `triton_lang.py`.

Three quickly deployable plugins (`tensorrt.plugin`), each one kernel launch, as its ahead-of-time form demands:

    saguaro::UpdateKv         writes the rows' keys and values into the pools, in place (outputs aliased to inputs)
    saguaro::FanOutAttention  attends the rows to the pools under the fan-out mask, in `splits` parts of the columns
    saguaro::MergeParts       puts the parts together; added with two or more

KV is updated by a plugin of its own and not by the attention, because rows of a trunk read what other rows of the same
forward have just written, and inside one launch no block of threads can wait for another. Between two plugins the order
is that of the data: the updated pool is an output of the first and an input of the second. So only a plugin that may be
repeated at will changes memory in place, and the attention changes nothing but its output.

While it builds an engine, TensorRT times plugins on made-up inputs: block tables, rows and slots may hold anything. So
the kernels stay inside their tensors whatever these hold.

In an engine the kernels are PTX for the device's `capability`, and running it needs no Python. The same plugins run
from Python too (`ahead_of_time=False`), launched by Triton: for debugging, and where shared memory is not enough.

`update_kv` and `fan_out_attention` check names, ranks, sizes, dtypes and attributes before they add anything, and raise
EngineError naming the argument.
"""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import Parameter, Signature
from types import GenericAlias, SimpleNamespace
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
import torch

from saguaro.errors import EngineError
from saguaro.plugins import triton_lang
from saguaro.plugins.rows import MASK
from saguaro.plugins.variant import Variant

TORCH = {
    trt.DataType.FLOAT: torch.float32,
    trt.DataType.HALF: torch.float16,
    trt.DataType.BF16: torch.bfloat16,
    trt.DataType.INT32: torch.int32,
}
_TUNED = {trt.DataType.FLOAT: "FP32", trt.DataType.HALF: "FP16"}  # names in autotuning; the others are their own
_POOL = ("B", "BLOCK_SIZE", "KV_HEADS", "D")
_FIXED = ("BLOCK_SIZE", "KV_HEADS", "H", "D", "SPLITS")  # sizes that are compiled into the kernels
# Shared memory a program gets without its launcher asking the driver for more, which TensorRT is not known to do.
_SHARED_LIMIT = 48 * 1024
_Kernel = tuple[str, str, Any, Any]


def update_kv(
    network: Any,
    key: Any,
    value: Any,
    slots: Any,
    key_pool: Any,
    value_pool: Any,
    *,
    capability: int,
    ahead_of_time: bool = True,
) -> tuple[Any, Any]:
    """Add the writing of keys and values [N, KV heads, D] at `slots` [N] to the network; the updated pools.

    The outputs are the memory of the inputs: whatever reads the new KV must read them, not `key_pool` and `value_pool`.
    """
    tensors = (key, value, slots, key_pool, value_pool)
    layer = _UPDATE.add(network, tensors, {"capability": capability}, ahead_of_time)
    return layer.get_output(0), layer.get_output(1)


def fan_out_attention(
    network: Any,
    query: Any,
    key_pool: Any,
    value_pool: Any,
    block_table: Any,
    sequences: Any,
    fork: Any,
    branch: Any,
    *,
    scale: float,
    capability: int,
    usual_rows: int,
    window: int = 0,
    soft_cap: float = 0.0,
    splits: int = 1,
    ahead_of_time: bool = True,
) -> Any:
    """Add the attention of `query` [N, H, D] over the pools [B, block size, KV heads, D] to the network; [N, H, D].

    `block_table` to `branch` are those of `RowTensors`. `usual_rows` of a sequence are what the kernel's tile is made
    for; `splits` parts of the columns are computed side by side, which keeps a device busy when sequences are few.
    `capability` is the device's: 90 is 9.0.
    """
    tensors = (query, key_pool, value_pool, block_table, sequences, fork, branch)
    attributes = {"scale": scale, "window": window, "soft_cap": soft_cap, "splits": splits}
    attributes |= {"usual_rows": usual_rows, "capability": capability}
    layer = _ATTENTION.add(network, tensors, attributes, ahead_of_time)
    if splits == 1:
        return layer.get_output(0)
    attributes = {"dtype": query.dtype.name, "capability": capability}
    return _MERGE.add(network, (layer.get_output(0), layer.get_output(1)), attributes, ahead_of_time).get_output(0)


class _Plugin:
    """One plugin: its arguments stated once, and from them the four functions that TensorRT wants.

    A method gets the arguments as attributes of one object: descriptions of the inputs (memory, in `run`), then the
    plugin's attributes, and `outputs`.
    """

    id: str
    inputs: dict[str, tuple[int | str, ...]]  # shapes; equal letters are equal sizes
    attributes: dict[str, type]
    outputs: int

    def describe(self, a: Any) -> tuple[Any, ...]:
        """Types and shapes of the outputs."""
        raise NotImplementedError

    def compile(self, a: Any) -> _Kernel:
        """Name and PTX of the kernel, its grid, and its arguments between inputs and outputs."""
        raise NotImplementedError

    def run(self, a: Any) -> None:
        """Launch the kernel on the current stream."""
        raise NotImplementedError

    def check(self, tensors: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
        """Raises EngineError for types and shapes of inputs that do not fit; -1 is a size that is not known (yet)."""
        sizes: dict[str, tuple[int, str]] = {}  # of each letter, and the argument that has it
        for name, (dtype, shape) in tensors.items():
            wanted = f"[{', '.join(map(str, self.inputs[name]))}]"
            if len(shape) != len(self.inputs[name]):
                raise EngineError(f"{self.id}: {name} has the shape {list(shape)}, but must be {wanted}.")
            for size, letter in zip(shape, self.inputs[name]):
                known, where = (letter, "") if isinstance(letter, int) else sizes.get(str(letter), (size, name))
                if min(known, size) >= 0 and known != size:
                    reason = f", with {letter} = {known} as in {where}" if where else ""
                    raise EngineError(f"{self.id}: {name} has the shape {list(shape)}, but must be {wanted}{reason}.")
                if isinstance(letter, str):
                    sizes[letter] = (known, where) if known >= 0 else (size, name)
            self._check_type(name, dtype, next(iter(tensors.items())))

    def _check_type(self, name: str, dtype: Any, first: tuple[str, tuple[Any, Any]]) -> None:
        if name == "slots" or name in MASK:
            allowed, reason = [trt.DataType.INT32], ""
        elif name == first[0]:
            allowed, reason = [kind for kind in TORCH if kind != trt.DataType.INT32], ""
        else:
            allowed, reason = [first[1][0]], f" like {first[0]}"
        if dtype not in allowed:
            names = " or ".join(kind.name for kind in allowed)
            raise EngineError(f"{self.id}: {name} is {dtype.name}, but must be {names}{reason}.")

    def add(self, network: Any, tensors: tuple[Any, ...], attributes: dict[str, Any], ahead_of_time: bool) -> Any:
        """Add the plugin to a network, checked; the layer."""
        described = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        self.check(dict(zip(self.inputs, described, strict=True)))
        for name, (_, shape) in zip(self.inputs, described):
            for size, letter in zip(shape, self.inputs[name]):
                if size < 0 and letter in _FIXED:
                    raise EngineError(f"{self.id}: {name} has the shape {list(shape)}; {letter} must not be open.")
        for name, kind in self.attributes.items():
            if type(attributes[name]) is not kind:
                raise EngineError(f"{self.id}: {name} must be of type {kind.__name__}, got {attributes[name]!r}.")
        if attributes["capability"] < 80:
            raise EngineError(f"{self.id}: capability must be 80 (8.0) or more, got {attributes['capability']}.")
        self.check_attributes(SimpleNamespace(**dict(zip(self.inputs, tensors)), **attributes))
        space, name = self.id.split("::")
        layer = network.add_plugin(getattr(getattr(trtp.op, space), name)(*tensors, **attributes), ahead_of_time)
        if layer is None:
            raise EngineError(f"TensorRT refused the plugin {self.id}; its log says why.")
        return layer

    def check_attributes(self, a: Any) -> None:
        """Raises EngineError for values of attributes that do not fit."""

    def register(self) -> None:
        """Make TensorRT know the plugin, lazily: its registry hears of it when the first network uses it."""
        described = GenericAlias(tuple, (trtp.TensorDesc,) * self.outputs)
        memory = GenericAlias(tuple, (trtp.Tensor,) * self.outputs)
        kernel = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
        combinations = GenericAlias(list, (trtp.AutoTuneCombination,))
        trtp.register(self.id, lazy_register=True)(self._function(self._describe, {}, described))
        trtp.autotune(self.id)(self._function(self._tune, {"outputs": described}, combinations))
        trtp.impl(self.id)(self._function(self._run, {"outputs": memory, "stream": int}, None, trtp.Tensor))
        trtp.aot_impl(self.id)(self._function(self.compile, {"outputs": described, "tactic": int}, kernel))

    def _function(self, method: Any, last: dict[str, Any], returns: Any, kind: Any = trtp.TensorDesc) -> Any:
        """A function with the signature that TensorRT inspects: inputs, attributes, and what it gives at the end."""
        arguments = {**dict.fromkeys(self.inputs, kind), **self.attributes, **last}

        def function(*values: Any, **options: Any) -> Any:
            return method(SimpleNamespace(**dict(zip(arguments, values)), **options))

        kinds = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, annotation=t) for n, t in arguments.items()]
        function.__signature__ = Signature(kinds, return_annotation=returns)  # type: ignore[attr-defined]
        return function

    def _describe(self, a: Any) -> tuple[Any, ...]:
        given = {name: getattr(a, name) for name in self.inputs}
        self.check({name: (desc.dtype, tuple(map(_size, desc.shape_expr))) for name, desc in given.items()})
        return self.describe(a)

    def _tune(self, a: Any) -> list[Any]:
        # The network is strongly typed and the layout always linear, so there is one combination: nothing to time.
        kinds = [getattr(a, name).dtype for name in self.inputs] + [output.dtype for output in a.outputs]
        return [trtp.AutoTuneCombination(", ".join(_TUNED.get(kind, kind.name) for kind in kinds), "LINEAR")]

    def _run(self, a: Any) -> None:
        memory = {name: _torch(getattr(a, name)) for name in self.inputs}
        with _on(a.stream):
            self.run(SimpleNamespace(**(vars(a) | memory | {"outputs": [_torch(output) for output in a.outputs]})))


class _UpdateKv(_Plugin):
    id = "saguaro::UpdateKv"
    inputs = {
        "key": ("N", "KV_HEADS", "D"),
        "value": ("N", "KV_HEADS", "D"),
        "slots": ("N",),
        "key_pool": _POOL,
        "value_pool": _POOL,
    }
    attributes = {"capability": int}
    outputs = 2

    def describe(self, a: Any) -> tuple[Any, ...]:
        return a.key_pool.aliased(), a.value_pool.aliased()

    def compile(self, a: Any) -> _Kernel:
        compiled = triton_lang.compile_update(TORCH[a.key.dtype], math.prod(a.key.shape[1:]), a.capability)
        num_slots = a.key_pool.shape_expr[0] * a.key_pool.shape_expr[1]
        return _kernel(compiled, 8, (a.key.shape_expr[0],), num_slots)

    def run(self, a: Any) -> None:
        num_slots = a.key_pool.shape[0] * a.key_pool.shape[1]
        triton_lang.update_kv_kernel[(len(a.key),)](
            a.key,
            a.value,
            a.slots,
            a.key_pool,
            a.value_pool,
            num_slots,
            *a.outputs,
            **triton_lang.update_constants(math.prod(a.key.shape[1:])),
        )


class _FanOutAttention(_Plugin):
    id = "saguaro::FanOutAttention"
    inputs = {"query": ("N", "H", "D"), "key_pool": _POOL, "value_pool": _POOL, **MASK}
    attributes = {
        "scale": float,
        "window": int,
        "soft_cap": float,
        "splits": int,
        "usual_rows": int,
        "capability": int,
    }
    outputs = 2

    def check_attributes(self, a: Any) -> None:
        _variant(a)

    def describe(self, a: Any) -> tuple[Any, ...]:
        rows, heads, dim = a.query.shape_expr
        lse = trtp.from_shape_expr((a.splits, rows, heads), trt.DataType.FLOAT)
        if a.splits == 1:
            return a.query.like(), lse  # which stays unwritten: the number of outputs is fixed
        return trtp.from_shape_expr((a.splits, rows, heads, dim), trt.DataType.FLOAT), lse

    def compile(self, a: Any) -> _Kernel:
        variant = _variant(a)
        rows, (num_sequences, width) = a.query.shape_expr[0], a.block_table.shape_expr
        # As if all rows were of one sequence: programs without a row end at once.
        tiles = trtp.cdiv(rows * (variant.heads // variant.kv_heads), variant.block_m)
        grid = (tiles, num_sequences * variant.kv_heads, variant.splits)
        compiled = triton_lang.compile_attention(variant, a.capability, keep_lse=True)
        return _kernel(compiled, 12, grid, rows, width, a.key_pool.shape_expr[0])

    def run(self, a: Any) -> None:
        variant = replace(_variant(a), most_rows=len(a.query))
        triton_lang.fan_out_attention_kernel[variant.grid(len(a.sequences))](
            a.query,
            a.key_pool,
            a.value_pool,
            a.block_table,
            a.sequences,
            a.fork,
            a.branch,
            len(a.query),
            a.block_table.shape[1],
            len(a.key_pool),
            *a.outputs,
            **variant.constants(),
            **variant.options,
        )


class _MergeParts(_Plugin):
    id = "saguaro::MergeParts"
    inputs = {"parts": ("SPLITS", "N", "H", "D"), "lse": ("SPLITS", "N", "H")}
    attributes = {"dtype": str, "capability": int}
    outputs = 1

    def describe(self, a: Any) -> tuple[Any, ...]:
        return (trtp.from_shape_expr(tuple(a.parts.shape_expr)[1:], trt.DataType.__members__[a.dtype]),)

    def compile(self, a: Any) -> _Kernel:
        _, rows, heads, _ = a.parts.shape_expr
        compiled = triton_lang.compile_merge(self._variant(a), a.capability)
        return _kernel(compiled, 4, (rows, heads), rows)

    def run(self, a: Any) -> None:
        variant = self._variant(a)
        _, rows, heads, _ = a.parts.shape
        triton_lang.merge_kernel[(rows, heads)](a.parts, a.lse, rows, *a.outputs, **variant.merge_constants())

    def _variant(self, a: Any) -> Variant:
        splits, _, heads, dim = a.parts.shape
        return Variant(TORCH[trt.DataType.__members__[a.dtype]], heads, heads, dim, 1, 1.0, 1, splits)


def _variant(a: Any) -> Variant:
    """The kernel for query and pools, whether they are described or tensors. Raises EngineError where there is none."""
    _, heads, dim = a.query.shape
    _, block_size, kv_heads, _ = a.key_pool.shape
    return Variant(
        dtype=TORCH.get(a.query.dtype, a.query.dtype),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        block_size=block_size,
        scale=a.scale,
        most_rows=a.usual_rows,
        splits=a.splits,
        window=a.window,
        soft_cap=a.soft_cap,
        max_shared=_SHARED_LIMIT,
        guarded=True,
    )


def _kernel(compiled: triton_lang.Compiled, parameters: int, grid: tuple[Any, ...], *arguments: Any) -> _Kernel:
    """What TensorRT wants of a kernel with so many parameters: inputs, `arguments` and outputs, in this order."""
    if compiled.shared_bytes > _SHARED_LIMIT:
        raise EngineError(
            f"the kernel {compiled.name} needs {compiled.shared_bytes} bytes of shared memory, but TensorRT starts it "
            f"with {_SHARED_LIMIT} at most. Use ahead_of_time=False, float16 or bfloat16, or smaller heads."
        )
    launch = trtp.KernelLaunchParams(*grid, block_x=compiled.threads, shared_mem=compiled.shared_bytes)
    symbols = trtp.SymIntExprs.from_tuple(tuple(trtp.SymInt32(argument) for argument in arguments))
    return compiled.name, without_scratch(compiled.ptx, compiled.name, parameters), launch, symbols


def without_scratch(ptx: str, name: str, parameters: int) -> str:
    """The PTX with only the first `parameters` parameters of the kernel `name`.

    Triton adds pointers to scratch memory that its own launcher passes. TensorRT would pass nothing for them, and a
    launch reads as many arguments as the kernel has parameters. Raises EngineError when the kernel uses them.
    """
    start = ptx.index(f".entry {name}(") + len(f".entry {name}(")
    end = ptx.index(")", start)
    declared = ptx[start:end].split(",")
    for extra in range(parameters, len(declared)):
        if f"[{name}_param_{extra}]" in ptx[end:]:
            raise EngineError(f"the kernel {name} needs scratch memory, which only Triton's own launcher passes.")
    if len(declared) < parameters:
        raise EngineError(f"the kernel {name} has {len(declared)} parameters, but TensorRT passes {parameters}.")
    return ptx[:start] + ",".join(declared[:parameters]) + "\n" + ptx[end:]


def _size(expression: Any) -> int:
    return int(expression.constant_value()) if not expression.is_fake and expression.is_constant else -1


class _Memory:
    """A tensor's bytes for torch: the interface of TensorRT's own tensors knows no bfloat16."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _torch(tensor: Any) -> torch.Tensor:
    """A `trtp.Tensor` as a torch tensor on the same memory."""
    dtype, shape = TORCH[tensor.dtype], tuple(tensor.shape)
    memory = _Memory(tensor.data_ptr, math.prod(shape) * dtype.itemsize)
    return torch.as_tensor(memory, device="cuda").view(dtype).view(shape)


def _on(stream: int) -> Any:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


_UPDATE, _ATTENTION, _MERGE = _UpdateKv(), _FanOutAttention(), _MergeParts()
for _plugin in (_UPDATE, _ATTENTION, _MERGE):
    _plugin.register()
