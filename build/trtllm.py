"""An engine directory for TensorRT-LLM: run the plan's steps, check what came out, add tokenizer and manifest.

config.json, rank0.engine, ...               as TensorRT-LLM wrote them: its Executor loads the directory as it is
generation_config.json, tokenizer.json, ...  as the weights came with
manifest.json                                last: its presence means the directory is complete

A converted checkpoint (`STORE/steps`) stays, so that another recipe for it need not convert it again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

import saguaro
from saguaro.build.gpu_memory import CARDS
from saguaro.build.model_shape import ARCHITECTURES, read_shape
from saguaro.build.plan import Plan, Step
from saguaro.build.plan_text import build_config
from saguaro.build.recipe import Recipe, TrtllmOptions
from saguaro.build.steps import run_step
from saguaro.build.store import locked, require_space, size_text
from saguaro.build.trtllm_plan import plan_trtllm
from saguaro.build.weights import open_weights
from saguaro.engines.manifest import FORMAT, FileRecord, Manifest, file_sha256, token_map, token_map_digest
from saguaro.engines.trtllm_config import VERSION, TrtllmEngineConfig, check_version, read_trtllm_config
from saguaro.errors import EngineError, ModelError

log = logging.getLogger(__name__)

# TensorRT-LLM's example folder in NVIDIA's images: Triton with TensorRT-LLM, and TensorRT-LLM's own release.
EXAMPLES: Final = (Path("/app/examples"), Path("/app/tensorrt_llm/examples"))
_PACKAGES: Final = ("tensorrt_llm", "tensorrt", "torch", "nvidia-modelopt")


def build_trtllm(recipe: Recipe, source: Path, staging: Path, store: Path, source_sha256: str) -> Path:
    """Build the recipe from the model folder `source` into the empty folder `staging`; takes hours.

    Returns a folder to be removed when `staging` has its name: until then it keeps a second build from compiling again.

    Raises EngineError where TensorRT-LLM 1.2.1 or its GPU is missing, when a step fails, or when the engine is not what
    was planned; ModelError, ConfigError, CapacityError as the plan does.
    """
    check_version()
    if source.is_file():
        raise ModelError(f"{source}: is a GGUF file; TensorRT-LLM builds from safetensors. Name the model's folder.")
    weights = open_weights(source)
    plan = plan_trtllm(recipe, read_shape(source))
    capability = _check_gpu(recipe)
    made: dict[str, Path] = {}
    for step, key in zip(plan.steps, step_keys(plan, source_sha256)):
        folder = store / "steps" / key
        with locked(store, key):
            _run(plan, step, folder, source, made, store, capability)
        made[step.makes] = folder
    _check_engine(plan, made["ENGINE"])
    for file in sorted(made["ENGINE"].iterdir()):
        # A second name for the same bytes.
        (staging / file.name).hardlink_to(file)
    weights.write_tokenizer(staging)
    (staging / "generation_config.json").write_text(json.dumps(weights.generation, indent=2) + "\n", encoding="utf-8")
    _write_manifest(plan, staging, source_sha256, weights.generation["eos_token_id"], capability)
    log.info("the converted weights stay in %s (%s)", made["CHECKPOINT"], size_text(_size(made["CHECKPOINT"])))
    return made["ENGINE"]


def step_keys(plan: Plan, source_sha256: str) -> list[str]:
    """Names of the folders the steps make: equal exactly when weights, commands and version are."""
    keys, text = [], f"{VERSION} {source_sha256}"
    for step in plan.steps:
        text = hashlib.sha256(json.dumps([text, _lasting(step.command)]).encode()).hexdigest()
        keys.append(
            f"{plan.recipe.name}-{step.name}-{text[:12]}" if step.makes == "ENGINE" else f"{step.name}-{text[:12]}"
        )
    return keys


def _lasting(command: Sequence[str]) -> list[str]:
    """The command without what changes nothing in the result."""
    words = list(command)
    for option in ("--workers", "--log_level"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    return words


def expected_config(plan: Plan, architecture: str) -> TrtllmEngineConfig:
    """What config.json is to say of an engine built by the plan."""
    shape, options = plan.shape, plan.recipe.trtllm or TrtllmOptions()
    fields = build_config(plan.settings)
    fp8 = "FP8" if plan.recipe.dtype == "fp8" else None
    return TrtllmEngineConfig(
        architecture=architecture if architecture in _architectures(shape.family) else ARCHITECTURES[shape.family],
        dtype="bfloat16",
        logits_dtype="float32",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_size=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_position_embeddings,
        position_embedding_type="rope_gpt_neox",
        rotary_base=shape.rope_theta,
        rotary_type=shape.rope_type,
        rotary_factor=shape.rope_factor,
        norm_epsilon=shape.norm_epsilon,
        hidden_act="silu",
        tp_size=plan.recipe.tp,
        quant_algo=fp8,
        kv_cache_quant_algo="FP8" if (options.kv_dtype or plan.recipe.dtype) == "fp8" else None,
        max_batch_size=options.max_batch_size,
        max_num_tokens=fields["max_num_tokens"],
        max_seq_len=plan.max_model_len + options.max_draft_len,
        max_beam_width=1,
        max_draft_len=options.max_draft_len,
        speculative_decoding_mode=fields.get("speculative_decoding_mode", "none"),
        gather_generation_logits=options.gather_generation_logits,
        kv_cache_type="paged",
        tokens_per_block=options.tokens_per_block,
        use_paged_context_fmha=True,
        paged_kv_cache=True,
        remove_input_padding=True,
    )


def _architectures(family: str) -> tuple[str, ...]:
    # The calibration tool names all Qwen models alike.
    return (ARCHITECTURES[family], "QWenForCausalLM") if family.startswith("qwen") else (ARCHITECTURES[family],)


def _check_gpu(recipe: Recipe) -> str:
    """The GPUs' compute capability. Raises EngineError when there is none, or another than the recipe plans for."""
    if not torch.cuda.is_available():
        raise EngineError("engines are compiled on the GPUs they are for, and CUDA finds none here.")
    found = "{}.{}".format(*torch.cuda.get_device_capability())
    options = recipe.trtllm or TrtllmOptions()
    if found != CARDS[options.gpu].capability:
        raise EngineError(
            f"recipe {recipe.name}: trtllm.gpu is {options.gpu}, of compute capability "
            f"{CARDS[options.gpu].capability}; this machine's GPU has {found}, and an engine runs only on the kind of "
            f"GPU it was compiled on. Change trtllm.gpu, one of {', '.join(CARDS)}."
        )
    return found


