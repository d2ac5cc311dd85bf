"""The fan-out attention as TensorRT plugins, from the kernels of `triton_lang.py`. Only these files import tensorrt.

Three quickly deployable plugins (`tensorrt.plugin`), each one kernel launch, as TensorRT's ahead-of-time form demands:

    saguaro::UpdateKv         writes the rows' keys and values into the pools, in place (outputs aliased to inputs)
    saguaro::FanOutAttention  attends the rows to the pools under the fan-out mask, over `splits` parts of the columns
    saguaro::MergeParts       puts the parts together; not needed with one

KV is updated by a plugin of its own rather than by the attention: rows of a trunk read what other rows of the same
forward have just written, and inside one launch nothing makes one block of threads wait for another. Between two
plugins the updated pool, an output of one and an input of the other, is that order. The attention then changes nothing
but its output, so TensorRT may run it as often as it likes, for timing; and UpdateKv may be repeated too.

In an engine the kernels are PTX, compiled for the `capability` of its device: running it needs no Python. The same
plugins can be run from Python (`ahead_of_time=False`), where the kernel is launched by Triton.

The functions `update_kv` and `fan_out_attention` check names, ranks, sizes and dtypes before they add anything to the
network, and raise EngineError naming the argument. TensorRT's own rules (schema, exact types of attributes) come after.
"""

# No `from __future__ import annotations` here: TensorRT reads the annotations as objects.

import math
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
import torch

from saguaro.errors import EngineError
from saguaro.plugins import triton_lang

# What the attention reads of a forward, all int32: the kernel's arguments by name. A letter is an open size: S
# sequences, N rows, W blocks of the longest block table.
MASK: dict[str, tuple[int | str, ...]] = {
    "block_table": ("S", "W"),
    "sequences": ("S", 6),
    "fork": ("N",),
    "branch": ("N",),
}
_UPDATE, _ATTENTION, _MERGE = "saguaro::UpdateKv", "saguaro::FanOutAttention", "saguaro::MergeParts"
# The dtypes computed in: name for Triton, name for autotuning.
_FLOATS = {
    trt.DataType.FLOAT: ("fp32", "FP32"),
    trt.DataType.HALF: ("fp16", "FP16"),
    trt.DataType.BF16: ("bf16", "BF16"),
}
_POOL = ("B", "BLOCK_SIZE", "KV_HEADS", "D")
_SHAPES: dict[str, dict[str, tuple[int | str, ...]]] = {
    _UPDATE: {
        "key": ("N", "KV_HEADS", "D"),
        "value": ("N", "KV_HEADS", "D"),
        "slots": ("N",),
        "key_pool": _POOL,
        "value_pool": _POOL,
    },
    _ATTENTION: {"query": ("N", "H", "D"), "key_pool": _POOL, "value_pool": _POOL, **MASK},
    _MERGE: {"parts": ("SPLITS", "N", "H", "D"), "lse": ("SPLITS", "N", "H")},
}
_INTEGERS = ("slots", *MASK)
_HEAD_DIM_LIMIT = 256
# Shared memory a block of threads may have without the launcher asking for more, which TensorRT is not known to do.
_SHARED_LIMIT = 48 * 1024


