"""What a rank of a deployment does: `python -m saguaro.orchestrator.rank ROLE RUNTIME`, started by `launch`.

Rank 0 of a group has the role; the others run their share of its model's forwards. A rank ends when its service is told
to, when its peer (speculator) or its leader (follower) is gone for good, or when rank 0's standard input closes, which
means that whoever launched it is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer

from saguaro.engines import load_engine
from saguaro.engines.base import Engine
from saguaro.engines.manifest import TOKENIZER, Manifest
from saguaro.engines.tensor_parallel import TensorParallel, follow
from saguaro.engines.trtllm_config import read_trtllm_config
from saguaro.errors import EngineError, LaunchError, LinkError, ProtocolError, SaguaroError
from saguaro.orchestrator.calibration import measure
from saguaro.orchestrator.channels import mpi, unix
from saguaro.orchestrator.config import ModelConfig
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.drafters.backups import Primary, backup_drafter
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.drafters.nothing import NoDrafter
from saguaro.orchestrator.drafters.shadows import Shadows
from saguaro.orchestrator.drafters.text import TextDrafter
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import FanOutPolicy
from saguaro.orchestrator.grammar import Grammars
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.plan import LOG_FORMAT, GroupPlan, LaunchPlan, rendezvous, service_socket, sign_of_life
from saguaro.orchestrator.protocol import Hello, Step
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.target import EngineTarget, Target
from saguaro.orchestrator.types import Backup

_log = logging.getLogger(__name__)


def run_target(plan: LaunchPlan, runtime: Path, target: Target, steps: tuple[Step, ...] = ()) -> None:
    """The leader: rank 0 of the target group. `steps` were measured of its model."""
    config = plan.config
    manifest = Manifest.load(Path(plan.groups["target"].engine))
    listeners = [_joining(plan).Listener(runtime, role) for role in plan.drafts]
    draft = config.draft or config.target

    def links() -> tuple[int, DraftLink] | None:
        """A speculator that has just connected and fits. One that does not is a warning, not the end of serving."""
        for replica, listener in enumerate(listeners):
            channel = listener.poll()
            if channel is None:
                continue
            try:
                link = DraftLink(channel, deployment=plan.deployment, timeout=config.speculation.deadline_ms / 1e3)
                _check_hello(link.hello, manifest, draft)
                return replica, link
            except (LinkError, ProtocolError, LaunchError) as error:
                _log.warning("refused a draft: %s", error)
                channel.close()
        return None

    Service(
        config,
        target,
        BlockPool(draft.num_blocks, draft.block_size),
        manifest.eos_token_ids,
        service_socket(runtime),
        links,
        Tokenizer.from_file(str(Path(plan.groups["target"].engine) / TOKENIZER)),
        _grammars(Path(plan.groups["target"].engine)),
        steps,
    ).run()


def run_draft(
    plan: LaunchPlan,
    runtime: Path,
    role: str,
    max_model_len: int,
    primary: Callable[[FanOutPolicy, Grammars, Timeline], Primary],
    steps: tuple[Step, ...] = (),
) -> None:
    """A speculator: rank 0 of a draft group. `primary` makes its drafter; `steps` were measured of its model."""
    config, part = plan.config, plan.groups[role]
    speculation = config.speculation
    manifest = Manifest.load(Path(part.engine))
    hello = Hello(
        token_map_sha256=manifest.token_map_sha256,
        vocab_size=manifest.vocab_size,
        max_model_len=max_model_len,
        num_blocks=part.model.num_blocks,
        block_size=part.model.block_size,
        steps=steps,
    )
    timeline = Timeline()
    estimators = Estimators(speculation.prior)
    policy = speculation.policy(estimators)
    drafter = primary(policy, _grammars(Path(part.engine)), timeline)
    tokens = _ordinary_tokens(part.engine)
    backups = {name: backup_drafter(name, drafter, speculation.rule, tokens) for name in speculation.backups}
    text: dict[Backup, TextDrafter] = {
        name: backup for name, backup in backups.items() if isinstance(backup, TextDrafter) and name != "none"
    }
    channel = _joining(plan).connect(runtime, config.serving.start_timeout_s, role)
    try:
        Speculator(
            drafter,
            channel,
            policy,
            hello,
            backup=backups[speculation.backups[0]],
            others=backups,
            shadows=Shadows(text, drafter.memory) if speculation.backup == "auto" else None,
            timeline=timeline,
            estimators=estimators,
            replica=plan.drafts.index(role),
            replicas=len(plan.drafts),
        ).run()
    finally:
        channel.close()


def run(role: str, plan: LaunchPlan, runtime: Path, rank: int, ranks: int) -> None:
    """Load this rank's engine, then lead or follow."""
    part = plan.groups[role]
    os.sched_setaffinity(0, part.members[rank].cores)
    torch.set_num_threads(part.model.threads)
    if role in plan.drafts and plan.config.speculation.from_text_alone:
        memory = TokenMemory(part.model.num_blocks, part.model.block_size)
        length = Manifest.load(Path(part.engine)).max_model_len
        run_draft(plan, runtime, role, length, lambda policy, grammars, timeline: NoDrafter(memory))
        return
    if Manifest.load(Path(part.engine)).engine == "trtllm":
        run_executor(role, plan, runtime, rank)
        return
    device = _device(part, rank)
    group = TensorParallel(rank, ranks, rendezvous(runtime, role), device) if ranks > 1 else None
    # What is imported and loaded from here on lives as long as the process. To look through it again and again takes a
    # tenth of the start, and later on each look would hold up a round.
    gc.disable()
    options: dict[str, Any] = {"device": device} if device.type == "cuda" else {}
    engine = load_engine(
        Path(part.engine),
        block_size=part.model.block_size,
        num_blocks=part.model.num_blocks,
        group=group,
        deterministic=role == "target" and plan.config.speculation.deterministic,
        graphs=part.model.cuda_graphs,
        **options,
    )
    gc.freeze()
    gc.enable()
    if group:
        group.wait_for_all()
    if group and not group.leads:
        follow(engine, group)
        return
    _lead(role, plan, runtime, engine)
    if group:
        group.stop()


