"""A deployment: which models, how they speculate, what they may use. Read from one YAML, never changed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal

from saguaro.engines.schema import load_yaml, nearest, parse
from saguaro.errors import ConfigError
from saguaro.orchestrator import fan_out_policy
from saguaro.orchestrator.estimators import Estimators, Prior
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Lists, MissCurve
from saguaro.orchestrator.measured_fan_out import MeasuredFanOut
from saguaro.orchestrator.presets import Preset, filled_in
from saguaro.orchestrator.types import TEXT_BACKUPS, Auto, Backup, Mode, Rule, Setting, TextBackup
from saguaro.plugins.fan_out import FanOut

MAX_LOOKAHEAD = 32
MAX_BUDGET = 512
MAX_REPLICAS = 64
_AUTO_LOOKAHEADS = tuple(range(1, 17))
_AUTO_BUDGETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
_AUTO_BACKUPS: tuple[Backup, ...] = ("primary", "defer", "suffix", "ngram", "none")


def _check(valid: bool, key: str, value: object, limit: str) -> None:
    """For `__post_init__`; the reader adds the file and the section."""
    if not valid:
        raise ConfigError(f"{key} must be {limit}, got {value}")


@dataclass(frozen=True)
class ExecutorConfig:
    """How TensorRT-LLM's Executor is run: of engines `trtllm` alone."""

    memory_fraction: float = 0.9  # of a GPU's free memory, which KV may take at most
    timeout_s: float = 30.0  # for a round; then the target group is started again
    reuse: bool = True  # of KV between rounds and requests; off for diagnosis: every round computes its whole context

    def __post_init__(self) -> None:
        _check(0 < self.memory_fraction <= 1, "memory_fraction", self.memory_fraction, "above 0 and at most 1")
        _check(self.timeout_s > 0, "timeout_s", self.timeout_s, "above 0 seconds")


@dataclass(frozen=True)
class ModelConfig:
    """One model and what its process group may use."""

    recipe: str  # name of a shipped recipe, or a path relative to the deployment file
    threads: int = 1  # of each rank
    # Shared out over the ranks. None: the first free cores of this machine, `threads` for each rank
    cores: tuple[int, ...] | None = None
    # GPUs as nvidia-smi counts them, one for each share of the model, or `auto`. None: `auto` for an engine that is
    # compiled for GPUs; the CPU for `pytorch`
    devices: tuple[int, ...] | Literal["auto"] | None = None
    cuda_graphs: bool = True  # of the engine `pytorch` on a GPU; off for diagnosis
    kv_tokens: int = 16384
    block_size: int = 16
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)

    def __post_init__(self) -> None:
        _check(self.threads >= 1, "threads", self.threads, "at least 1")
        _check(self.cores is None or len(self.cores) > 0, "cores", self.cores, "left out, or name at least one core")
        if isinstance(self.devices, tuple):
            good = len(self.devices) > 0 and min(self.devices) >= 0 and len(set(self.devices)) == len(self.devices)
            _check(good, "devices", list(self.devices), "left out, `auto`, or name GPUs, each once")
        _check(1 <= self.block_size <= 1024, "block_size", self.block_size, "between 1 and 1024")
        _check(self.kv_tokens >= self.block_size, "kv_tokens", self.kv_tokens, f"at least a block ({self.block_size})")

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.kv_tokens // self.block_size


@dataclass(frozen=True)
class DraftConfig(ModelConfig):
    """The draft. `replicas` of it, each on a device of its own, share the branches; `cores` are shared out over all."""

    replicas: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(1 <= self.replicas <= MAX_REPLICAS, "replicas", self.replicas, f"between 1 and {MAX_REPLICAS}")


