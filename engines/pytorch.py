"""A Hugging Face causal language model as an engine: its weights, our decoder, paged KV pool and fan-out attention.

It runs on the CPU and on CUDA, on one process or as one rank of a tensor-parallel group. On CUDA it has a stream of
its own, replays graphs for small batches (see `cuda_graphs`), and never waits for the device: whoever reads the logits
does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.engines.base import LOGIT_TOLERANCES, ForwardBatch, ForwardOutput, check_positions
from saguaro.engines.checkpoint import check_config, load_config, load_model, weights_file
from saguaro.engines.cuda import Cuda
from saguaro.engines.cuda_graphs import CudaGraphs, GraphInputs, buffer_bytes
from saguaro.engines.decoder import Decoder, rotate
from saguaro.engines.draft_vocab import SpreadHead, narrow_head, read_draft_vocab
from saguaro.engines.fixed_rows import FixedRows, fixed_rows
from saguaro.engines.kv_pool import KvPool, kv_bytes_per_block, require_memory
from saguaro.engines.linears import pack_linears
from saguaro.engines.manifest import QUANTISED, Dtype, Manifest
from saguaro.engines.quantised import QuantisedLinear, quantise_linears
from saguaro.engines.tensor_parallel import TensorParallel, join_shares, share_of
from saguaro.errors import EngineError
from saguaro.plugins.attention import Plan, plan_attention
from saguaro.plugins.cpp_attention import plan_cpp, rotate_and_store
from saguaro.plugins.fan_out_mask import FanOutMask
from saguaro.plugins.rows import RowTensors, check_rows, check_tensors
from saguaro.plugins.transfers import to_device

_CPU = torch.device("cpu")
# What the weights of each dtype of a manifest are stored in.
_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.bfloat16}
# As LOGIT_TOLERANCES: an activation that is rounded the other way moves by a whole step.
_QUANTISED_TOLERANCE = 0.1


@dataclass(frozen=True)
class _Step:
    """What the attention of every layer needs to know of one forward."""

    pool: KvPool
    slots: Tensor
    plan: Plan
    part: FixedRows | None  # of which the forward is; None: all rows of the batch, and no others

    def attend(self, layer: int, projected: Tensor, cosines: Tensor, sines: Tensor, scale: float) -> Tensor:
        """See `decoder.Attend`."""
        if self.part is not None:  # what is in no place has no KV and sees none
            projected, cosines, sines = (states[self.part.places] for states in (projected, cosines, sines))
        key_pool, value_pool = self.pool.keys[layer], self.pool.values[layer]
        query = self._store(layer, projected, cosines, sines)
        if layer == 0:
            check_tensors(query, key_pool, value_pool, len(self.slots))
        output = self.plan.attend(query, key_pool, value_pool, scale)
        return output if self.part is None else self.part.spread(output)

    def _store(self, layer: int, projected: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotate, store the rows' KV; returns the queries [N, H, D]."""
        kv_heads = self.pool.keys[layer].shape[2]
        turned, values = projected.tensor_split([-kv_heads], dim=1)
        turned = rotate(turned, cosines, sines)
        self.pool.write(layer, self.slots, turned[:, -kv_heads:], values)
        return turned[:, :-kv_heads]


