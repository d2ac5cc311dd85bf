"""What `trtllm-build` 1.2.1 is asked for, flag by flag, with the reason wherever it is not the default."""

from __future__ import annotations

from typing import Final

from saguaro.build.plan import Setting
from saguaro.build.recipe import Plugins, Recipe, TrtllmOptions

_PLUGIN_REASONS: Final = {
    "low_latency_gemm_plugin": "FP8 products of few rows",
    "low_latency_gemm_swiglu_plugin": "FP8 product and SwiGLU in one kernel, for few rows",
    "gemm_swiglu_plugin": "FP8 product and SwiGLU in one kernel",
    "gemm_allreduce_plugin": "product and sum over ranks in one kernel",
    "reduce_fusion": "sum over ranks, residual and norm in one kernel",
    "user_buffer": "sums over ranks without a copy",
    "multiple_profiles": "kernels tuned for several numbers of tokens; the build takes longer",
}


def trtllm_settings(recipe: Recipe, options: TrtllmOptions, length: int, tokens: int) -> tuple[Setting, ...]:
    """For contexts of `length` tokens and iterations of `tokens`; a setting without a reason has the default."""
    k, rows = options.max_draft_len, options.max_batch_size * (options.max_draft_len + 1)
    found = [
        Setting(
            "--max_batch_size",
            options.max_batch_size,
            "requests in one iteration; the default of 2048 sizes buffers for it",
            "max_batch_size",
        ),
        Setting("--max_seq_len", length, _length_reason(k), "max_seq_len"),
        Setting("--max_beam_width", 1, field="max_beam_width"),
        Setting("--max_num_tokens", tokens, _tokens_reason(options, length, tokens), "max_num_tokens"),
    ]
    if options.plugins.multiple_profiles != "enable":  # trtllm-build refuses both together
        found.append(
            Setting(
                "--opt_num_tokens",
                rows,
                "max_batch_size x (max_draft_len + 1): kernels are tuned for a round of verification"
                if k
                else "max_batch_size: kernels are tuned for a step of generation",
                "opt_num_tokens",
            )
        )
    if k:
        found += [
            Setting(
                "--speculative_decoding_mode",
                "draft_tokens_external",
                "the Executor verifies draft tokens that come with a request",
                "speculative_decoding_mode",
            ),
            Setting("--max_draft_len", k, "the largest lookahead K a deployment may use", "max_draft_len"),
        ]
    found += [
        Setting("--kv_cache_type", "paged", "block reuse, which the Executor demands of a target", "kv_cache_type"),
        Setting(
            "--tokens_per_block",
            options.tokens_per_block,
            "" if options.tokens_per_block == 32 else "of the recipe: what is reused between rounds, and shared",
            "plugin_config.tokens_per_block",
        ),
        Setting("--use_paged_context_fmha", "enable", field="plugin_config.use_paged_context_fmha"),
        Setting("--remove_input_padding", "enable", field="plugin_config.remove_input_padding"),
        Setting("--context_fmha", "enable", field="plugin_config.context_fmha"),
        Setting("--logits_dtype", "float32", "acceptance kernels exist for half and float only; float loses nothing"),
        *_gemm(recipe, options.plugins),
    ]
    if recipe.dtype == "fp8":
        paged = "enable" if kv_dtype(recipe, options) == "fp8" else "disable"
        why = "" if paged == "enable" else "FP8 attention needs an FP8 KV cache"
        found.append(Setting("--use_fp8_context_fmha", paged, why, "plugin_config.use_fp8_context_fmha"))
    for name in _PLUGIN_REASONS:
        found += _chosen(options.plugins, name)
    if options.gather_generation_logits:
        found.append(
            Setting("--gather_generation_logits", True, "requests may ask for logits", "gather_generation_logits")
        )
    workers = min(options.workers or recipe.tp, recipe.tp)
    found.append(Setting("--workers", workers, "ranks compiled side by side, one GPU each" if workers > 1 else ""))
    found.append(Setting("--log_level", "info"))
    return tuple(found)


def _length_reason(k: int) -> str:
    return "the recipe's max_model_len" + (f"; trtllm-build adds max_draft_len ({k}) itself" if k else "")


def _tokens_reason(options: TrtllmOptions, length: int, tokens: int) -> str:
    whole = (
        "without chunked context, which would discard draft tokens, the scheduler counts a request's whole context, "
        "reused blocks too"
    )
    if tokens == options.max_batch_size * length:
        return f"max_batch_size x max_seq_len: {whole}, and a full batch is to be one iteration"
    return f"of the recipe: {whole}, so that requests whose contexts are longer together take several iterations"


def _gemm(recipe: Recipe, plugins: Plugins) -> list[Setting]:
    field = "plugin_config.gemm_plugin"
    chosen = plugins.gemm_plugin or ("disable" if recipe.dtype == "fp8" else "auto")
    if plugins.gemm_plugin is not None:
        why = "of the recipe"
    elif chosen == "auto":
        why = "cuBLASLt for bfloat16 products; off by default"
    else:
        why = ""
    return [Setting("--gemm_plugin", chosen, why, field)]


def _chosen(plugins: Plugins, name: str) -> list[Setting]:
    value = getattr(plugins, name)
    if value is None:
        return []
    reason = "" if value == "disable" else f"of the recipe: {_PLUGIN_REASONS[name]}"
    return [Setting(f"--{name}", value, reason, f"plugin_config.{name}")]


def kv_dtype(recipe: Recipe, options: TrtllmOptions) -> str:
    """Of the KV cache."""
    return options.kv_dtype or recipe.dtype