@dataclass(frozen=True)
class FanOutConfig:
    """How `budget` branches are spread over the acceptance lengths of a speculation.

    `uniform`: evenly. `geometric`: the best list for the acceptance and miss curve stated here (Theorem 12, with a
    curve of its own for the row where everything is accepted).
    `auto`: starts from that list and follows what is measured. Or a hand-written list F_0 … F_K in `counts`. The budget
    `auto` is the largest whose branches are done before the verification is.
    `ranked`: anew in every round, the outcomes that the draft itself holds for the likeliest. Neither an outcome nor a
    further token of a branch is prepared that is needed with less than `least_probability`. Where the draft cannot say
    (`ratio` at temperature > 0) it is `geometric`.
    """

    budget: int | Auto = 8
    counts: tuple[int, ...] | None = None
    counts_after_miss: tuple[int, ...] | None = None  # None: the same list
    policy: Literal["uniform", "geometric", "auto", "ranked"] | None = (
        None  # None: the list in `counts`, or else `auto`
    )
    least_probability: float = 0.02  # with `ranked`: of an outcome, or of a drafted token to be needed; 0 is off
    acceptance: float = 0.8  # of a draft token
    acceptance_after_miss: float | None = None  # of the backup's tokens; None: what is usual for that backup
    miss_scale: float = 0.4  # c of the miss curve c F^-r after a rejection
    miss_exponent: float = 0.6  # r

    def __post_init__(self) -> None:
        fits = self.budget == "auto" or 0 <= self.budget <= MAX_BUDGET
        _check(fits, "budget", self.budget, f"`auto`, or between 0 and {MAX_BUDGET} branches")
        _check(self.budget != "auto" or self.counts is None, "budget", self.budget, "a number beside `counts`")
        for name in ("counts", "counts_after_miss"):
            counts = getattr(self, name)
            if counts is not None:
                _check(min(counts, default=-1) >= 0, name, list(counts), "a list of numbers of 0 or more")
                _check(sum(counts) <= MAX_BUDGET, name, list(counts), f"at most {MAX_BUDGET} in all")
        _check(self.counts is None or self.policy is None, "policy", self.policy, "left out beside `counts`")
        _check(
            self.counts_after_miss is None or self.counts is not None,
            "counts_after_miss",
            self.counts_after_miss,
            "left out without `counts`",
        )
        _check(0 <= self.least_probability < 1, "least_probability", self.least_probability, "0 (off) or below 1")
        _check(0 <= self.acceptance <= 1, "acceptance", self.acceptance, "between 0 and 1")
        after_miss = self.acceptance_after_miss
        _check(after_miss is None or 0 <= after_miss <= 1, "acceptance_after_miss", after_miss, "between 0 and 1")
        _check(0 < self.miss_scale <= 1, "miss_scale", self.miss_scale, "above 0 and at most 1")
        _check(0 < self.miss_exponent <= 10, "miss_exponent", self.miss_exponent, "above 0 and at most 10")

    @property
    def ranked_from(self) -> float | None:
        """The least probability of what is prepared; None: lists are followed."""
        return self.least_probability if self.policy == "ranked" else None

    @property
    def written(self) -> Callable[[int, bool], FanOut] | None:
        """The hand-written list by lookahead, after a hit or not; None without one."""
        if self.counts is None:
            return None
        lists = {True: self.counts, False: self.counts_after_miss or self.counts}
        return lambda lookahead, hit: fan_out_policy.fixed(lists[hit], lookahead)