def _run(
    plan: Plan, step: Step, folder: Path, source: Path, made: dict[str, Path], store: Path, capability: str
) -> None:
    if not folder.exists():
        ours = sum(file.bytes for file in plan.files if file.made == step.makes) * plan.recipe.tp
        require_space(store, ours, f"the step {step.name} of {plan.recipe.name}")
    cache = store / "timing" / f"{plan.recipe.name}-sm{capability.replace('.', '')}.cache"
    cache.parent.mkdir(parents=True, exist_ok=True)
    variables = {
        "MODEL": str(source),
        "PYTHON": sys.executable,
        "TIMING_CACHE": str(cache),
        "EXAMPLES": str(_examples() if any("$EXAMPLES" in word for word in step.command) else ""),
        **{name: str(path) for name, path in made.items()},
    }
    run_step(step, variables, folder, store / "logs" / f"{folder.name}.log")
    for file in plan.files:
        for rank in range(plan.recipe.tp) if file.made == step.makes else ():
            path = folder / file.name.format(rank)
            if not path.is_file() or path.stat().st_size == 0:
                shutil.rmtree(folder)
                raise EngineError(
                    f"the step {step.name} ended well but made no {path.name}; see {store / 'logs' / folder.name}.log."
                )


def _examples() -> Path:
    for folder in EXAMPLES:
        if folder.is_dir():
            return folder
    raise EngineError(
        f"TensorRT-LLM's example folder, whose scripts convert checkpoints, is in none of "
        f"{', '.join(map(str, EXAMPLES))}. Build in NVIDIA's image, or put the examples of version {VERSION} there."
    )


def _check_engine(plan: Plan, folder: Path) -> None:
    try:
        found = read_trtllm_config(folder)
    except EngineError as error:
        raise EngineError(f"{error} Delete {folder} first.") from error
    differences = found.differences(expected_config(plan, found.architecture))
    if differences:
        raise EngineError(
            f"{folder}: the engine is not what recipe {plan.recipe.name} asks for: {'; '.join(differences)}. Delete "
            "the folder, and build again when the reason is found."
        )


def _write_manifest(plan: Plan, staging: Path, source_sha256: str, eos: Sequence[int], capability: str) -> None:
    recipe = plan.recipe
    tokens = token_map(staging)
    if max(tokens) >= plan.shape.vocab_size:
        raise ModelError(
            f"recipe {recipe.name}: the tokenizer has ids up to {max(tokens)}, but the model has "
            f"{plan.shape.vocab_size} rows; they do not belong together."
        )
    Manifest(
        format=FORMAT,
        recipe=recipe.name,
        recipe_hash=recipe.digest(source_sha256),
        engine="trtllm",
        model=str(recipe.model),
        source_sha256=source_sha256,
        family=plan.shape.family,
        dtype=recipe.dtype,
        tp=recipe.tp,
        vocab_size=max(tokens) + 1,
        max_model_len=plan.max_model_len,
        eos_token_ids=tuple(eos),
        token_map_sha256=token_map_digest(tokens),
        device=capability,
        shards={},  # TensorRT-LLM's own affair
        versions={"saguaro": saguaro.__version__, **_versions()},
        files={file.name: FileRecord(file.stat().st_size, file_sha256(file)) for file in sorted(staging.iterdir())},
    ).write(staging)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
