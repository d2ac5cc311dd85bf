"""Whether a deployment can run here: its engines, where its ranks would go, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from saguaro.build.driver import engine_directory, plan
from saguaro.build.recipe import Recipe
from saguaro.doctor import gpus
from saguaro.doctor.machine import installed
from saguaro.doctor.report import Check, size
from saguaro.engines.kv_pool import available_memory
from saguaro.engines.manifest import QUANTISED, EngineName, Manifest, check_target, compare_token_maps
from saguaro.errors import ConfigError, ModelError, SaguaroError
from saguaro.llm import find_recipes
from saguaro.orchestrator.config import DeploymentConfig, DraftConfig, ModelConfig
from saguaro.orchestrator.nvml import GpuNode
from saguaro.orchestrator.placement import Demand, place, replica_of
from saguaro.orchestrator.plan import GroupPlan, draft_roles
from saguaro.plugins.cpp import find_compiler

# What CUDA and NCCL take of a GPU that PyTorch computes on; nobody has measured it here.
_OVERHEAD = int(1.5 * 2**30)
# What an engine needs beside this package, as (package, version it begins with).
_NEEDS: Mapping[EngineName, tuple[tuple[str, str], ...]] = {
    "pytorch": (("torch", ""),),
    "trtllm": (("tensorrt_llm", "1.2.1"), ("tensorrt", "10.14.")),
    "tensorrt": (("tensorrt", "10.14."),),
    "simulated": (),
}


@dataclass(frozen=True)
class Part:
    """One model of a deployment: what its recipe says, and its engine if it is built."""

    model: ModelConfig
    recipe: Recipe
    store: Path
    directory: Path | None  # None: where it will be is not known before its model is pulled
    manifest: Manifest | None  # None: not built

    @property
    def demand(self) -> Demand:
        directory = str(self.directory) if self.manifest else ""
        return Demand(self.model, self.recipe.engine, self.recipe.tp, directory)

    @property
    def memory(self) -> int | None:
        """Bytes each rank takes for weights, `kv_tokens` of KV and, on a GPU, all else; None: not known yet.

        What TensorRT-LLM and TensorRT take is known from the plan of the build, in part as an estimate.
        """
        if self.recipe.engine in ("trtllm", "tensorrt"):
            try:
                memory = plan(self.recipe, self.store).memory
            except (ConfigError, ModelError):  # of a model that is neither known nor here
                return None
            return memory.fixed + self.model.kv_tokens * memory.kv_token_bytes
        if self.manifest is None or self.directory is None or self.manifest.engine == "simulated":
            return None
        from saguaro.engines.pytorch import memory_needed  # late: it takes seconds to import

        device = torch.device("cuda" if self.demand.on_gpus else "cpu")
        needed = memory_needed(
            self.directory,
            self.manifest,
            block_size=self.model.block_size,
            num_blocks=self.model.num_blocks,
            device=device,
            graphs=self.model.cuda_graphs,
        )
        return needed + _OVERHEAD * self.demand.on_gpus


def parts_of(config: DeploymentConfig, path: Path, store: Path) -> dict[str, Part]:
    """By role. Raises ConfigError for a recipe that cannot be read."""
    models = {"target": config.target} | ({"draft": config.draft} if config.draft else {})
    return {role: _part(models[role], recipe, store) for role, recipe in find_recipes(config, path).items()}


def _part(model: ModelConfig, recipe: Recipe, store: Path) -> Part:
    try:
        directory = engine_directory(recipe, store)
    except ModelError:
        return Part(model, recipe, store, None, None)
    try:
        return Part(model, recipe, store, directory, Manifest.load(directory))
    except SaguaroError:
        return Part(model, recipe, store, directory, None)


def engines(parts: Mapping[str, Part]) -> list[Check]:
    """Built or not, for what, and whether what they need is installed."""
    checks = []
    for role, part in parts.items():
        checks += [_engine(role, part), *_packages(role, part.recipe.engine), *_compiler(role, part.recipe)]
    built = [part.directory for part in parts.values() if part.manifest and part.directory]
    if len(built) == 2:
        try:
            compare_token_maps(*built)
            checks.append(Check("token ids", "ok", "target and draft mean the same by each"))
        except SaguaroError as error:
            checks.append(Check("token ids", "problem", str(error)))
    return checks


def _engine(role: str, part: Part) -> Check:
    what = f"{part.recipe.name} ({part.recipe.engine}{f', tp {part.recipe.tp}' if part.recipe.tp > 1 else ''})"
    if role == "target" and part.directory is not None and part.manifest is not None:
        try:
            check_target(part.directory)
        except SaguaroError as error:
            return Check(f"{role} engine", "problem", str(error))
    if part.manifest is not None:
        return Check(f"{role} engine", "ok", f"{what} is built in {part.directory}")
    return Check(f"{role} engine", "warning", f"{what} is not built", f"saguaro build {part.model.recipe}")


def _packages(role: str, engine: EngineName) -> list[Check]:
    checks = []
    for package, wanted in _NEEDS[engine]:
        found = installed(package)
        if found is None or not found.startswith(wanted):
            text = f"needs {package} {wanted.rstrip('.')}, {f'{found} is' if found else 'which is not'} installed"
            remedy = "use NVIDIA's Triton image 26.04 to 26.07 (docs/deployment/containers.md)"
            checks.append(Check(f"{role} package", "problem", text, remedy))
    return checks


def _compiler(role: str, recipe: Recipe) -> list[Check]:
    if recipe.dtype not in QUANTISED or find_compiler() is not None:
        return []
    text = f"{recipe.name} is in {recipe.dtype}, which needs a C++ compiler"
    remedy = "apt-get install g++, or name one in $CXX; or take a recipe in bfloat16"
    return [Check(f"{role} compiler", "problem", text, remedy)]


def placement(parts: Mapping[str, Part], node: GpuNode | None) -> list[Check]:
    """Where each rank would go, and whether it fits there."""
    parts = dict(_groups(parts))
    demands = {role: part.demand for role, part in parts.items()}
    on_gpus = {role for role, demand in demands.items() if demand.on_gpus}
    if on_gpus and node is None:
        return [Check("placement", "problem", "no GPU can be used", "run it on a machine with GPUs; see GPUs above")]
    cores = sorted(os.sched_getaffinity(0))
    try:
        plans = place(demands, cores, node, os.environ.get("CUDA_VISIBLE_DEVICES"))
        memory = {role: part.memory for role, part in parts.items()}
    except SaguaroError as error:
        return [Check("placement", "problem", str(error))]
    checks = [_ranks(role, plan) for role, plan in plans.items()]
    if on_gpus and node is not None:
        checks += gpus.assigned(
            node,
            {role: demand for role, demand in demands.items() if role in on_gpus},
            {role: plan for role, plan in plans.items() if role in on_gpus},
            {role: memory[role] for role in on_gpus},
            {role: manifest.device if (manifest := parts[role].manifest) else "any" for role in on_gpus},
        )
    on_cpu = {role: part for role, part in parts.items() if role not in on_gpus}
    return checks + _fits_cpu(on_cpu, plans, memory, cores)


def _groups(parts: Mapping[str, Part]) -> Iterator[tuple[str, Part]]:
    """A part for each group of ranks: the target, and every replica of the draft."""
    for role, part in parts.items():
        if isinstance(part.model, DraftConfig):
            for replica, name in enumerate(draft_roles(part.model.replicas)):
                yield name, replace(part, model=replica_of(part.model, replica))
        else:
            yield role, part


def _ranks(role: str, plan: GroupPlan) -> Check:
    members = [
        f"rank {rank} {f'GPU {member.device}' if member.device is not None else 'leads' if plan.devices else 'CPU'}"
        f" on cores {_ranges(member.cores)}"
        for rank, member in enumerate(plan.members)
    ]
    return Check(f"{role} ranks", "ok", "; ".join(members))


def _ranges(numbers: tuple[int, ...]) -> str:
    """Like the kernel's lists: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _fits_cpu(
    parts: Mapping[str, Part], plans: Mapping[str, GroupPlan], memory: Mapping[str, int | None], cores: list[int]
) -> list[Check]:
    checks = []
    wanted = sum(part.model.threads * plans[role].ranks for role, part in parts.items())
    if wanted > len(cores):
        text = f"the groups on the CPU want {wanted} cores, {len(cores)} may be used"
        checks.append(Check("cores", "warning", text, "they share them and slow each other down: lower threads or tp"))
    needs = {role: (memory[role], plans[role].ranks) for role in parts}
    known = {role: need * ranks for role, (need, ranks) in needs.items() if need is not None}
    if parts and len(known) == len(needs):
        available = available_memory(torch.device("cpu"))
        text = f"{' + '.join(f'{size(need)} for the {role}' for role, need in known.items())} needed, "
        text += f"{size(available)} can be taken"
        fits = sum(known.values()) <= available
        remedy = "" if fits else "lower kv_tokens in the deployment, choose smaller models, or free some memory"
        checks.append(Check("memory", "ok" if fits else "problem", text, remedy))
    return checks
