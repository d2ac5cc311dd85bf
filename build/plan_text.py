"""A plan for people and for programs."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Iterable
from typing import Any

from saguaro.build.gpu_memory import GIB, POOL_SHARE, MemoryPlan
from saguaro.build.plan import Plan, Setting

_GB = 10**9
_WIDTH = 120


def plan_text(plan: Plan) -> str:
    """Commands, settings with reasons, files, and the memory of a GPU, as text of at most 120 columns or so."""
    recipe, shape = plan.recipe, plan.shape
    ranks = f"{recipe.tp} rank{'s' if recipe.tp > 1 else ''}"
    lines = [
        f"{recipe.name}: {recipe.model} for {recipe.engine}, {recipe.dtype}, {ranks}, {plan.max_model_len} tokens",
        f"  {shape.family}, {shape.parameters / 1e9:.2f} billion parameters: {shape.layers} layers, hidden "
        f"{shape.hidden_size}, {shape.heads} heads on {shape.kv_heads} KV heads of {shape.head_dim}, intermediate "
        f"{shape.intermediate_size}, vocabulary {shape.vocab_size}" + (", tied head" if shape.tied else ""),
    ]
    for number, step in enumerate(plan.steps, 1):
        lines += ["", f"{number}. {step.name}: {step.reason}", *_command(step.command)]
    if recipe.engine == "trtllm":
        lines += [
            "",
            f"MODEL is the folder of {recipe.model}, EXAMPLES TensorRT-LLM's example folder (/app/examples in NVIDIA's "
            "Triton",
            "image), PYTHON its Python; the other folders are chosen when it is built.",
        ]
    lines += ["", "Settings (reason, where the value is not the default)"]
    lines += _columns((_name(setting), _value(setting), setting.reason or "default") for setting in plan.settings)
    lines += ["", "Files"]
    lines += _columns(
        (f"${file.made}/{file.name.format('RANK')}", f"{recipe.tp} x {file.bytes / _GB:.2f} GB") for file in plan.files
    )
    lines += [
        f"  {plan.disk_bytes / _GB:.0f} GB of disk together, up to {plan.host_bytes / _GB:.0f} GB of main memory while "
        "building (estimate)",
        "",
        *_memory(plan.memory),
    ]
    if plan.warnings:
        lines += ["", "Note", *_columns((warning,) for warning in plan.warnings)]
    return "\n".join(lines)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The same for programs, bytes unrounded."""
    memory = plan.memory
    return {
        "recipe": dataclasses.asdict(plan.recipe),
        "shape": dataclasses.asdict(plan.shape),
        "max_model_len": plan.max_model_len,
        "steps": [dataclasses.asdict(step) for step in plan.steps],
        "settings": [dataclasses.asdict(setting) for setting in plan.settings],
        "build_config": build_config(plan.settings),
        "files": [dataclasses.asdict(file) for file in plan.files],
        "disk_bytes": plan.disk_bytes,
        "host_bytes": plan.host_bytes,
        "memory": dataclasses.asdict(memory)
        | {"fixed": memory.fixed, "pool": memory.pool, "pool_tokens": memory.pool_tokens},
        "warnings": list(plan.warnings),
    }


def build_config(settings: Iterable[Setting]) -> dict[str, Any]:
    """The settings as fields of TensorRT-LLM's BuildConfig, the plugins' in `plugin_config`."""
    fields: dict[str, Any] = {}
    for setting in settings:
        if setting.field is not None:
            section, _, name = setting.field.rpartition(".")
            (fields.setdefault(section, {}) if section else fields)[name] = setting.value
    return fields


def _command(command: tuple[str, ...]) -> list[str]:
    """One option a line, as a shell takes it; variables are left for it to fill in."""
    lines: list[str] = []
    for word in command:
        quoted = word if re.fullmatch(r"\$[\w/.]+", word) else shlex.quote(word)
        if word.startswith("--"):
            lines.append(f"       {quoted}")
        elif lines:
            lines[-1] += f" {quoted}"
        else:
            lines.append(f"   {quoted}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _name(setting: Setting) -> str:
    return setting.field or setting.flag


def _value(setting: Setting) -> str:
    return str(setting.value).lower() if isinstance(setting.value, bool) else str(setting.value)


def _memory(memory: MemoryPlan) -> list[str]:
    card = memory.card
    rows = [
        (item.name, _gib(item.bytes), ("estimate: " if item.estimate else "") + item.formula) for item in memory.items
    ]
    rows.append(("together", _gib(memory.fixed), f"of {card.usable / GIB:.1f} GiB"))
    rows.append(
        (
            "KV pool",
            _gib(memory.pool),
            f"{POOL_SHARE:.0%} of the rest: {memory.pool_tokens} tokens in blocks of {memory.tokens_per_block}, "
            f"{memory.kv_token_bytes} B a token",
        )
    )
    rows.append(
        (
            "KV wanted",
            _gib(memory.wanted_tokens * memory.kv_token_bytes),
            f"{memory.wanted_tokens} tokens: every sequence at full length",
        )
    )
    return [f"Memory of each GPU: {card.name}, {card.usable / GIB:.1f} GiB usable", *_columns(rows)]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / GIB * 1024:.2f} MiB"


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    lines = []
    for row in table:
        start = "".join(f"  {cell.ljust(width)}" for cell, width in zip(row, widths)) + "  "
        lines += textwrap.wrap(start + row[-1], _WIDTH, subsequent_indent=" " * len(start), drop_whitespace=True)
    return lines