class _CppStep(_Step):
    def _store(self, layer: int, projected: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        pools = self.pool.keys[layer], self.pool.values[layer]
        return rotate_and_store(projected.flatten(1), cosines, sines, self.slots, *pools)


class PytorchEngine:
    """Runs `model`, whose layers it computes itself. The KV pool has the dtype of the model's activations.

    In a tensor-parallel `group`, `model` is this rank's share, joined to the others; the leader's `forward` reaches all
    ranks and has the logits, those of a follower are a part of them.

    `deterministic`: the logits of a causal batch's row are the same bits in any batch (see `fixed_rows`). A batch under
    a fan-out, which only a draft gets, is computed as ever.

    `cuda` is the device the model is on, if it is one; without `graphs` every forward launches its kernels one by one.
    A tensor-parallel group does so always.

    Raises EngineError for a model it would not compute exactly, CapacityError when the KV pool does not fit.
    """

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        group: TensorParallel | None = None,
        deterministic: bool = False,
        cuda: Cuda | None = None,
        graphs: bool = True,
    ) -> None:
        check_config(model.config, max_model_len)
        if vocab_size > model.config.vocab_size:
            raise EngineError(
                f"the tokenizer has {vocab_size} token ids, but the model only {model.config.vocab_size}: "
                "the engine directory mixes two models. Build it again."
            )
        self._model = model.eval()
        self._decoder = Decoder(model)
        self._group = group
        self._dtype: torch.dtype = model.base_model.norm.weight.dtype
        self._device: torch.device = model.base_model.norm.weight.device
        quantised = any(isinstance(module, QuantisedLinear) for module in model.modules())
        # Quantised, a row is computed by itself as it is: by kernels of our own, and by norms that sum rows one by one.
        # But in which order the parts of several ranks are added up depends on its place.
        self._fix_rows = deterministic and (group is not None or not quantised)
        self._step = _CppStep if quantised else _Step
        self._plan_attention = plan_cpp if quantised else _planner(self._device, deterministic)
        self._cuda = cuda
        self.asynchronous = cuda is not None
        captured = cuda is not None and graphs and group is None
        self._pool = KvPool(
            model.config,
            block_size=block_size,
            num_blocks=num_blocks + captured,
            dtype=self._dtype,
            device=self._device,
        )
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.logit_tolerance = _QUANTISED_TOLERANCE if quantised else LOGIT_TOLERANCES[self._dtype]
        if deterministic:
            self.logit_tolerance = 0.0
        self._graphs: CudaGraphs | None = None
        if cuda is not None and captured:
            self._plan_graph = _graph_planner(self._device)
            self._graphs = CudaGraphs(
                cuda,
                self._compute,
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                dtype=torch.promote_types(self._dtype, torch.float32),
            )

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        block_size: int,
        num_blocks: int,
        group: TensorParallel | None = None,
        deterministic: bool = False,
        device: torch.device = _CPU,
        graphs: bool = True,
    ) -> PytorchEngine:
        """The engine of a directory built by `saguaro build`; in a group, this rank's part of it.

        Raises EngineError, ModelError or CapacityError when it cannot be run here.
        """
        manifest = Manifest.load(directory)
        rank, size = (group.rank, group.size) if group else (0, 1)
        if manifest.tp != size:
            raise EngineError(
                f"{directory}: is split over {manifest.tp} ranks, but is loaded on {size}. Build it with tp: {size} "
                f"or start {manifest.tp} ranks."
            )
        config = load_config(directory, manifest.max_model_len)
        if group:
            config = share_of(config, size)
        if device.type == "cuda" and manifest.dtype in QUANTISED:
            raise EngineError(
                f"{directory}: {manifest.dtype} is computed on the CPU alone. Build it as bfloat16 for a GPU."
            )
        sizes = {"block_size": block_size, "num_blocks": num_blocks}
        require_memory(
            memory_needed(directory, manifest, **sizes, rank=rank, device=device, graphs=graphs),
            f"the model and {num_blocks * block_size} tokens of KV",
            device,
        )
        model = load_model(directory / weights_file(rank, size), config, _STORED[manifest.dtype])
        kept = read_draft_vocab(directory, manifest.vocab_size) if manifest.reduced else None
        if kept is not None:
            narrow_head(model, kept)
        if group:
            join_shares(model, manifest.shards, group)
        if kept is not None and (group is None or group.leads):
            model.set_output_embeddings(SpreadHead(model.get_output_embeddings(), kept, manifest.vocab_size))
        model.to(device)
        convert(model, manifest.dtype, device)
        return cls(
            model,
            vocab_size=manifest.vocab_size,
            max_model_len=manifest.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            group=group,
            deterministic=deterministic,
            cuda=Cuda(device) if device.type == "cuda" else None,
            graphs=graphs,
        )

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass. Raises EngineError when a position is beyond `max_model_len` or a block table too short."""
        if self._graphs is not None and self._graphs.fits(batch):
            check_positions(batch, self.max_model_len)
            check_rows(batch.rows, batch.block_tables, self.block_size, self.num_blocks, _mask(batch))
            return ForwardOutput(self._graphs.run(batch, RowTensors.of(batch.rows, batch.block_tables, _mask(batch))))
        with self._cuda.on_stream() if self._cuda else nullcontext():
            return self._launch(batch)

    def _launch(self, batch: ForwardBatch) -> ForwardOutput:
        parts = fixed_rows(batch) if self._fix_rows and batch.fan_out is None else []
        plans = [self._plan(part.batch) for part in parts] or [self._plan(batch)]
        if self._group is not None and self._group.leads:
            self._group.send(batch)  # after what it cannot run has been refused: followers get nothing they cannot run
        if not parts:
            return ForwardOutput(self._logits(self._hidden(batch, plans[0])[to_device(batch.logit_rows, self._device)]))
        logits = []
        for part, plan in zip(parts, plans, strict=True):
            hidden = self._hidden(part.batch, plan, part)
            if part.logits:  # the head, too, always has ROWS rows
                logits.append(self._logits(hidden)[part.places[part.batch.logit_rows]])
        if not logits:
            return ForwardOutput(self._logits(hidden[:0]))
        order = torch.tensor([index for part in parts for index in part.logits]).argsort()
        return ForwardOutput(torch.cat(logits)[order])

    def _plan(self, batch: ForwardBatch) -> Plan:
        check_positions(batch, self.max_model_len)
        return self._plan_attention(
            batch.rows,
            batch.block_tables,
            self.block_size,
            self.num_blocks,
            _mask(batch),
            self._device,
        )

    def _hidden(self, batch: ForwardBatch, plan: Plan, part: FixedRows | None = None) -> Tensor:
        """Final hidden states [N, hidden] of all rows, in their places if they are a part; their KV is written."""
        token_ids, positions = batch.token_ids, batch.positions
        if part is not None:
            token_ids, positions = part.spread(token_ids), part.spread(positions)
        token_ids, positions, slots = (to_device(rows, self._device) for rows in (token_ids, positions, batch.slots))
        return self._states(token_ids, positions, self._step(self._pool, slots, plan, part))

    def _states(self, token_ids: Tensor, positions: Tensor, step: _Step) -> Tensor:
        with torch.inference_mode():
            embedded = self._model.get_input_embeddings()(token_ids).to(self._dtype)
            return self._decoder(embedded, positions, step.attend)

    def _compute(self, inputs: GraphInputs) -> Tensor:
        """Logits of all rows, by launches alone: nothing of them is decided on the host."""
        step = _Step(self._pool, inputs.slots, self._plan_graph(inputs.rows), None)
        return self._logits(self._states(inputs.token_ids, inputs.positions, step))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] -> [L, vocab_size], in float32 or wider."""
        # Outside inference mode: the logits are an ordinary tensor, which the caller may change in place.
        with torch.no_grad():
            logits: Tensor = self._model.get_output_embeddings()(hidden)[:, : self.vocab_size]
            return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _planner(device: torch.device, deterministic: bool) -> Callable[..., Plan]:
    """How attention is computed on a device: by the kernel on CUDA, in plain torch elsewhere.

    Raises EngineError where a row's attention depends on the batch and must not.
    """
    if device.type != "cuda":
        return partial(plan_attention, max_rows=1) if deterministic else plan_attention
    if deterministic:
        raise EngineError(
            "speculation.deterministic is set, but on CUDA the attention kernel shares its work out by what is in the "
            "batch. Take the key out, or run the target on the CPU."
        )
    from saguaro.plugins.triton_lang import plan_kernel  # the language comes with torch's CUDA builds only

    return plan_kernel


