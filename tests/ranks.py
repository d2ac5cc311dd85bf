"""Ranks of a tensor-parallel group as processes of a test: in a module of its own, so that they can import it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import replays
from harness import Pair
from saguaro.build.shards import ShardPlan
from saguaro.engines.base import Engine, ForwardBatch, ForwardOutput, causal_batch, fan_out_batch
from saguaro.engines.manifest import Dtype
from saguaro.engines.pytorch import PytorchEngine, convert
from saguaro.engines.tensor_parallel import TensorParallel, follow, join_shares, share_of
from saguaro.errors import EngineError, LinkError
from saguaro.orchestrator.types import SamplingParams
from saguaro.plugins.fan_out import FanOut
from tiny_models import tiny_model

BLOCK, BLOCKS, VOCAB, MAX_LEN = 4, 40, 500, 128
LOST, SPUN = 17, 18  # exit statuses: lost the leader and said so, or kept a core busy until then


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        # A vocabulary that four ranks cannot share evenly.
        shape = {"num_attention_heads": 8, "hidden_size": 128, "vocab_size": 510}
        return tiny_model(self.family, self.dtype, **(shape | self.options))


_PRELOAD = ["saguaro.engines.pytorch", *(f"transformers.models.{f}.modeling_{f}" for f in ("llama", "qwen2", "qwen3"))]
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-4-kv-heads": ("qwen3", {"num_key_value_heads": 4}),
}
CASES = [
    Case(f"{name}-{str(dtype).removeprefix('torch.')}", family, dtype, options)
    for name, (family, options) in _OPTIONS.items()
    for dtype in (torch.float32, torch.float64)
]


def run(size: int, work: Callable[[int, int, Path], None], folder: Path) -> list[int | None]:
    """`work(rank, size, folder)` on `size` processes; their exit statuses."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # the imports take seconds, and this way only once
    processes = [context.Process(target=work, args=(rank, size, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    return [process.exitcode for process in processes]


def meet(rank: int, size: int, folder: Path) -> TensorParallel:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return TensorParallel(rank, size, folder / "meeting", torch.device("cpu"))


def compute(rank: int, size: int, folder: Path) -> None:
    """Every case's logits, as rank 0 gets them, into `logits.pt`, and each rank's KV heads into `heads-RANK.pt`."""
    group = meet(rank, size, folder)
    logits: dict[str, list[Tensor]] = {}
    heads: dict[str, int] = {}
    for case in CASES:
        engine = _engine(_share(case.model(), group), group)
        heads[case.name] = engine._pool.keys[0].shape[2]
        group.wait_for_all()
        if group.leads:
            logits[case.name] = scenario(engine)
            group.stop()
        else:
            follow(engine, group)
    torch.save(heads, folder / f"heads-{rank}.pt")
    if group.leads:
        torch.save(logits, folder / "logits.pt")


def alone(case: Case) -> list[Tensor]:
    """The same, by the whole model on this process."""
    return scenario(_engine(case.model(), None))


def compute_engine(rank: int, size: int, folder: Path) -> None:
    """The logits of the engine directory in the folder, split over the ranks, into `logits.pt`."""
    group = meet(rank, size, folder)
    engine = PytorchEngine.load(folder / "engine", block_size=BLOCK, num_blocks=BLOCKS, group=group)
    group.wait_for_all()
    if not group.leads:
        follow(engine, group)
        return
    torch.save(scenario(engine), folder / "logits.pt")
    group.stop()


def of_directory(directory: Path) -> list[Tensor]:
    """The same, by one process, of a directory that is not split."""
    return scenario(PytorchEngine.load(directory, block_size=BLOCK, num_blocks=BLOCKS))


def lose_the_leader(rank: int, size: int, folder: Path) -> None:
    """The leader is idle for a while and then gone; the others exit with what they noticed."""
    group = meet(rank, size, folder)
    group.wait_for_all()
    if group.leads:
        time.sleep(1.5)
        os._exit(1)
    begin = time.process_time()
    try:
        group.receive()
    except LinkError as error:
        named = f"rank {rank} of {size} lost another rank" in str(error)
        os._exit(LOST if named and time.process_time() - begin < 0.7 else SPUN)


def scenario(engine: Engine) -> list[Tensor]:
    """Prefill, decoding, branches and a refused batch over two sequences; the logits of all of it."""
    tables = [list(range(20, 40)), list(range(3, 20))]
    first = [[(7 * i + 3) % VOCAB for i in range(19)], [(11 * i + 5) % VOCAB for i in range(8)]]
    outputs = [engine.forward(causal_batch(first, [0, 0], tables, [6, 1], BLOCK)).logits]
    outputs.append(engine.forward(causal_batch([[1], [2, 3]], [19, 8], tables, [1, 2], BLOCK)).logits)
    try:
        engine.forward(causal_batch([[1]], [MAX_LEN], [list(range(33))], [1], BLOCK))
    except EngineError:
        outputs.append(engine.forward(causal_batch([[4]], [10], tables[1:], [0], BLOCK)).logits)
    fan_outs = [FanOut((2, 0, 1)), FanOut((1, 3))]
    for depth in range(3):
        tokens = torch.arange(7) * 31 + depth
        outputs.append(engine.forward(fan_out_batch(tokens, fan_outs, [17, 8], tables, depth, BLOCK)).logits)
    return outputs


def _engine(model: Any, group: TensorParallel | None) -> PytorchEngine:
    return PytorchEngine(
        model, vocab_size=VOCAB, max_model_len=MAX_LEN, block_size=BLOCK, num_blocks=BLOCKS, group=group
    )


def _share(whole: Any, group: TensorParallel) -> Any:
    plan = ShardPlan(whole.config, group.size)
    share = type(whole)(share_of(whole.config, group.size))
    tensors = dict(whole.named_parameters())
    for name, parameter in share.named_parameters():
        parameter.data = plan.split(name).cut(tensors[name].data, group.rank, group.size).contiguous()
    share.tie_weights()
    share.eval().requires_grad_(False)
    join_shares(share, plan.rules, group)
    return share


def compute_deterministic(rank: int, size: int, folder: Path, *, dtype: Dtype) -> None:
    """What a deterministic group computed differently in some company than alone, into `different.pt`."""
    group = meet(rank, size, folder)
    share = _share(Case("", "qwen2", torch.float32, {"intermediate_size": 256}).model(), group)
    convert(share, dtype)
    engine = PytorchEngine(
        share,
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        block_size=replays.BLOCK,
        num_blocks=replays.BLOCKS,
        group=group,
        deterministic=True,
    )
    group.wait_for_all()
    if not group.leads:
        follow(engine, group)
        return
    alone = replays.one_by_one(engine, 3)
    company = replays.in_company(engine, lookaheads=(6,), sizes=(3,))
    torch.save([what for what, i, logits in company if not torch.equal(logits, alone[i])], folder / "different.pt")
    group.stop()


class _Noisy(torch.nn.Module):
    """An output head whose every logit is 1e-6 off, up and down in turns."""

    def __init__(self, head: torch.nn.Module, sign: int) -> None:
        super().__init__()
        self._head = head
        self._noise = 1e-6 * sign

    def forward(self, hidden: Tensor) -> Tensor:
        self._noise = -self._noise
        return self._head(hidden) + self._noise  # type: ignore[no-any-return]


def tie_with_noise(rank: int, size: int, folder: Path) -> None:
    """Greedy decoding where the best token of one rank's half always ties with one of the other's, but for noise.

    Writes what each rank ran, and what it would have chosen itself, into `ran-RANK.pt`; rank 0's tokens beside it.
    """
    group = meet(rank, size, folder)
    whole = Case("", "qwen2", torch.float64).model()
    with torch.no_grad():
        whole.lm_head.weight[255:] = whole.lm_head.weight[:255]
    engine = _engine(_share(whole, group), group)
    head = engine._model.get_output_embeddings()
    head.share = _Noisy(head.share, 1 if rank == 0 else -1)
    ran: list[tuple[list[int], list[int], list[int]]] = []
    chosen: list[int] = []
    forward = engine.forward

    def recorded(batch: ForwardBatch) -> ForwardOutput:
        ran.append((batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist()))
        output = forward(batch)
        # A follower sees its own half alone.
        chosen.extend((output.logits.argmax(-1) + 255 * rank).tolist())
        return output

    engine.forward = recorded  # type: ignore[method-assign]
    group.wait_for_all()
    tokens: list[int] = []
    if group.leads:
        draft = PytorchEngine(whole, vocab_size=VOCAB, max_model_len=MAX_LEN, block_size=BLOCK, num_blocks=200)
        pair = Pair(engine, draft, lookahead=4, budget=5)
        params = SamplingParams(temperature=0, max_tokens=30)
        tokens = pair.finish([pair.sequence([1, 2, 3], params), pair.sequence([4], params)])[0]
        group.stop()
    else:
        follow(engine, group)
    torch.save((ran, chosen, tokens), folder / f"ran-{rank}.pt")
