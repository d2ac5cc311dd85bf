"""The decoder of a Llama, Qwen2 or Qwen3 model: its Hugging Face modules' weights, in few calls.

With a row or a few to compute, a call of PyTorch costs about as much as what it computes, and Hugging Face's modules
make a hundred of them a layer; each product reads megabytes, which puts Python's own memory out of the caches. Here
rows are flat, queries and keys are rotated together, layers that read the same activations are one where
`replace_linears` has put them together, and modules are called past their hooks. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.activations import SiLUActivation

from saguaro.engines.linears import TOGETHER
from saguaro.engines.quantised import Norm, QuantisedLinear


class Attend(Protocol):
    """Rotates queries and keys, stores keys and values in a layer's KV pool and attends over what is there."""

    def __call__(self, layer: int, projected: Tensor, cosines: Tensor, sines: Tensor, scale: float) -> Tensor:
        """[N, H + 2 KV heads, D] queries, keys and values, to be rotated as `rotate` does, -> [N, H, D]."""
        ...


class Decoder:
    """What lies between embeddings and output head. Made when the model's layers, dtype and device are final."""

    def __init__(self, model: Any) -> None:
        base = model.base_model
        self._layers = [(_QuantisedLayer if _is_quantised(layer) else _Layer)(layer) for layer in base.layers]
        self._norm = _norm(base.norm)
        self._rotary = base.rotary_emb

    def __call__(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[N, hidden] embeddings, which are overwritten, of rows at [N] positions -> [N, hidden] final states."""
        cosines, sines = (table[0, :, None] for table in self._rotary(hidden[None], positions[None]))  # [N, 1, D]
        sines[..., : sines.shape[-1] // 2].neg_()  # for `rotate`
        for index, layer in enumerate(self._layers):
            layer.add_to(hidden, cosines, sines, partial(attend, index))
        return self._norm(hidden)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[N, ..., D] queries or keys, rotated: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), halves of a head.

    The first half of the sines comes negated, so that halves are just swapped.
    """
    return heads.roll(heads.shape[-1] // 2, dims=-1).mul_(sines).addcmul_(heads, cosines)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._input_norm, self._post_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._qkv = _side_by_side(attention, "qkv_proj")
        self._heads: int = attention.config.num_attention_heads
        self._kv_heads: int = attention.config.num_key_value_heads
        self._dim: int = attention.head_dim
        # Qwen3's are over each head.
        self._head_norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self._scale: float = attention.scaling
        self._output = attention.o_proj.forward
        self._gate_up = _gate_up(mlp)
        self._activation = mlp.act_fn.forward
        self._down = mlp.down_proj.forward

    def add_to(self, hidden: Tensor, cosines: Tensor, sines: Tensor, attend: Callable[..., Tensor]) -> None:
        """Add the layer's attention and feed-forward to `hidden` [N, hidden]."""
        rows = len(hidden)
        projected = self._project(hidden).view(rows, -1, self._dim)
        if self._head_norms:
            query, keys, values = projected.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
            projected = torch.cat([self._head_norms[0](query), self._head_norms[1](keys), values], dim=1)
        attended = attend(projected, cosines, sines, self._scale)
        self._add_attended(hidden, attended.reshape(rows, -1))
        self._add_feed_forward(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, (H + 2 KV heads) * D] queries, keys and values."""
        return self._qkv(self._input_norm(hidden))

    def _add_attended(self, hidden: Tensor, attended: Tensor) -> None:
        hidden += self._output(attended)

    def _add_feed_forward(self, hidden: Tensor) -> None:
        gate, up = self._gate_up(self._post_norm(hidden))
        hidden += self._down(self._activation(gate).mul_(up))


class _QuantisedLayer(_Layer):
    """With the kernel of `QuantisedLinear`, which does on rows' way through it what would be calls of their own."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._norms = [Norm.of(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._products: list[Callable[..., Tensor]] = [linear.product for linear in _linears(layer)]

    def _project(self, hidden: Tensor) -> Tensor:
        return self._products[0](hidden, norm=self._norms[0])

    def _add_attended(self, hidden: Tensor, attended: Tensor) -> None:
        self._products[1](attended.contiguous(), add_to=hidden)

    def _add_feed_forward(self, hidden: Tensor) -> None:
        self._products[3](self._products[2](hidden, norm=self._norms[1]), gated=True, add_to=hidden)


def _is_quantised(layer: Any) -> bool:
    """Whether all of a layer's products are quantised, and its activation is the one that the kernel knows.

    In a tensor-parallel group they are not: what ranks add up is no product of one of them. `_Layer` does for any.
    """
    quantised = all(isinstance(linear, QuantisedLinear) for linear in _linears(layer))
    return quantised and isinstance(layer.mlp.act_fn, SiLUActivation)


def _linears(layer: Any) -> list[Any]:
    """In the order in which they are computed; None for layers that `replace_linears` has not put together."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        getattr(attention, "qkv_proj", None),
        attention.o_proj,
        getattr(mlp, "gate_up_proj", None),
        mlp.down_proj,
    ]


def _side_by_side(parent: Any, name: str) -> Callable[[Tensor], Tensor]:
    """The layers `TOGETHER` under that name, [N, in] -> their outputs, joined."""
    if hasattr(parent, name):
        together: Callable[[Tensor], Tensor] = getattr(parent, name).forward
        return together
    parts = [getattr(parent, part).forward for part in TOGETHER[name]]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _gate_up(mlp: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
    if hasattr(mlp, "gate_up_proj"):
        together = mlp.gate_up_proj.forward
        return lambda x: together(x).chunk(2, dim=-1)
    gate, up = mlp.gate_proj.forward, mlp.up_proj.forward
    return lambda x: (gate(x), up(x))


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """An RMSNorm over the last dimension, in float32 like the module's."""
    weight, epsilon = norm.weight, norm.variance_epsilon
    if weight.device.type != "cpu" or weight.dtype == torch.float64:  # whose last bits are to be Hugging Face's
        module: Callable[[Tensor], Tensor] = norm
        return module
    floor, share, dtype = torch.tensor(epsilon), 1 / len(weight), weight.dtype

    def normed(x: Tensor) -> Tensor:
        # For a few rows on the CPU: `mean`, and `rms_norm` with it, takes ten times as long as this reduction.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = torch.addcmul(floor, length, length, value=share).rsqrt_()
        output: Tensor = (x * inverse).to(dtype) * weight
        return output

    return normed