def _graph_planner(device: torch.device) -> Callable[[RowTensors], Plan]:
    """How a graph computes attention: by what its rows' tensors hold when it is replayed."""
    from saguaro.plugins.triton_lang import plan_tensors

    return partial(plan_tensors, device=device)


def _mask(batch: ForwardBatch) -> Tensor | FanOutMask:
    return batch.positions if batch.fan_out is None else batch.fan_out


def memory_needed(
    directory: Path,
    manifest: Manifest,
    *,
    block_size: int,
    num_blocks: int,
    rank: int = 0,
    device: torch.device = _CPU,
    graphs: bool = True,
) -> int:
    """Bytes a rank of an engine directory takes on the device for weights, KV blocks and, on CUDA, what graphs share.

    Mapped weights take memory only as they are first used; the pool must leave room for them, widened or not. What a
    forward works with, captured or not, is not counted.
    """
    config = load_config(directory, manifest.max_model_len)
    if manifest.tp > 1:
        config = share_of(config, manifest.tp)
    stored, computed = _STORED[manifest.dtype], _computed(manifest.dtype, device)
    widening = 1 if manifest.dtype in QUANTISED else computed.itemsize // stored.itemsize
    weights = (directory / weights_file(rank, manifest.tp)).stat().st_size * widening
    captured = device.type == "cuda" and graphs and manifest.tp == 1
    pool = (num_blocks + captured) * kv_bytes_per_block(config, block_size, computed)
    if not captured:
        return weights + pool
    logits = torch.promote_types(computed, torch.float32)
    return weights + pool + buffer_bytes(manifest.vocab_size, manifest.max_model_len, block_size, num_blocks, logits)


def _computed(dtype: str, device: torch.device) -> torch.dtype:
    """What a manifest's dtype is computed in: emulated bfloat16 would be slower than float32, and coarser."""
    if device.type == "cuda":
        return _STORED[dtype]
    native = dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def convert(model: Any, dtype: Dtype, device: torch.device = _CPU) -> None:
    """Give a model on the device, as it is stored, the layers that a manifest's dtype is computed with, in place.

    Raises EngineError where their kernel cannot be compiled, or cannot hold the weights.
    """
    if dtype in QUANTISED:
        compute_in_float32(model, partial(quantise_linears, bits=QUANTISED[dtype]))
    elif _computed(dtype, device) != _STORED[dtype]:
        compute_in_float32(model, pack_linears)


def compute_in_float32(model: Any, replace_linears: Callable[[Any], None]) -> None:
    """Give a model on the CPU float32 activations and other linear layers, in place.

    Raises EngineError where the kernel of those layers cannot be compiled, or cannot hold the weights.
    """
    replace_linears(model)
    embeddings = model.get_input_embeddings()  # keep their dtype: only the rows looked up are converted
    for module in model.modules():
        if module is not embeddings:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
