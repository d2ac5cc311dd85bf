"""The draft as a TensorRT engine: its network, written with TensorRT's network API around our attention plugin.

The network takes what a `ForwardBatch` holds and nothing else, so one engine serves prefill, trunks and branches:

    inputs   token_ids, positions, slots [N] · logit_rows [L] · those of the attention (`plugins/rows.py: MASK`)
             key_pool.I, value_pool.I [num_blocks, block_size, KV heads, head dim] of each layer I, updated in place
    outputs  logits [L, vocab_size] float32 · key_pool.I.updated, value_pool.I.updated: bind them to the input's memory

It is strongly typed: every tensor has the dtype that the Hugging Face model gives it, so the two compute the same
numbers up to the order of sums. What a shape may be is set by `Limits` when the engine is built; the size of the pool
is open. The model comes from `checkpoint.load_model`: weights stay mapped, and are read by TensorRT where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorrt as trt
import torch
from torch import Tensor, nn

from saguaro.engines.checkpoint import check_config
from saguaro.engines.inputs import INPUTS
from saguaro.errors import EngineError
from saguaro.plugins import tensorrt as plugin
from saguaro.plugins.rows import MASK

TYPES = {dtype: kind for kind, dtype in plugin.TORCH.items()}
_PLUGIN_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Limits:
    """The largest batch an engine is compiled for, and the one it is tuned for."""

    max_sequences: int
    max_rows: int  # of one forward
    usual_rows: int  # branches of a usual batch: what TensorRT's choice of kernels is timed with
    max_blocks: int  # of the pool
    table_width: int  # blocks of a sequence, those of its branches included

    def __post_init__(self) -> None:
        if not 1 <= self.usual_rows <= self.max_rows:
            raise EngineError(f"usual_rows is {self.usual_rows}, but must be between 1 and max_rows ({self.max_rows}).")
        for name in ("max_sequences", "max_blocks", "table_width"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, got {getattr(self, name)}.")


class DraftNetwork:
    """A Llama, Qwen2 or Qwen3 model written into an empty `trt.INetworkDefinition`.

    `model` is the Hugging Face model, in the dtype to be computed in. It is kept, for TensorRT reads its weights until
    the engine is built. `splits`: parts the attention's columns are computed in, side by side; more for few, long
    sequences. `kept`: the token ids the head computes, ascending; the logits of all others are -inf. What the draft
    cannot propose costs acceptance, and is exact under both rules, for q is what it then is.

    Raises EngineError for a model that would not be computed exactly.
    """

    def __init__(
        self,
        network: Any,
        model: Any,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        capability: int,
        usual_rows: int,
        splits: int = 1,
        kept: Sequence[int] | None = None,
        ahead_of_time: bool = True,
    ) -> None:
        self._network = network
        self._plugins: dict[str, Any] = {"capability": capability, "ahead_of_time": ahead_of_time}
        self._tuning = {"usual_rows": usual_rows, "splits": splits}
        self._model = model
        self._config = model.config
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._dtype: torch.dtype = model.base_model.norm.weight.dtype
        self._kept: list[Tensor] = []
        self._constants: dict[Any, Any] = {}
        self._used: set[int] = set()
        self._inputs: dict[str, tuple[int | str, ...]] = {}  # shapes; a letter is a size that is open
        self._check(vocab_size)
        self._write(vocab_size, kept)

    def profile(self, profile: Any, limits: Limits) -> Any:
        """Set the least, usual and greatest shape of every input in a `trt.IOptimizationProfile`, and return it."""
        sizes = {
            "N": (1, limits.usual_rows, limits.max_rows),
            "L": (1, limits.usual_rows, limits.max_rows),
            "S": (1, 1, limits.max_sequences),
            "W": (1, limits.table_width, limits.table_width),
            "B": (1, limits.max_blocks, limits.max_blocks),
        }
        for name, shape in self._inputs.items():
            least, usual, most = (
                tuple(size if isinstance(size, int) else sizes[size][which] for size in shape) for which in range(3)
            )
            profile.set_shape(name, least, usual, most)
        return profile

    def _check(self, vocab_size: int) -> None:
        check_config(self._config, self._max_model_len)
        if self._dtype not in _PLUGIN_TYPES:
            raise EngineError(
                f"the tensorrt engine computes in float32, float16 or bfloat16, not {self._dtype}. Change the dtype."
            )
        if self._config.hidden_act != "silu":
            raise EngineError(
                f"the model's activation is {self._config.hidden_act!r}; the tensorrt engine has only silu. "
                "Use engine: pytorch."
            )
        if vocab_size > self._config.vocab_size:
            raise EngineError(
                f"the tokenizer has {vocab_size} token ids, but the model only {self._config.vocab_size}: "
                "the engine directory mixes two models. Build it again."
            )

    def _write(self, vocab_size: int, kept: Sequence[int] | None) -> None:
        base = self._model.base_model
        inputs = {name: self._input(name, torch.int32, shape) for name, shape in INPUTS.items()}
        token_ids, slots, logit_rows = (inputs[name] for name in ("token_ids", "slots", "logit_rows"))
        mask = [inputs[name] for name in MASK]
        rotation = self._rotation(inputs["positions"])

        # Rows for padding of the vocabulary are left out, of the head too: a tied one stays the same constant.
        hidden = self._gather(self._weight(base.embed_tokens.weight, rows=vocab_size), token_ids, 0)  # [N, hidden]
        for index, layer in enumerate(base.layers):
            normed = self._norm(hidden, layer.input_layernorm)
            hidden = self._add(hidden, self._attention(index, layer.self_attn, normed, rotation, slots, mask))
            normed = self._norm(hidden, layer.post_attention_layernorm)
            hidden = self._add(hidden, self._feed_forward(layer.mlp, normed))
        hidden = self._norm(self._gather(hidden, logit_rows, 0), base.norm)  # only rows whose logits are wanted
        head = self._model.get_output_embeddings()
        if kept is None:
            logits = self._cast(self._linear(hidden, head, vocab_size), torch.float32)
        else:
            logits = self._some(hidden, head, vocab_size, kept)
        self._output(logits, "logits")
        left_out = [name for name, parameter in self._model.named_parameters() if id(parameter) not in self._used]
        if left_out:
            raise EngineError(
                f"the tensorrt engine does not compute all of the model: {', '.join(left_out[:3])} would be ignored. "
                "Use engine: pytorch."
            )

    def _some(self, hidden: Any, head: nn.Linear, vocab_size: int, kept: Sequence[int]) -> Any:
        """[L, vocab_size] float32 logits of the tokens that are kept, spread over all ids."""
        # One more row, of zeros, that gives the -inf of every other token. The map is a constant of the network, so
        # that whoever runs it sees an ordinary vocabulary.
        self._used |= {id(parameter) for parameter in head.parameters()}
        narrow = nn.Linear(1, 1, bias=head.bias is not None, device="meta")
        narrow.weight = _with_zero(head.weight, kept)
        if head.bias is not None:
            narrow.bias = _with_zero(head.bias, kept)
        barred = torch.zeros(1, len(kept) + 1)
        barred[0, -1] = -torch.inf
        logits = self._add(self._cast(self._linear(hidden, narrow), torch.float32), self._constant(barred))
        place = torch.full((vocab_size,), len(kept), dtype=torch.int32)
        place[list(kept)] = torch.arange(len(kept), dtype=torch.int32)
        return self._gather(logits, self._constant(place), 1)

    def _attention(
        self, index: int, attention: Any, hidden: Any, rotation: tuple[Any, Any, Any], slots: Any, mask: list[Any]
    ) -> Any:
        heads, kv_heads, dim = self._config.num_attention_heads, self._config.num_key_value_heads, attention.head_dim
        query = self._reshape(self._linear(hidden, attention.q_proj), (0, heads, dim))  # [N, heads, dim]; 0: as it is
        key = self._reshape(self._linear(hidden, attention.k_proj), (0, kv_heads, dim))
        value = self._reshape(self._linear(hidden, attention.v_proj), (0, kv_heads, dim))
        if hasattr(attention, "q_norm"):  # Qwen3: over each head
            query, key = self._norm(query, attention.q_norm, 3), self._norm(key, attention.k_norm, 3)
        query, key = self._rotate(query, rotation), self._rotate(key, rotation)

        shape = ("B", self._block_size, kv_heads, dim)
        pools = [self._input(f"{kind}_pool.{index}", self._dtype, shape) for kind in ("key", "value")]
        updated = plugin.update_kv(self._network, key, value, slots, *pools, **self._plugins)
        for kind, pool in zip(("key", "value"), updated):
            self._output(pool, f"{kind}_pool.{index}.updated")
        options = self._plugins | self._tuning | {"scale": float(attention.scaling)}
        output = plugin.fan_out_attention(self._network, query, *updated, *mask, **options)
        return self._linear(self._reshape(output, (0, heads * dim)), attention.o_proj)

    def _feed_forward(self, mlp: Any, hidden: Any) -> Any:
        gate = self._linear(hidden, mlp.gate_proj)
        sigmoid = _of(self._network.add_activation(gate, trt.ActivationType.SIGMOID))
        return self._linear(
            self._multiply(self._multiply(gate, sigmoid), self._linear(hidden, mlp.up_proj)), mlp.down_proj
        )

    def _norm(self, hidden: Any, norm: Any, rank: int = 2) -> Any:
        """RMSNorm over the last of `rank` dimensions, in float32 like the model's."""
        wide = self._cast(hidden, torch.float32)
        square = self._multiply(wide, wide)
        mean = _of(self._network.add_reduce(square, trt.ReduceOperation.AVG, 1 << (rank - 1), True))
        epsilon = self._constant(torch.full((1,) * rank, norm.variance_epsilon))
        root = _of(self._network.add_unary(self._add(mean, epsilon), trt.UnaryOperation.SQRT))
        inverse = _of(self._network.add_unary(root, trt.UnaryOperation.RECIP))
        normed = self._cast(self._multiply(wide, inverse), self._dtype)
        return self._multiply(normed, self._weight(norm.weight, (1,) * (rank - 1) + (-1,)))

    def _rotation(self, positions: Any) -> tuple[Any, Any, Any]:
        """Cosines and signed sines [N, 1, dim] of the rows, and where each element's partner lies."""
        # The model's own frequencies and scaling, tabulated: no cosine of a large angle is left to the device.
        every = torch.arange(self._max_model_len)[None]
        rotary = type(self._model.base_model.rotary_emb)(config=self._config)
        cosines, sines = (table[0].to(self._dtype) for table in rotary(torch.empty(0), every))
        dim = cosines.shape[1]
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin): the sign goes to the sines, so that halves are just swapped.
        sines[:, : dim // 2].neg_()
        rows = [self._gather(self._constant(table), positions, 0) for table in (cosines, sines)]
        partner = self._constant(torch.arange(dim, dtype=torch.int32).roll(dim // 2))
        return self._reshape(rows[0], (0, 1, dim)), self._reshape(rows[1], (0, 1, dim)), partner

    def _rotate(self, heads: Any, rotation: tuple[Any, Any, Any]) -> Any:
        cosines, sines, partner = rotation
        swapped = self._gather(heads, partner, 2)
        return self._add(self._multiply(heads, cosines), self._multiply(swapped, sines))

    def _linear(self, hidden: Any, linear: nn.Linear, rows: int | None = None) -> Any:
        """hidden @ weight.T + bias, [N, out]; only the first `rows` outputs if given."""
        weight = self._weight(linear.weight, rows=rows)
        none, transposed = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
        product = _of(self._network.add_matrix_multiply(hidden, none, weight, transposed))
        return product if linear.bias is None else self._add(product, self._weight(linear.bias, (1, -1), rows=rows))

    def _weight(self, parameter: Tensor, shape: tuple[int, ...] | None = None, rows: int | None = None) -> Any:
        self._used.add(id(parameter))
        tensor = parameter.detach()[:rows]
        return self._constant(tensor if shape is None else tensor.view(shape))

    def _constant(self, tensor: Tensor) -> Any:
        tensor = tensor.contiguous()
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in self._constants:
            self._kept.append(tensor)  # TensorRT reads it where it lies
            weights = trt.Weights(TYPES[tensor.dtype], tensor.data_ptr(), tensor.numel())
            self._constants[key] = _of(self._network.add_constant(tuple(tensor.shape), weights))
        return self._constants[key]

    def _input(self, name: str, dtype: torch.dtype, shape: tuple[int | str, ...]) -> Any:
        self._inputs[name] = shape
        return self._network.add_input(name, TYPES[dtype], tuple(n if isinstance(n, int) else -1 for n in shape))

    def _output(self, tensor: Any, name: str) -> None:
        tensor.name = name
        self._network.mark_output(tensor)

    def _gather(self, data: Any, indices: Any, axis: int) -> Any:
        return _of(self._network.add_gather(data, indices, axis))

    def _reshape(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        layer = self._network.add_shuffle(tensor)
        layer.reshape_dims = shape
        return _of(layer)

    def _cast(self, tensor: Any, dtype: torch.dtype) -> Any:
        return _of(self._network.add_cast(tensor, TYPES[dtype]))

    def _add(self, left: Any, right: Any) -> Any:
        return _of(self._network.add_elementwise(left, right, trt.ElementWiseOperation.SUM))

    def _multiply(self, left: Any, right: Any) -> Any:
        return _of(self._network.add_elementwise(left, right, trt.ElementWiseOperation.PROD))


def _with_zero(parameter: Tensor, kept: Sequence[int]) -> nn.Parameter:
    rows = parameter.detach()[list(kept)]
    return nn.Parameter(torch.cat([rows, torch.zeros_like(rows[:1])]), requires_grad=False)


def _of(layer: Any) -> Any:
    """The only output of a layer. TensorRT gives none for a layer it refuses."""
    if layer is None:
        raise EngineError("TensorRT refused a layer of the draft's network; its log says why.")
    return layer.get_output(0)
