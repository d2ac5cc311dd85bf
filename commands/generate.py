"""`saguaro generate`: answer one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saguaro.commands import decoding
from saguaro.commands.options import Subparsers, command
from saguaro.errors import ConfigError, SaguaroError

if TYPE_CHECKING:
    from saguaro.llm import LLM, Result
    from saguaro.orchestrator.metrics import RequestStats
    from saguaro.orchestrator.prompts import Prompt
    from saguaro.orchestrator.types import Mode, SamplingParams, Setting


def add(commands: Subparsers) -> None:
    generate = command(
        commands,
        "generate",
        run,
        "answer one prompt",
        'saguaro generate "Write a Python function that reverses a list."',
        decoding.options(),
    )
    generate.add_argument("prompt")
    generate.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    generate.add_argument("--trace", metavar="FILE", help="write a Chrome trace: the overlap of both roles can be seen")
    generate.add_argument("--echo", action="store_true", help="begin with the prompt")
    generate.add_argument("--n", type=int, default=1, metavar="N", help="answers; more than one as a list, with --json")
    generate.add_argument("--priority", type=int, default=0, metavar="N", help="lower goes first (default 0)")
    generate.add_argument("--timeout", type=float, metavar="S", help="end after this many seconds with what there is")
    generate.add_argument(
        "--compare",
        action="store_true",
        help="the same prompt in ar, sd and ssd (with `auto`: beside it), and do they agree",
    )


def run(arguments: argparse.Namespace) -> None:
    from saguaro.orchestrator.metrics import chrome_trace

    _check(arguments)
    params = decoding.sampling(arguments)
    prompt = arguments.prompt if arguments.raw else [{"role": "user", "content": arguments.prompt}]
    order: dict[str, Any] = {"priority": arguments.priority, "timeout_s": arguments.timeout}
    with decoding.start(arguments) as llm:
        if arguments.compare:
            _compare(llm, prompt, params, arguments.json, order)
            return
        if arguments.json:
            many = replace(params, n=arguments.n)
            results = llm.generate(prompt, many, trace=arguments.trace is not None, echo=arguments.echo, **order)
            spans = tuple(span for result in results for span in result.spans)
            answers = [_as_json(result) for result in results]
            print(json.dumps(answers[0] if arguments.n == 1 else answers))
        else:
            for chunk in llm.stream(prompt, params, trace=arguments.trace is not None, echo=arguments.echo, **order):
                print(chunk.text, end="", flush=True)
            if chunk.stats is None:
                raise SaguaroError("the stream ended without its figures")
            spans = chunk.spans
            print(flush=True)
            print(f"\n{_line(chunk.stats)}", file=sys.stderr)
    if arguments.trace is not None:
        Path(arguments.trace).write_text(json.dumps(chrome_trace(spans)))


def _check(arguments: argparse.Namespace) -> None:
    """Before anything is loaded. Raises ConfigError for options that have no effect together, or cannot have theirs."""
    if arguments.n > 1 and not arguments.json:
        raise ConfigError(f"--n {arguments.n}: more than one answer needs --json, which prints a list of them")
    if arguments.logprobs is not None and not arguments.json:
        raise ConfigError("--logprobs needs --json, which prints them")
    alone = {"--n": arguments.n > 1, "--echo": arguments.echo, "--trace": arguments.trace is not None}
    if arguments.compare and any(alone.values()):
        given = " and ".join(option for option, there in alone.items() if there)
        raise ConfigError(f"--compare runs the prompt once in each mode and takes no {given}: leave one of them out")
    if arguments.trace is not None:
        try:
            Path(arguments.trace).open("a").close()
        except OSError as error:
            raise ConfigError(
                f"--trace {arguments.trace} cannot be written ({error.strerror}): name another"
            ) from error


def _as_json(result: Result) -> dict[str, object]:
    prompt, completion = len(result.prompt_token_ids), result.stats.tokens
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "stats": asdict(result.stats),
    } | ({"logprobs": [asdict(entry) for entry in result.logprobs]} if result.logprobs else {})


def _line(stats: RequestStats) -> str:
    """One line; a figure that does not exist in this mode is left out."""
    figures = [
        ("{:.2f} tokens/s", stats.tokens_per_second),
        ("acceptance length {:.2f}", stats.acceptance_length if stats.mode != "ar" else None),
        ("hit rate {:.2f}", stats.hit_rate),
        ("E_hit {:.2f}", stats.e_hit),
        ("E_miss {:.2f}", stats.e_miss),
        ("T_p {:.2f}", stats.t_p),
        ("wait {:.0f} ms", stats.wait_ms),
        ("verify {:.0f} ms", stats.verify_ms),
        ("first token {:.0f} ms", stats.ttft_ms),
    ]
    return f"[{stats.mode}] " + ", ".join(text.format(value) for text, value in figures if value is not None)


def _compare(llm: LLM, prompt: Prompt, params: SamplingParams, as_json: bool, order: dict[str, Any]) -> None:
    """The same prompt in ar, sd and ssd, on one running deployment.

    Where that decides something by itself, it is run as it is first; then it makes way for deployments in which the
    best values it has found for `sd` and `ssd` are fixed.
    """
    modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
    fixed: dict[Mode, Setting] = {}
    results: dict[str, Result] = {}
    if llm.config.speculation.adaptive:
        fixed, results = _compare_fixed(llm, prompt, params, order)
    else:
        results = {mode: llm.generate(prompt, params, mode=mode, **order)[0] for mode in modes}
    agree = len({tuple(result.token_ids) for result in results.values()}) == 1
    if as_json:
        settings = {mode: asdict(setting) for mode, setting in fixed.items()}
        runs = [{"run": name, **_as_json(result)} for name, result in results.items()]
        print(json.dumps({"agree": agree, "runs": runs, "fixed": settings}))
        return
    print(results["ar"].text, end="\n\n")
    baseline = results["ar"].stats.tokens_per_second
    for name, result in results.items():
        speed = result.stats.tokens_per_second
        factor = f"{speed / baseline:5.2f} x ar" if speed and baseline else ""
        print(f"{name:4} {factor:11} {_line(result.stats)}")
    for mode, setting in fixed.items():
        budget = f", budget {setting.budget}" if setting.mode == "ssd" else ""
        print(f"{mode} was fixed at lookahead {setting.lookahead}{budget}, backup {setting.backup}.")
    if agree:
        print(f"The {len(results)} texts agree, token for token.")
        return
    plain = results["ar"]
    for name in results:
        tokens = results[name].token_ids
        if tokens != plain.token_ids:
            pairs = enumerate(zip(plain.token_ids, tokens))
            shorter = min(len(plain.token_ids), len(tokens))
            index = next((i for i, (one, other) in pairs if one != other), shorter)
            tie = index in (*plain.stats.near_ties, *results[name].stats.near_ties)
            reason = "a near-tie of the target's two best tokens" if tie else "not a near-tie: please report this"
            print(f"ar and {name} part at token {index}, {reason}.")


def _compare_fixed(
    llm: LLM, prompt: Prompt, params: SamplingParams, order: dict[str, Any]
) -> tuple[dict[Mode, Setting], dict[str, Result]]:
    """What was fixed for sd and ssd, and the results, with the deployment's own as `auto`. `llm` is closed."""
    from saguaro.llm import LLM

    results: dict[str, Result] = {}
    for _ in range(2):  # once to measure
        results["auto"] = llm.generate(prompt, params, **order)[0]
    best: dict[Mode, Setting] = {setting.mode: setting for setting in llm.settings() if setting.mode != "ar"}
    llm.close()
    for mode, setting in best.items():
        with LLM(llm.config.fixed(setting), store=llm.store) as alone:
            names: list[Mode] = [mode] if "ar" in results else ["ar", mode]
            for each in names:
                results[each] = alone.generate(prompt, params, mode=each, **order)[0]
    return best, {name: results[name] for name in ("auto", "ar", *best)}