def _device(part: GroupPlan, rank: int) -> torch.device:
    """The rank's. Raises EngineError when this PyTorch cannot use the GPU the rank was given."""
    ordinal = part.ordinal(rank)
    if ordinal is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError(
            f"the rank was given GPU {part.members[rank].device}, but PyTorch {torch.__version__} finds none: install "
            "its build for CUDA, and look at `saguaro doctor`"
        )
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)


def _joining(plan: LaunchPlan) -> ModuleType:
    """What joins the two groups: `Listener` and `connect` of it."""
    return {"mpi": mpi, "unix": unix}[plan.channel]


def _lead(role: str, plan: LaunchPlan, runtime: Path, engine: Engine) -> None:
    speculation = plan.config.speculation
    steps = measure(engine) if speculation.adaptive else ()
    if role == "target":
        run_target(plan, runtime, EngineTarget(engine, speculation.rule), steps)
        return

    def primary(policy: FanOutPolicy, grammars: Grammars, timeline: Timeline) -> ModelDrafter:
        return ModelDrafter(
            engine,
            speculation.rule,
            policy,
            width=speculation.width,
            cache_aware=speculation.cache_aware,
            min_confidence=speculation.min_confidence,
            least_probability=speculation.fan_out.ranked_from,
            timeline=timeline,
            grammars=grammars,
        )

    run_draft(plan, runtime, role, engine.max_model_len, primary, steps)


