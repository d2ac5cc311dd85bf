"""What a rank of a deployment does: `python -m saguaro.orchestrator.rank ROLE RUNTIME`, started by `launch`.

Rank 0 of a group has the role; the others run their share of its model's forwards. A rank ends when its service is told
to, when its peer (speculator) or its leader (follower) is gone for good, or when rank 0's standard input closes, which
means that whoever launched it is gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from saguaro.engines import load_engine
from saguaro.engines.base import Engine
from saguaro.engines.manifest import TOKENIZER, Manifest
from saguaro.engines.tensor_parallel import TensorParallel, follow
from saguaro.errors import LaunchError, LinkError, ProtocolError, SaguaroError
from saguaro.orchestrator.channels import mpi
from saguaro.orchestrator.config import ModelConfig
from saguaro.orchestrator.draft_link import DraftLink
from saguaro.orchestrator.drafters.backups import backup_drafter
from saguaro.orchestrator.drafters.model import ModelDrafter
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.grammar import Grammars
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.plan import LOG_FORMAT, LaunchPlan, rendezvous, service_socket, sign_of_life
from saguaro.orchestrator.protocol import Hello
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.speculator import Speculator
from saguaro.orchestrator.target import EngineTarget

_log = logging.getLogger(__name__)


def run_target(plan: LaunchPlan, runtime: Path, engine: Engine) -> None:
    """The leader: rank 0 of the target group."""
    config = plan.config
    manifest = Manifest.load(Path(plan.groups["target"].engine))
    listeners = [mpi.Listener(runtime, role) for role in plan.drafts]
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
        EngineTarget(engine, config.speculation.rule),
        BlockPool(draft.num_blocks, draft.block_size),
        manifest.eos_token_ids,
        service_socket(runtime),
        links,
        Tokenizer.from_file(str(Path(plan.groups["target"].engine) / TOKENIZER)),
        _grammars(Path(plan.groups["target"].engine)),
    ).run()


def run_draft(plan: LaunchPlan, runtime: Path, engine: Engine, role: str) -> None:
    """A speculator: rank 0 of a draft group."""
    config = plan.config
    part = plan.groups[role]
    speculation = config.speculation
    hello = Hello(
        token_map_sha256=Manifest.load(Path(part.engine)).token_map_sha256,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
    )
    estimators = Estimators(speculation.prior)
    policy = speculation.policy(estimators)
    drafter = ModelDrafter(
        engine,
        speculation.rule,
        policy,
        width=speculation.width,
        cache_aware=speculation.cache_aware,
        grammars=_grammars(Path(part.engine)),
    )
    backup = backup_drafter(speculation.backup, drafter, speculation.rule, _ordinary_tokens(part.engine))
    channel = mpi.connect(runtime, config.serving.start_timeout_s, role)
    try:
        Speculator(
            drafter,
            channel,
            policy,
            hello,
            backup=backup,
            defer=speculation.backup == "defer",
            estimators=estimators,
            replica=plan.drafts.index(role),
            replicas=len(plan.drafts),
        ).run()
    finally:
        channel.close()


def run(role: str, plan: LaunchPlan, runtime: Path, rank: int, ranks: int) -> None:
    """Load this rank's engine, then lead or follow."""
    part = plan.groups[role]
    os.sched_setaffinity(0, part.cores_of(rank))
    torch.set_num_threads(part.model.threads)
    group = TensorParallel(rank, ranks, rendezvous(runtime, role), torch.device("cpu")) if ranks > 1 else None
    engine = load_engine(
        Path(part.engine),
        block_size=part.model.block_size,
        num_blocks=part.model.num_blocks,
        group=group,
        deterministic=role == "target" and plan.config.speculation.deterministic,
    )
    if group:
        group.wait_for_all()
    if group and not group.leads:
        follow(engine, group)
        return
    if role == "target":
        run_target(plan, runtime, engine)
    else:
        run_draft(plan, runtime, engine, role)
    if group:
        group.stop()


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