@dataclass(frozen=True)
class SpeculationConfig:
    preset: Preset | None = None  # the reader of a file has put what it stands for into the keys left out
    mode: Mode | Auto = "ssd"  # `auto`: whichever is measured to emit most per second
    lookahead: int | Auto = 4
    fan_out: FanOutConfig = field(default_factory=FanOutConfig)
    rule: Rule = "coupled"
    backup: Backup | Auto = "primary"  # what drafts after a miss
    min_confidence: float = 0.0  # a speculation ends where the draft's best token is less probable than this; 0 is off
    width: int = 64  # candidates per draft row at temperature > 0; under `ratio` the support of q
    cache_aware: float = 1.0  # C of σ_{F,C} (paper, 4.2.1); 1 is off
    deterministic: bool = False  # the target's logits depend neither on K nor on what else is in the batch
    deadline_ms: int = 5000  # how long a round waits for the draft before it goes on without

    def __post_init__(self) -> None:
        fits = self.lookahead == "auto" or 1 <= self.lookahead <= MAX_LOOKAHEAD
        _check(fits, "lookahead", self.lookahead, f"`auto`, or between 1 and {MAX_LOOKAHEAD}")
        # A longer speculation repeats F_0 in front, which is the same list only if that is 0.
        written = (*(self.fan_out.counts or ())[:1], *(self.fan_out.counts_after_miss or ())[:1])
        _check(
            self.lookahead != "auto" or not any(written),
            "lookahead",
            self.lookahead,
            "a number beside `fan_out.counts`, unless that begins with 0",
        )
        _check(0 <= self.min_confidence < 1, "min_confidence", self.min_confidence, "0 (off) or below 1")
        _check(1 <= self.width <= 1024, "width", self.width, "between 1 and 1024")
        _check(0 < self.cache_aware <= 1, "cache_aware", self.cache_aware, "above 0 and at most 1 (off)")
        _check(self.deadline_ms >= 1, "deadline_ms", self.deadline_ms, "at least 1")

    @property
    def limit(self) -> Mode:
        """The most that a request may ask for."""
        return "ssd" if self.mode == "auto" else self.mode

    @property
    def adaptive(self) -> bool:
        """Whether anything is chosen by what is measured."""
        return "auto" in (self.mode, self.lookahead, self.fan_out.budget, self.backup)

    @property
    def lookaheads(self) -> tuple[int, ...]:
        """Those that rounds may have."""
        return _AUTO_LOOKAHEADS if self.lookahead == "auto" else (self.lookahead,)

    @property
    def max_lookahead(self) -> int:
        return max(self.lookaheads)

    def budgets(self, most: int = MAX_BUDGET, present: int = 1, replicas: int = 1) -> tuple[int, ...]:
        """The branches ΣF_k that may be prepared for one sequence, in rising order, while `present` replicas are there.

        `auto` takes `most` at most. A number is what all of them prepare: while some are away the others do no more
        than before. Nor is a hand-written list cut.
        """
        lists = [counts for counts in (self.fan_out.counts, self.fan_out.counts_after_miss) if counts]
        if lists:
            return (max(fan_out_policy.fixed(counts, self.max_lookahead).branches for counts in lists),)
        if self.fan_out.budget == "auto":
            budgets = {*_AUTO_BUDGETS, *(present * budget for budget in _AUTO_BUDGETS)}
            return tuple(sorted(budget for budget in budgets if budget <= min(max(1, most), MAX_BUDGET)))
        budget = self.fan_out.budget
        return (max(1, budget * present // replicas) if budget else 0,)

    @property
    def backups(self) -> tuple[Backup, ...]:
        """Those that may draft after a miss."""
        return _AUTO_BACKUPS if self.backup == "auto" else (self.backup,)

    def prior_after(self, backup: Backup) -> float:
        """Acceptance of a backup's tokens before anything is measured."""
        fan_out = self.fan_out
        if fan_out.acceptance_after_miss is not None:
            return fan_out.acceptance_after_miss
        return _BACKUP_ACCEPTANCE.get(backup, fan_out.acceptance)

    @property
    def from_text_alone(self) -> TextBackup | None:
        """What drafts everything, from the text: the draft model has nothing to do and is not loaded. None: it has."""
        return next((name for name in TEXT_BACKUPS if self.mode == "sd" and self.backup == name), None)

    @property
    def prior(self) -> Prior:
        """What the policies `geometric` and `auto` assume before anything is measured."""
        fan_out = self.fan_out
        curve = MissCurve(fan_out.miss_scale, fan_out.miss_exponent)
        return Prior(fan_out.acceptance, self.prior_after(self.backups[0]), curve)

    def policy(self, estimators: Estimators) -> FanOutPolicy:
        """The policy a speculator follows; `auto` learns from `estimators`."""
        fan_out, prior = self.fan_out, self.prior
        if fan_out.counts is not None:
            return Lists(_written(fan_out.counts), _written(fan_out.counts_after_miss or fan_out.counts))
        if fan_out.policy == "uniform":
            return Lists(fan_out_policy.uniform)
        geometric = Lists(_geometric(prior.acceptance, prior), _geometric(prior.acceptance_after_miss, prior))
        return geometric if fan_out.policy in ("geometric", "ranked") else MeasuredFanOut(estimators, geometric)


# Acceptance of a backup's tokens on mixed text, before anything is measured; `primary` has the draft's own.
_BACKUP_ACCEPTANCE: dict[Backup, float] = {"ngram": 0.4, "suffix": 0.4, "random": 0.0, "none": 0.0}


def _written(counts: tuple[int, ...]) -> fan_out_policy.Shape:
    """Budget 0 means no branches (plain speculation), whatever the list says."""
    return lambda budget, lookahead: (
        fan_out_policy.fixed(counts, lookahead) if budget else FanOut((0,) * (lookahead + 1))
    )


def _geometric(acceptance: float, prior: Prior) -> fan_out_policy.Shape:
    return lambda budget, lookahead: fan_out_policy.geometric(
        budget, lookahead, acceptance, prior.rejected, prior.accepted
    )


@dataclass(frozen=True)
class ServingConfig:
    max_sequences: int = 8
    max_batch_tokens: int = 256  # of a round: running sequences first, then chunks of prompts, at least one block's
    max_queue: int = 1024  # requests that may wait beside those that run; one more is refused at once
    start_timeout_s: int = 300
    max_restarts: int = 3  # of each part in a row, with growing pauses
    grace_s: float = 30.0  # how long running requests may take to finish when the deployment is told to stop
    host: str = "127.0.0.1"  # address the ports below are bound to
    http_port: int = 8000  # Triton's HTTP; of every port, 0 takes a free one
    grpc_port: int = 8001  # Triton's gRPC
    triton_metrics_port: int = 8002
    monitor_port: int = 8003  # health and metrics of the deployment
    openai_port: int = 8080
    api_key_file: str | None = None  # of the OpenAI front end: one key per line; left out, no key is asked for

    def __post_init__(self) -> None:
        _check(self.max_sequences >= 1, "max_sequences", self.max_sequences, "at least 1")
        _check(self.max_batch_tokens >= 1, "max_batch_tokens", self.max_batch_tokens, "at least 1")
        _check(self.max_queue >= 0, "max_queue", self.max_queue, "at least 0")
        _check(self.start_timeout_s >= 1, "start_timeout_s", self.start_timeout_s, "at least 1")
        _check(self.max_restarts >= 0, "max_restarts", self.max_restarts, "0 or more")
        _check(self.grace_s >= 0, "grace_s", self.grace_s, "0 or more seconds")
        for name in ("http_port", "grpc_port", "triton_metrics_port", "monitor_port", "openai_port"):
            _check(0 <= getattr(self, name) <= 65535, name, getattr(self, name), "between 0 (any free port) and 65535")


@dataclass(frozen=True)
class DeploymentConfig:
    name: str
    target: ModelConfig
    draft: DraftConfig | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)

    def __post_init__(self) -> None:
        mode = self.speculation.mode
        _check(mode == "ar" or self.draft is not None, "speculation.mode", mode, "`ar` without a `draft:` section")

    @property
    def replicas(self) -> int:
        """Of the draft, as many as are to run."""
        return self.draft.replicas if self.draft and self.speculation.mode != "ar" else 0

    def fixed(self, setting: Setting) -> DeploymentConfig:
        """With this setting, and nothing left to be chosen."""
        fan_out = self.speculation.fan_out
        if fan_out.budget == "auto":
            fan_out = replace(fan_out, budget=setting.budget)
        chosen = replace(
            self.speculation,
            preset=None,
            mode=setting.mode,
            lookahead=setting.lookahead,
            fan_out=fan_out,
            backup=setting.backup,
        )
        return replace(self, speculation=chosen)

    @property
    def max_budget(self) -> int:
        """The most branches of a sequence at a replica with `budget: auto`: half of its KV pool holds those of all."""
        if self.draft is None:
            return 0
        return self.draft.kv_tokens // (2 * self.serving.max_sequences * self.speculation.max_lookahead)


def shipped_deployments() -> list[str]:
    """Names of the deployments that come with the package."""
    files = resources.files("saguaro.deployments").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml"))


def find_deployment(name_or_path: str) -> Path:
    """A YAML file, or the name of a shipped deployment. Raises ConfigError naming the nearest."""
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise ConfigError(f"deployment file {path} does not exist")
    if name_or_path in shipped_deployments():
        return Path(str(resources.files("saguaro.deployments") / f"{name_or_path}.yaml"))
    raise ConfigError(
        f"there is no deployment named {name_or_path!r}{nearest(name_or_path, shipped_deployments())}; "
        f"shipped: {', '.join(shipped_deployments())}; or give the path of a .yaml file"
    )


def read_deployment(path: Path) -> DeploymentConfig:
    """Raises ConfigError naming file and key."""
    return parse(filled_in(load_yaml(path)), DeploymentConfig, str(path))