def update_kv(
    network: Any, key: Any, value: Any, slots: Any, key_pool: Any, value_pool: Any, *, capability: int
) -> tuple[Any, Any]:
    """Add the writing of keys and values [N, KV heads, D] at `slots` [N] to the network; the updated pools.

    The outputs are the memory of the inputs: whatever reads the new KV must read them, not `key_pool` and `value_pool`.
    """
    tensors = {"key": key, "value": value, "slots": slots, "key_pool": key_pool, "value_pool": value_pool}
    _check_tensors(_UPDATE, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    _check_capability(capability)
    layer = _add(network, trtp.op.saguaro.UpdateKv(*tensors.values(), capability=capability), True)
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
    window: int = 0,
    soft_cap: float = 0.0,
    splits: int = 1,
    ahead_of_time: bool = True,
) -> Any:
    """Add the attention of `query` [N, H, D] over the pools [B, block size, KV heads, D] to the network; [N, H, D].

    `block_table` to `branch` are those of `triton_lang.fan_out_attention_kernel`. The columns are attended in `splits`
    parts side by side, which keeps a device busy when there are few sequences. `capability` is the device's: 90 is 9.0.
    """
    tensors = {"query": query, "key_pool": key_pool, "value_pool": value_pool, "block_table": block_table}
    tensors |= {"sequences": sequences, "fork": fork, "branch": branch}
    _check_tensors(_ATTENTION, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    attributes = {"scale": scale, "window": window, "soft_cap": soft_cap, "splits": splits, "capability": capability}
    _check_attributes(attributes)
    layer = _add(network, trtp.op.saguaro.FanOutAttention(*tensors.values(), **attributes), ahead_of_time)
    if splits == 1:
        return layer.get_output(0)
    parts, lse = layer.get_output(0), layer.get_output(1)
    dtype = query.dtype.name
    return _add(network, trtp.op.saguaro.MergeParts(parts, lse, dtype=dtype, capability=capability), ahead_of_time).get_output(0)


def _add(network: Any, plugin: Any, ahead_of_time: bool) -> Any:
    layer = network.add_plugin(plugin, ahead_of_time)
    if layer is None:
        raise EngineError("TensorRT refused a plugin of the draft's network; its log says why.")
    return layer


# What is allowed ------------------------------------------------------------------------------------------------------


def _check_tensors(plugin: str, tensors: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Ranks, sizes and dtypes of a plugin's inputs; -1 is a size that is not known yet."""
    sizes: dict[str, tuple[int, str]] = {}  # of each letter, and the argument it was first seen in
    floats = None
    for name, (dtype, shape) in tensors.items():
        expected = _SHAPES[plugin][name]
        wanted = f"[{', '.join(str(size) for size in expected)}]"
        if len(shape) != len(expected):
            raise EngineError(f"{plugin}: {name} has the shape {list(shape)}, but must be {wanted}.")
        for size, letter in zip(shape, expected):
            known, where = sizes.setdefault(letter, (size, name)) if isinstance(letter, str) else (letter, "")
            if known < 0 <= size and isinstance(letter, str):
                sizes[letter] = (size, name)
            elif min(known, size) >= 0 and known != size:
                fixed = f" with {letter} = {known} as in {where}" if where else ""
                raise EngineError(f"{plugin}: {name} has the shape {list(shape)}, but must be {wanted}{fixed}.")
        if name in _INTEGERS:
            if dtype != trt.DataType.INT32:
                raise EngineError(f"{plugin}: {name} is {dtype.name}, but must be INT32.")
        elif plugin == _MERGE:
            if dtype != trt.DataType.FLOAT:
                raise EngineError(f"{plugin}: {name} is {dtype.name}, but must be FLOAT.")
        elif dtype not in _FLOATS:
            raise EngineError(f"{plugin}: {name} is {dtype.name}, but must be {', '.join(t.name for t in _FLOATS)}.")
        elif floats is not None and dtype != floats[0]:
            raise EngineError(f"{plugin}: {name} is {dtype.name}, but must be {floats[0].name} like {floats[1]}.")
        else:
            floats = floats or (dtype, name)
    heads, kv_heads, dim = (sizes.get(letter, (-1, ""))[0] for letter in ("H", "KV_HEADS", "D"))
    if min(heads, kv_heads) > 0 and heads % kv_heads:
        raise EngineError(f"{plugin}: query has {heads} heads, which must be a multiple of key_pool's {kv_heads}.")
    if not (dim < 0 or 1 <= dim <= _HEAD_DIM_LIMIT):
        raise EngineError(f"{plugin}: a head of {next(iter(tensors))} has {dim} elements; 1 to {_HEAD_DIM_LIMIT} fit.")


def _check_attributes(attributes: dict[str, Any]) -> None:
    rules = {
        "scale": (float, lambda x: 0.0 < x < float("inf"), "positive"),
        "window": (int, lambda x: x >= 0, "0 (none) or more"),
        "soft_cap": (float, lambda x: 0.0 <= x < float("inf"), "0.0 (none) or more"),
        "splits": (int, lambda x: x > 0 and x & (x - 1) == 0, "a power of two"),
    }
    for name, (kind, fits, words) in rules.items():
        value = attributes[name]
        if type(value) is not kind or not fits(value):
            raise EngineError(f"{_ATTENTION}: {name} is {value!r}, but must be {words}, of type {kind.__name__}.")
    _check_capability(attributes["capability"])


def _check_capability(capability: Any) -> None:
    if type(capability) is not int or capability < 80:
        raise EngineError(
            f"saguaro plugins: capability is {capability!r}, but must be that of a device, 80 (8.0) or more, of type int."
        )


def _check_descriptions(plugin: str, *descriptions: Any) -> None:
    """The same, of what TensorRT describes to a plugin: sizes are expressions, of which some are known."""

    def size(expression: Any) -> int:
        if expression.is_fake or not expression.is_constant:
            return -1
        return int(expression.constant_value())

    _check_tensors(
        plugin,
        {
            name: (given.dtype, tuple(size(each) for each in given.shape_expr))
            for name, given in zip(_SHAPES[plugin], descriptions, strict=True)
        },
    )


# The plugins, as TensorRT sees them -----------------------------------------------------------------------------------


def _describe_update(
    key: trtp.TensorDesc,
    value: trtp.TensorDesc,
    slots: trtp.TensorDesc,
    key_pool: trtp.TensorDesc,
    value_pool: trtp.TensorDesc,
    capability: int,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    _check_descriptions(_UPDATE, key, value, slots, key_pool, value_pool)
    return key_pool.aliased(), value_pool.aliased()


def _describe_attention(
    query: trtp.TensorDesc,
    key_pool: trtp.TensorDesc,
    value_pool: trtp.TensorDesc,
    block_table: trtp.TensorDesc,
    sequences: trtp.TensorDesc,
    fork: trtp.TensorDesc,
    branch: trtp.TensorDesc,
    scale: float,
    window: int,
    soft_cap: float,
    splits: int,
    capability: int,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    _check_descriptions(_ATTENTION, query, key_pool, value_pool, block_table, sequences, fork, branch)
    rows, heads, dim = query.shape_expr
    lse = trtp.from_shape_expr((splits, rows, heads), trt.DataType.FLOAT)
    if splits == 1:
        return query.like(), lse  # the kernel leaves lse alone; the number of outputs is fixed
    return trtp.from_shape_expr((splits, rows, heads, dim), trt.DataType.FLOAT), lse


def _describe_merge(parts: trtp.TensorDesc, lse: trtp.TensorDesc, dtype: str, capability: int) -> trtp.TensorDesc:
    _check_descriptions(_MERGE, parts, lse)
    _, rows, heads, dim = parts.shape_expr
    return trtp.from_shape_expr((rows, heads, dim), trt.DataType.__members__[dtype])


def _combinations(plugin: str, outputs: str) -> list[trtp.AutoTuneCombination]:
    """Types of inputs and outputs, one for each dtype computed in; everything is linear. F is that dtype."""
    kinds = ["INT32" if name in _INTEGERS else "F" for name in _SHAPES[plugin]] + outputs.split()
    return [
        trtp.AutoTuneCombination(", ".join(name if kind == "F" else kind for kind in kinds), "LINEAR")
        for _, name in _FLOATS.values()
    ]


def _tune_update(
    key: trtp.TensorDesc,
    value: trtp.TensorDesc,
    slots: trtp.TensorDesc,
    key_pool: trtp.TensorDesc,
    value_pool: trtp.TensorDesc,
    outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
) -> list[trtp.AutoTuneCombination]:
    return _combinations(_UPDATE, "F F")


def _tune_attention(
    query: trtp.TensorDesc,
    key_pool: trtp.TensorDesc,
    value_pool: trtp.TensorDesc,
    block_table: trtp.TensorDesc,
    sequences: trtp.TensorDesc,
    fork: trtp.TensorDesc,
    branch: trtp.TensorDesc,
    splits: int,
    outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
) -> list[trtp.AutoTuneCombination]:
    return _combinations(_ATTENTION, "F FP32" if splits == 1 else "FP32 FP32")


def _tune_merge(
    parts: trtp.TensorDesc, lse: trtp.TensorDesc, dtype: str, outputs: tuple[trtp.TensorDesc]
) -> list[trtp.AutoTuneCombination]:
    return [trtp.AutoTuneCombination(f"FP32, FP32, {_FLOATS[trt.DataType.__members__[dtype]][1]}", "LINEAR")]


_Kernel = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]  # name, PTX, grid, arguments after the inputs


def _compile_update(
    key: trtp.TensorDesc,
    value: trtp.TensorDesc,
    slots: trtp.TensorDesc,
    key_pool: trtp.TensorDesc,
    value_pool: trtp.TensorDesc,
    capability: int,
    outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
    tactic: int,
) -> _Kernel:
    pointer = _pointer(key)
    types = {"key": pointer, "value": pointer, "slots": "*i32", "_key_pool": pointer, "_value_pool": pointer}
    types |= {"num_slots": "i32", "key_pool": pointer, "value_pool": pointer}
    width = key.shape[1] * key.shape[2]
    constants = {"WIDTH": width, "BLOCK": _power_of_two(width)}
    compiled = triton_lang.compile_ptx(
        triton_lang.update_kv_kernel, types, constants, capability=capability, num_warps=4, num_stages=1
    )
    num_slots = key_pool.shape_expr[0] * key_pool.shape_expr[1]
    return _kernel(compiled, (key.shape_expr[0],), num_slots)


def _compile_attention(
    query: trtp.TensorDesc,
    key_pool: trtp.TensorDesc,
    value_pool: trtp.TensorDesc,
    block_table: trtp.TensorDesc,
    sequences: trtp.TensorDesc,
    fork: trtp.TensorDesc,
    branch: trtp.TensorDesc,
    scale: float,
    window: int,
    soft_cap: float,
    splits: int,
    capability: int,
    outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
    tactic: int,
) -> _Kernel:
    pointer = _pointer(query)
    types = {"query": pointer, "key_pool": pointer, "value_pool": pointer}
    types |= dict.fromkeys(MASK, "*i32")
    types |= {"num_rows": "i32", "table_width": "i32", "output": pointer if splits == 1 else "*fp32", "lse": "*fp32"}
    constants = _attention_constants(query.shape, key_pool.shape, scale, window, soft_cap, splits)
    itemsize = 4 if query.dtype == trt.DataType.FLOAT else 2
    compiled = triton_lang.compile_ptx(
        triton_lang.fan_out_attention_kernel,
        types,
        constants | {"BLOCK_N": _columns(constants["BLOCK_D"], itemsize)},
        capability=capability,
        num_warps=4,
        num_stages=_STAGES,
    )
    rows, kv_heads = query.shape_expr[0], key_pool.shape_expr[2]
    tiles = trtp.cdiv(rows * constants["GROUP"], constants["BLOCK_M"])  # as if all rows were of one sequence
    grid = (tiles, sequences.shape_expr[0] * kv_heads, splits)
    return _kernel(compiled, grid, rows, block_table.shape_expr[1])


def _compile_merge(
    parts: trtp.TensorDesc,
    lse: trtp.TensorDesc,
    dtype: str,
    capability: int,
    outputs: tuple[trtp.TensorDesc],
    tactic: int,
) -> _Kernel:
    types = {"parts": "*fp32", "lse": "*fp32", "num_rows": "i32", "output": _pointer(outputs[0])}
    compiled = triton_lang.compile_ptx(
        triton_lang.merge_kernel, types, _merge_constants(parts.shape), capability=capability, num_warps=4, num_stages=1
    )
    _, rows, heads, _ = parts.shape_expr
    return _kernel(compiled, (rows, heads), rows)


def _kernel(compiled: triton_lang.Compiled, grid: tuple[Any, ...], *arguments: Any) -> _Kernel:
    if compiled.shared > _SHARED_LIMIT:
        raise EngineError(
            f"the kernel {compiled.name} needs {compiled.shared} bytes of shared memory in a block, but TensorRT starts "
            f"it with {_SHARED_LIMIT} at most. Use ahead_of_time=False, or a smaller head size."
        )
    launch = trtp.KernelLaunchParams(*grid, block_x=compiled.threads, shared_mem=compiled.shared)
    return compiled.name, compiled.ptx, launch, trtp.SymIntExprs.from_tuple(tuple(map(trtp.SymInt32, arguments)))


_STAGES = 2  # tiles of keys and values under way


def _attention_constants(
    query: Any, pool: Any, scale: float, window: int, soft_cap: float, splits: int
) -> dict[str, Any]:
    """Constants of the attention kernel, but BLOCK_N, from the shapes of query and pools."""
    _, heads, dim = query
    _, block_size, kv_heads, _ = pool
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": dim,
        "BLOCK_SIZE": block_size,
        "SCALE": scale,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "SPLITS": splits,
        "BLOCK_M": 64,
        "BLOCK_D": max(16, _power_of_two(dim)),  # the least a tensor-core product takes
    }


def _columns(block_d: int, itemsize: int) -> int:
    """BLOCK_N: as many columns as keys and values of all stages, and the query, leave room for in shared memory."""
    room = _SHARED_LIMIT - 64 * block_d * itemsize
    return max(16, min(64, _power_of_two(room // (2 * _STAGES * block_d * itemsize) + 1) // 2))


def _merge_constants(parts: Any) -> dict[str, Any]:
    splits, _, heads, dim = parts
    return {"HEADS": heads, "HEAD_DIM": dim, "SPLITS": splits, "BLOCK_D": _power_of_two(dim)}


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _pointer(given: trtp.TensorDesc) -> str:
    return "*" + _FLOATS[given.dtype][0]


# Run from Python: the same kernels on the tensors TensorRT hands over, on its stream.


def _run_update(
    key: trtp.Tensor,
    value: trtp.Tensor,
    slots: trtp.Tensor,
    key_pool: trtp.Tensor,
    value_pool: trtp.Tensor,
    outputs: tuple[trtp.Tensor, trtp.Tensor],
    stream: int,
) -> None:
    width = key.shape[1] * key.shape[2]
    arguments = [_torch(tensor) for tensor in (key, value, slots, key_pool, value_pool)]
    with _on(stream):
        triton_lang.update_kv_kernel[(key.shape[0],)](
            *arguments,
            key_pool.shape[0] * key_pool.shape[1],
            *map(_torch, outputs),
            WIDTH=width,
            BLOCK=_power_of_two(width),
        )


def _run_attention(
    query: trtp.Tensor,
    key_pool: trtp.Tensor,
    value_pool: trtp.Tensor,
    block_table: trtp.Tensor,
    sequences: trtp.Tensor,
    fork: trtp.Tensor,
    branch: trtp.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    splits: int,
    outputs: tuple[trtp.Tensor, trtp.Tensor],
    stream: int,
) -> None:
    constants = _attention_constants(query.shape, key_pool.shape, scale, window, soft_cap, splits)
    arguments = [_torch(each) for each in (query, key_pool, value_pool, block_table, sequences, fork, branch)]
    rows, itemsize = query.shape[0], arguments[0].element_size()
    tiles = -(-rows * constants["GROUP"] // constants["BLOCK_M"])
    with _on(stream):
        triton_lang.fan_out_attention_kernel[(tiles, sequences.shape[0] * constants["KV_HEADS"], splits)](
            *arguments,
            rows,
            block_table.shape[1],
            *map(_torch, outputs),
            **constants,
            BLOCK_N=_columns(constants["BLOCK_D"], itemsize),
            num_stages=_STAGES,
        )


def _run_merge(
    parts: trtp.Tensor, lse: trtp.Tensor, outputs: tuple[trtp.Tensor], stream: int
) -> None:
    _, rows, heads, _ = parts.shape
    with _on(stream):
        triton_lang.merge_kernel[(rows, heads)](
            _torch(parts), _torch(lse), rows, _torch(outputs[0]), **_merge_constants(parts.shape)
        )


class _Memory:
    """A tensor's bytes for torch: the interface knows no bfloat16."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


_TORCH = {
    trt.DataType.FLOAT: torch.float32,
    trt.DataType.HALF: torch.float16,
    trt.DataType.BF16: torch.bfloat16,
    trt.DataType.INT32: torch.int32,
}


def _torch(tensor: trtp.Tensor) -> torch.Tensor:
    """The tensor's memory as a torch tensor, not copied."""
    dtype, shape = _TORCH[tensor.dtype], tuple(tensor.shape)
    memory = _Memory(tensor.data_ptr, math.prod(shape) * dtype.itemsize)
    return torch.as_tensor(memory, device="cuda").view(dtype).view(shape)


def _on(stream: int) -> Any:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


# Lazily: TensorRT's registry hears of a plugin when the first network uses it, and importing this file needs no device.
for _id, _functions in {
    _UPDATE: (_describe_update, _tune_update, _run_update, _compile_update),
    _ATTENTION: (_describe_attention, _tune_attention, _run_attention, _compile_attention),
    _MERGE: (_describe_merge, _tune_merge, _run_merge, _compile_merge),
}.items():
    trtp.register(_id, lazy_register=True)(_functions[0])
    trtp.autotune(_id)(_functions[1])
    trtp.impl(_id)(_functions[2])
    trtp.aot_impl(_id)(_functions[3])
