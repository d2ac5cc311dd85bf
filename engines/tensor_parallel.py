"""Tensor parallelism: one model on several ranks, each with its share of the heads, feed-forward rows and vocabulary.

Rank 0 leads: it alone is asked for forwards, sends every batch to the followers and gets the logits. Followers compute
the same batch with their shares and decide nothing, so that rounding can never make ranks go different ways.

A layer that is split by its inputs gives a part of a sum on every rank: `all_reduce` adds the parts up. The output head
is split by token ids: `gather` brings the logits together on rank 0. Collectives are NCCL's on CUDA and gloo's on the
CPU; batches always go through gloo, whose waiting followers sleep in a socket.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from saguaro.engines.base import Engine, ForwardBatch
from saguaro.engines.kv_pool import head_dim
from saguaro.errors import LinkError
from saguaro.plugins.fan_out_mask import FanOutMask

_TIMEOUT = timedelta(seconds=120)  # of meeting, and of collectives within a forward: there, ranks are never far apart
_IDLE = timedelta(days=3650)  # followers wait for a batch as long as there is none; a dead leader ends the wait at once
_CAUSAL_PARTS, _PARTS = 7, 13  # tensors of a batch on its way, without and with a fan-out mask


class TensorParallel:
    """This process's place among `size` ranks that run one model, and their collectives.

    The ranks meet through the file `rendezvous`, which must not exist before the first of them comes. All raise
    LinkError when a rank is gone or hangs.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        backend = "nccl" if device.type == "cuda" else "gloo"
        with self._naming("meeting the other ranks"):
            meeting = rendezvous.absolute().as_uri()
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=_TIMEOUT)
            self._batches = dist.new_group(backend="gloo", timeout=_IDLE)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Return when every rank has called this; loading may take them as long as it does."""
        with self._naming("waiting for every rank to load"):
            dist.barrier(group=self._batches)

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        with self._naming("adding up a layer"):
            dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """On rank 0 all ranks' parts [..., n], equally large, as [..., size * n]; elsewhere the part itself."""
        if part.numel() == 0:
            return part.repeat_interleave(self.size, dim=-1)
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.leads else None
        with self._naming("gathering logits"):
            dist.gather(part, parts, dst=0)
        return part if parts is None else torch.cat(parts, dim=-1)

    def send(self, batch: ForwardBatch) -> None:
        """From rank 0 to every follower."""
        header, payload = pack_batch(batch)
        with self._naming("sending a batch"):
            dist.broadcast(header, 0, group=self._batches)
            dist.broadcast(payload, 0, group=self._batches)

    def stop(self) -> None:
        """Tell the followers that nothing more will come."""
        with self._naming("stopping"):
            dist.broadcast(torch.zeros(_PARTS, dtype=torch.int64), 0, group=self._batches)

    def receive(self) -> ForwardBatch | None:
        """What rank 0 sends next, None for the end. Waits without a limit and without work, while rank 0 lives."""
        header = torch.empty(_PARTS, dtype=torch.int64)
        with self._naming("waiting for a batch"):
            dist.broadcast(header, 0, group=self._batches)
            if not header.any():
                return None
            payload = torch.empty(int(header.sum()), dtype=torch.int64)
            dist.broadcast(payload, 0, group=self._batches)
        return unpack_batch(header, payload)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise for peers that are gone and for time-outs
            raise LinkError(
                f"{what}: rank {self.rank} of {self.size} lost another rank of its tensor-parallel group ({error}). "
                "The group has to be started again."
            ) from error


def follow(engine: Engine, group: TensorParallel) -> None:
    """What a follower does: run the leader's batches until it says stop."""
    while (batch := group.receive()) is not None:
        engine.forward(batch)


# Shares of a model ----------------------------------------------------------------------------------------------------


def share_of(config: Any, tp: int) -> Any:
    """The configuration of one rank's share of a model; with fewer KV heads than ranks, each rank has one of them.

    That heads and rows can be shared evenly has been checked when the model was built.
    """
    share = copy.deepcopy(config)
    share.head_dim = head_dim(config)
    share.num_attention_heads //= tp
    share.num_key_value_heads = max(1, config.num_key_value_heads // tp)
    share.intermediate_size //= tp
    return share


def join_shares(model: Any, shards: Mapping[str, str], group: TensorParallel) -> None:
    """Make one rank's share of a model compute the whole model's logits, in place, before its layers are converted.

    `shards` is the manifest's: how each module was split. Embedding and head are whole in the weights; of the head a
    rank keeps its rows alone, so that the others, being mapped, never take memory.
    """
    patterns = [pattern for pattern, rule in shards.items() if rule == "rowwise"]
    for name, module in list(model.named_modules()):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _RowwiseLinear(module, group))
    model.set_output_embeddings(_VocabularyHead(model.get_output_embeddings(), group))


class _RowwiseLinear(nn.Module):
    """A linear layer split by its inputs: [..., in / tp] -> [..., out]. Rank 0 has the bias, the others zeros."""

    def __init__(self, share: nn.Module, group: TensorParallel) -> None:
        super().__init__()
        self.share = share
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self.share(x))


class _VocabularyHead(nn.Module):
    """An output head split by token ids: [L, hidden] -> [L, vocabulary], padded, on rank 0; a part of it elsewhere."""

    def __init__(self, head: nn.Linear, group: TensorParallel) -> None:
        super().__init__()
        self._width = -(-head.weight.shape[0] // group.size)
        rows = head.weight[group.rank * self._width : (group.rank + 1) * self._width].detach()
        self.share = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.share.weight = nn.Parameter(rows, requires_grad=False)
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.share(hidden)
        return self._group.gather(functional.pad(logits, (0, self._width - logits.shape[-1])))


# Batches on their way -------------------------------------------------------------------------------------------------


def pack_batch(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Sizes of the parts [13] (those of the mask 0 without one), and all parts one after another, as int64."""
    parts = [
        batch.token_ids,
        batch.positions,
        batch.slots,
        torch.tensor(batch.rows, dtype=torch.int64),
        torch.tensor([len(table) for table in batch.block_tables], dtype=torch.int64),
        torch.tensor(list(itertools.chain.from_iterable(batch.block_tables)), dtype=torch.int64),
        batch.logit_rows,
    ]
    if (mask := batch.fan_out) is not None:
        depth = torch.tensor([mask.depth])
        parts += [mask.prefix, mask.trunk, mask.branches, mask.fork, mask.branch, depth]
    sizes = [len(part) for part in parts] + [0] * (_PARTS - len(parts))
    return torch.tensor(sizes), torch.cat([part.cpu() for part in parts])


def unpack_batch(header: Tensor, payload: Tensor) -> ForwardBatch:
    """The inverse of `pack_batch`."""
    parts = payload.split(header.tolist())
    token_ids, positions, slots, rows, lengths, blocks, logit_rows = parts[:_CAUSAL_PARTS]
    prefix, trunk, branches, fork, branch, depth = parts[_CAUSAL_PARTS:]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        rows=tuple(rows.tolist()),
        block_tables=tuple(tuple(table.tolist()) for table in blocks.split(lengths.tolist())),
        fan_out=FanOutMask(prefix, trunk, branches, rows, fork, branch, int(depth)) if len(depth) else None,
        logit_rows=logit_rows,
    )
