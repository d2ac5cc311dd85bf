"""What `generate` and `chat` have in common."""

from __future__ import annotations

import argparse
from functools import cache
from typing import TYPE_CHECKING

from saguaro.commands.options import store

if TYPE_CHECKING:
    from saguaro.llm import LLM
    from saguaro.orchestrator.types import SamplingParams


@cache
def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--deployment", default="qwen-coder-int4-cpu", metavar="FILE", help="a .yaml file or a shipped name"
    )
    parser.add_argument("--mode", choices=("ar", "sd", "ssd", "auto"), help="instead of the deployment's")
    parser.add_argument("--lookahead", type=int, metavar="K", help="draft tokens per speculation")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off (default)")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same text, in every mode")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    parser.add_argument("--bad-word", action="append", default=[], metavar="TEXT", help="never say it (repeatable)")
    parser.add_argument("--json-schema", metavar="JSON", help="answer with JSON that fits this schema")
    parser.add_argument("--regex", metavar="RE", help="the whole answer matches it")
    parser.add_argument("--grammar", metavar="LARK", help="the whole answer follows this Lark grammar")
    parser.add_argument("--logprobs", type=int, metavar="N", help="with --json: of each token and the N best (0-20)")
    return parser


def start(arguments: argparse.Namespace) -> LLM:
    from saguaro.llm import LLM

    return LLM(arguments.deployment, mode=arguments.mode, lookahead=arguments.lookahead, store=store(arguments))


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    from saguaro.orchestrator.types import SamplingParams

    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        logprobs=arguments.logprobs,
        json_schema=arguments.json_schema,
        regex=arguments.regex,
        grammar=arguments.grammar,
        stop=tuple(arguments.stop),
        bad_words=tuple(arguments.bad_word),
    )
