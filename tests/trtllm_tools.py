"""TensorRT-LLM 1.2.1's command lines, from tests/golden/trtllm_contract.json, and programs that stand in for them.

`parser` takes what the real program takes and nothing else. A stand-in parses its arguments with it, and reads and
writes the folders the real one would, with the changes the real one makes; weights and engines are a few bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

CONTRACT = json.loads((Path(__file__).parent / "golden" / "trtllm_contract.json").read_text())
SCRIPTS = {
    "models/core/llama/convert_checkpoint.py": "convert_checkpoint.py (llama)",
    "models/core/qwen/convert_checkpoint.py": "convert_checkpoint.py (qwen)",
    "quantization/quantize.py": "quantize.py",
}


class Refused(Exception):
    """The arguments are not those of the program."""


@functools.cache
def parser(program: str) -> argparse.ArgumentParser:
    """The parser of one program. The real ones take abbreviations too; ours are to be spelt in full."""

    class Strict(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise Refused(message)

    made = Strict(program, allow_abbrev=False)
    for name, flag in CONTRACT["cli"][program]["flags"].items():
        default = None if isinstance(flag["default"], dict) else flag["default"]
        options: dict[str, Any] = {"default": default}
        if flag.get("action") == "store_true":
            options["action"] = "store_true"
        else:
            kinds = {"int": int, "float": float, "list": str, "str": str}
            options["type"] = kinds[flag.get("type", "str")]
            if flag.get("type") == "list":
                options["nargs"] = "+"
            if "choices" in flag:
                options["choices"] = flag["choices"]
        made.add_argument(name, *([flag["alias"]] if "alias" in flag else []), **options)
    return made


def program_of(command: tuple[str, ...]) -> tuple[str, list[str]]:
    """A step's command as the contract's name of the program, and its arguments."""
    if command[0] == "$PYTHON":
        return SCRIPTS[command[1].removeprefix("$EXAMPLES/")], list(command[2:])
    return command[0], list(command[1:])


def install(folder: Path) -> tuple[Path, Path]:
    """Put the stand-ins into `folder`: a folder for PATH, and TensorRT-LLM's example folder.

    They note their calls in `folder`/calls.txt, and do what `folder`/behaviour.json says under their name: print
    `says`, `sleep` seconds, end by signal `kill` or with `status`, make `nothing`, or `change` config.json.
    """
    programs, examples = folder / "bin", folder / "examples"
    paths = {"trtllm-build": programs / "trtllm-build"} | {name: examples / path for path, name in SCRIPTS.items()}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import trtllm_tools\ntrtllm_tools.stand_in({name!r}, {str(folder)!r}, sys.argv[1:])\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return programs, examples


# The stand-ins ----------------------------------------------------------------------------------------------------


def convert(given: argparse.Namespace, *, fp8: bool) -> None:
    """A checkpoint: TensorRT-LLM's config.json, and a file for each rank."""
    model = json.loads((Path(given.model_dir) / "config.json").read_text())
    rope = model.get("rope_parameters") or {}
    scaled = rope.get("rope_type", "default") != "default"
    kv = "FP8" if fp8 and given.kv_cache_dtype == "fp8" else None
    config = {
        "architecture": model["architectures"][0],
        "dtype": given.dtype,
        "logits_dtype": "float32",
        "vocab_size": model["vocab_size"],
        "hidden_size": model["hidden_size"],
        "num_hidden_layers": model["num_hidden_layers"],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_key_value_heads"],
        "head_size": model.get("head_dim"),
        "intermediate_size": model["intermediate_size"],
        "max_position_embeddings": model["max_position_embeddings"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rope.get("rope_theta", model.get("rope_theta")),
        "rotary_scaling": rope if scaled else None,
        "norm_epsilon": model["rms_norm_eps"],
        "hidden_act": model["hidden_act"],
        "mapping": {"world_size": given.tp_size, "tp_size": given.tp_size, "pp_size": 1, "gpus_per_node": 8},
        "quantization": {"quant_algo": "FP8" if fp8 else None, "kv_cache_quant_algo": kv},
    }
    output = Path(given.output_dir)
    output.mkdir(exist_ok=True)
    (output / "config.json").write_text(json.dumps(config))
    for rank in range(given.tp_size):
        (output / f"rank{rank}.safetensors").write_bytes(b"weights")


def compile_engine(given: argparse.Namespace, change: dict[str, Any]) -> None:
    """An engine directory, with what the real program changes (contract: build_changes)."""
    checkpoint = Path(given.checkpoint_dir)
    model = json.loads((checkpoint / "config.json").read_text())
    model["logits_dtype"] = given.logits_dtype or model["logits_dtype"]
    quantisation = model["quantization"]
    if given.multiple_profiles == "enable" and given.opt_num_tokens is not None:
        raise RuntimeError("multiple_profiles is enabled, while opt_num_tokens is set.")
    tokens = min(given.max_num_tokens, given.max_seq_len * given.max_batch_size)
    length, mode = given.max_seq_len, 1
    if given.speculative_decoding_mode is not None:
        mode = 1 << CONTRACT["enums"]["tensorrt_llm.models.modeling_utils.SpeculativeDecodingMode"]["values"].index(
            given.speculative_decoding_mode.upper()
        )
        length += given.max_draft_len
        tokens = max(tokens, given.max_batch_size * (given.max_draft_len + 1))
    fp8_kv = quantisation["kv_cache_quant_algo"] == "FP8"
    config: dict[str, Any] = {
        "version": "1.2.1",
        "pretrained_config": model,
        "build_config": {
            "max_batch_size": given.max_batch_size,
            "max_num_tokens": tokens,
            "max_seq_len": length,
            "max_beam_width": given.max_beam_width,
            "max_draft_len": given.max_draft_len,
            "speculative_decoding_mode": mode,
            "gather_generation_logits": given.gather_generation_logits,
            "kv_cache_type": (given.kv_cache_type or "paged").upper(),
            "plugin_config": {
                "tokens_per_block": given.tokens_per_block,
                "use_paged_context_fmha": given.use_paged_context_fmha == "enable"
                and not (fp8_kv and quantisation["quant_algo"] is None),
                "paged_kv_cache": True,
                "remove_input_padding": given.remove_input_padding == "enable",
                "gpt_attention_plugin": given.gpt_attention_plugin,
            },
        },
    }
    for section, values in change.items():
        config[section].update(values)
    output = Path(given.output_dir)
    output.mkdir(exist_ok=True)
    for rank in range(model["mapping"]["world_size"]):
        if not (checkpoint / f"rank{rank}.safetensors").is_file():
            raise FileNotFoundError(checkpoint / f"rank{rank}.safetensors")
        (output / f"rank{rank}.engine").write_bytes(b"engine")
    (output / "config.json").write_text(json.dumps(config))
    Path(given.output_timing_cache).write_bytes(b"cache")


def stand_in(program: str, folder: str, arguments: list[str]) -> None:
    behaviour_file = Path(folder) / "behaviour.json"
    behaviour = json.loads(behaviour_file.read_text()).get(program, {}) if behaviour_file.exists() else {}
    given = parser(program).parse_args(arguments)
    with (Path(folder) / "calls.txt").open("a") as calls:
        calls.write(f"{program}\n")
    sys.stdout.write(f"[TensorRT-LLM] {program}\n{behaviour.get('says', '')}\n")
    sys.stdout.flush()
    time.sleep(behaviour.get("sleep", 0))
    if "kill" in behaviour:
        os.kill(os.getpid(), behaviour["kill"])
    if "status" in behaviour:
        sys.exit(behaviour["status"])
    if "nothing" in behaviour:
        return
    if program == "trtllm-build":
        compile_engine(given, behaviour.get("change", {}))
    else:
        convert(given, fp8=program == "quantize.py")