def run_executor(role: str, plan: LaunchPlan, runtime: Path, rank: int) -> None:
    """A rank of a group whose engine is TensorRT-LLM's: rank 0 leads and has no GPU, the others hold a share each."""
    # These need TensorRT-LLM.
    from saguaro.engines.trtllm import ExecutorSession, Options, work
    from saguaro.orchestrator.drafters import stock
    from saguaro.orchestrator.executor_target import ExecutorTarget, check_deployment

    model, directory = plan.groups[role].model, Path(plan.groups[role].engine)
    options = Options(
        kv_tokens=model.kv_tokens,
        memory_fraction=model.executor.memory_fraction,
        reuse=model.executor.reuse,
        timeout_s=model.executor.timeout_s,
        start_timeout_s=plan.config.serving.start_timeout_s,
    )
    if role == "target":
        check_deployment(plan.config, read_trtllm_config(directory))
    else:
        stock.check_deployment(plan.config)
    if rank > 0:
        work(directory, options, rank)
        return
    vocab_size = Manifest.load(directory).vocab_size
    session = ExecutorSession(directory, vocab_size=vocab_size, options=options, target=role == "target")
    try:
        if role == "target":
            run_target(plan, runtime, ExecutorTarget(session))
        else:
            drafter = stock.ExecutorDrafter(session, model.num_blocks, model.block_size)
            run_draft(plan, runtime, role, session.engine.max_model_len, lambda _policy, _grammars, _timeline: drafter)
    finally:
        session.close()


def _grammars(engine: Path) -> Grammars:
    manifest = Manifest.load(engine)
    return Grammars(engine / TOKENIZER, manifest.vocab_size, manifest.eos_token_ids)


def _ordinary_tokens(engine: str) -> list[int]:
    """Every token id of the tokenizer that stands for text."""
    tokenizer = Tokenizer.from_file(str(Path(engine) / TOKENIZER))
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return sorted(set(tokenizer.get_vocab().values()) - special)


def _check_hello(hello: Hello, target: Manifest, draft: ModelConfig) -> None:
    """Raises LaunchError when the speculator cannot serve this target."""
    if hello.token_map_sha256 != target.token_map_sha256:
        raise LaunchError("its token ids are not the target's: build both engines with the same tokenizer")
    if (hello.num_blocks, hello.block_size) != (draft.num_blocks, draft.block_size):
        raise LaunchError(f"its KV pool ({hello.num_blocks} blocks of {hello.block_size}) is not the deployment's")


def _check_size(found: int, started: int) -> None:
    """Raises LaunchError when MPI does not know of the other ranks: each then takes itself for a job of its own."""
    if found != started:
        raise LaunchError(
            f"MPI says that its job has {found} ranks, but {started} were started: mpi4py loads {mpi.library()}, and "
            "the `mpiexec` beside the interpreter or first on PATH is another one's. Install mpi4py for that MPI, or "
            "put the MPI of mpi4py first on PATH"
        )


def _leave_with_launcher(plan: LaunchPlan, runtime: Path) -> None:
    """Wait for the end of standard input, then leave; if the launcher is gone, take its runtime directory along."""
    sys.stdin.buffer.read()
    # A process that dies closes its files first: give it a moment to be gone before taking it for alive.
    deadline = time.monotonic() + 2
    while (alive := _is_alive(plan.launcher)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if not alive:
        shutil.rmtree(runtime, ignore_errors=True)
    mpi.leave(1)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to take note of its end does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def main() -> None:
    role, runtime = sys.argv[1], Path(sys.argv[2])
    rank, ranks = mpi.place()
    log_format = LOG_FORMAT if ranks == 1 else LOG_FORMAT.replace("%(message)s", f"rank {rank}: %(message)s")
    logging.basicConfig(format=log_format, level=os.environ.get("SAGUARO_LOG_LEVEL", "WARNING"))
    mpi.remove_shared_memory()
    plan = LaunchPlan.read(runtime)
    if rank == 0:  # MPI gives nobody else the launcher's standard input
        threading.Thread(target=_leave_with_launcher, args=(plan, runtime), daemon=True).start()
    try:
        _check_size(ranks, plan.groups[role].ranks)
        # Closed by the end of this process alone. Without waiting, because a launcher that is gone does not read.
        os.open(sign_of_life(runtime, role, rank), os.O_WRONLY | os.O_NONBLOCK)
        run(role, plan, runtime, rank, ranks)
    except SaguaroError as error:
        _log.error("%s", error)
        mpi.leave(1)
    except Exception:  # the edge of the process: MPI must not be left waiting for an unwinding interpreter
        _log.exception("the %s failed", role)
        mpi.leave(1)
    mpi.leave(0)


if __name__ == "__main__":
    main()
