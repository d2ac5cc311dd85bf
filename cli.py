"""The one command: saguaro models | build | generate | chat | serve | status | stop | top | bench | tune | simulate | …

Heavy imports wait for the command that needs them.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from saguaro import __version__
from saguaro.errors import SaguaroError

if TYPE_CHECKING:
    from saguaro.llm import LLM, Result
    from saguaro.orchestrator.metrics import RequestStats
    from saguaro.orchestrator.prompts import Prompt
    from saguaro.orchestrator.types import Mode, SamplingParams, Setting

_log = logging.getLogger("saguaro")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error said in one paragraph, 2 wrong usage, 130 Ctrl-C."""
    arguments = _parser().parse_args(argv)
    level = logging.DEBUG if arguments.verbose else os.environ.get("SAGUARO_LOG_LEVEL", "WARNING")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    _log.setLevel(level)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status: int | None = arguments.run(arguments)
    except SaguaroError as error:
        print(f"saguaro: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away; say nothing more
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return status or 0


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _models_pull(arguments: argparse.Namespace) -> None:
    from saguaro.build.models import pull

    for path in pull(arguments.name, _store(arguments)):
        print(path)


def _models_list(arguments: argparse.Namespace) -> None:
    from saguaro.build.models import CATALOGUE, PAIRS, installed

    present = installed(_store(arguments))
    known = {name: (model.description, model.licence) for name, model in CATALOGUE.items()}
    known |= {name: (f"the pair {' + '.join(members)}", "") for name, members in PAIRS.items()}
    rows = [
        {
            "name": name,
            "installed": all(member in present for member in PAIRS.get(name, (name,))),
            "bytes": present[name].size if name in present else None,
            "description": known.get(name, ("", ""))[0],
            "licence": known.get(name, ("", ""))[1],
        }
        for name in sorted(known | present)
    ]
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['name']:24} {'installed' if row['installed'] else '-':10} {row['description']} {row['licence']}")


def _build(arguments: argparse.Namespace) -> None:
    from saguaro.build.driver import build, find_recipe, plan

    recipes = [find_recipe(name) for name in arguments.recipe]
    if arguments.dry_run:
        from saguaro.build.plan_text import plan_json, plan_text

        plans = [plan(recipe, _store(arguments)) for recipe in recipes]
        print(
            json.dumps([plan_json(made) for made in plans]) if arguments.json else "\n\n\n".join(map(plan_text, plans))
        )
        return
    directories = []
    for recipe in recipes:
        directories.append(str(build(recipe, _store(arguments))))
        if not arguments.json:
            print(directories[-1])
    if arguments.json:
        print(json.dumps(directories))


def _generate(arguments: argparse.Namespace) -> None:
    from saguaro.orchestrator.metrics import chrome_trace

    params = _sampling(arguments)
    prompt = arguments.prompt if arguments.raw else [{"role": "user", "content": arguments.prompt}]
    order: dict[str, Any] = {"priority": arguments.priority, "timeout_s": arguments.timeout}
    with _llm(arguments) as llm:
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
            many = replace(params, n=arguments.n)
            for chunk in llm.stream(prompt, many, trace=arguments.trace is not None, echo=arguments.echo, **order):
                print(chunk.text, end="", flush=True)
            if chunk.stats is None:
                raise SaguaroError("the stream ended without its figures")
            spans = chunk.spans
            print(f"\n\n{_line(chunk.stats)}", file=sys.stderr)
    if arguments.trace is not None:
        Path(arguments.trace).write_text(json.dumps(chrome_trace(spans)))


def _chat(arguments: argparse.Namespace) -> None:
    from saguaro.frontend.chat import chat

    with _llm(arguments) as llm:
        chat(llm, _sampling(arguments))


def _serve(arguments: argparse.Namespace) -> None:
    from saguaro.supervisor.serve import serve, serve_detached

    log_file = Path(arguments.log_file).absolute() if arguments.log_file else None
    if not arguments.detach:
        serve(arguments.deployment, _store(arguments), openai=arguments.openai, host=arguments.host, log_file=log_file)
        return
    command = [sys.executable, "-m", "saguaro.cli", "serve", arguments.deployment, "--store", str(_store(arguments))]
    command += ["--verbose"] * arguments.verbose + ["--no-openai"] * (not arguments.openai)
    command += ["--host", arguments.host] if arguments.host else []
    serve_detached(arguments.deployment, command, log_file, print)


def _status(arguments: argparse.Namespace) -> None:
    from saguaro.supervisor.control import describe, status

    state = status(arguments.name)
    print(json.dumps(asdict(state)) if arguments.json else describe(state))


def _stop(arguments: argparse.Namespace) -> None:
    from saguaro.supervisor.control import stop

    print(f"stopped {stop(arguments.name, now=arguments.now)}")


def _top(arguments: argparse.Namespace) -> None:
    from saguaro.frontend.top import top

    url = arguments.url or _monitor(arguments.name)
    top(url, interval=arguments.interval, once=arguments.once, as_json=arguments.json)


def _monitor(name: str | None) -> str:
    """Where the monitor of a deployment that is served on this machine is to be found; a file stands for its name."""
    from saguaro.orchestrator.config import find_deployment, read_deployment
    from saguaro.supervisor.control import status

    if name and name.endswith((".yaml", ".yml")):
        name = read_deployment(find_deployment(name)).name
    return status(name).addresses["health"].removesuffix("/health")


def _load(arguments: argparse.Namespace) -> None:
    from saguaro.bench.load_command import load

    load(
        arguments.name,
        _store(arguments),
        out=Path(arguments.out),
        prompts=Path(arguments.prompts) if arguments.prompts else None,
        as_json=arguments.json,
        modes=arguments.modes,
        routes=arguments.routes,
        concurrencies=arguments.concurrency,
        rates=arguments.rate,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        window=arguments.window,
    )


def _bench(arguments: argparse.Namespace) -> None:
    from saguaro.bench.speed_command import bench

    bench(
        arguments.deployment,
        _store(arguments),
        out=Path(arguments.out),
        prompts=Path(arguments.prompts) if arguments.prompts else None,
        as_json=arguments.json,
        quick=arguments.quick,
        modes=arguments.modes,
        sd_lookaheads=arguments.sd_lookahead,
        batches=arguments.batch,
        temperatures=arguments.temperature,
        placements=["own", "all"] if "both" in arguments.placement else arguments.placement,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
    )


def _tune(arguments: argparse.Namespace) -> None:
    from saguaro.bench.tune_command import plan_of, run

    run(
        arguments.deployment,
        _store(arguments),
        plan_of(
            Path(arguments.prompts) if arguments.prompts else None,
            arguments.temperature,
            arguments.max_tokens,
            arguments.seconds,
            arguments.quick,
        ),
        plot_file=Path(arguments.plot) if arguments.plot else None,
        write=Path(arguments.write) if arguments.write else None,
        as_json=arguments.json,
    )


def _simulate(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from saguaro import simulate

    pair = simulate.Pair(
        arguments.acceptance,
        arguments.draft_step,
        arguments.row_cost,
        arguments.miss_scale,
        arguments.miss_exponent,
        arguments.fast_acceptance,
    )
    setting = simulate.Setting(arguments.lookahead, arguments.budget, arguments.batch, arguments.devices)
    found = simulate.sweeps(pair, setting)
    if arguments.plot is not None:
        simulate.plot(found, setting, Path(arguments.plot))
    if arguments.json:
        print(json.dumps(simulate.as_json(pair, setting, found)))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(simulate.table(found, setting))


def _doctor(arguments: argparse.Namespace) -> int:
    from saguaro.doctor.diagnosis import diagnose

    report = diagnose(arguments.deployment, _store(arguments))
    print(json.dumps(report.as_json()) if arguments.json else report.as_text())
    return 0 if report.can_run else 1


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
        pairs = zip(plain.token_ids, results[name].token_ids)
        index = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if index is not None:
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


def _llm(arguments: argparse.Namespace) -> LLM:
    from saguaro.llm import LLM

    return LLM(arguments.deployment, mode=arguments.mode, lookahead=arguments.lookahead, store=_store(arguments))


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
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
        ("hit rate {:.2f}", stats.hit_rate if stats.mode == "ssd" else None),
        ("E_hit {:.2f}", stats.e_hit),
        ("E_miss {:.2f}", stats.e_miss),
        ("T_p {:.2f}", stats.t_p),
        ("wait {:.0f} ms", stats.wait_ms),
        ("verify {:.0f} ms", stats.verify_ms),
        ("first token {:.0f} ms", stats.ttft_ms),
    ]
    return f"[{stats.mode}] " + ", ".join(text.format(value) for text, value in figures if value is not None)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.01 and 3600 seconds, got {text!r}")
    return value


def _store(arguments: argparse.Namespace) -> Path:
    from saguaro.build.driver import default_store

    return Path(arguments.store) if arguments.store else default_store()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saguaro", description="Speculative speculative decoding: faster, with the target's exact output."
    )
    parser.add_argument("--version", action="version", version=f"saguaro {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--store", metavar="DIR", help="where models and engines are kept (default: the user's cache)")
    common.add_argument("--verbose", action="store_true", help="log everything, the ranks' own output included")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: object, text: str, example: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {example}",
            parents=[common, *parents],
        )
        sub.set_defaults(run=run)
        return sub

    models = commands.add_parser("models", help="pull and list model weights").add_subparsers(
        metavar="ACTION", required=True
    )
    pull = models.add_parser(
        "pull", parents=[common], help="fetch and check weights", epilog="example: saguaro models pull qwen2.5-coder"
    )
    pull.add_argument(
        "name", help="a name from `saguaro models list`, a hub id (owner/name), or a local folder or .gguf"
    )
    pull.set_defaults(run=_models_pull)
    listing = models.add_parser(
        "list", parents=[common], help="known models and what is here", epilog="example: saguaro models list --json"
    )
    listing.add_argument("--json", action="store_true", help="print one JSON array")
    listing.set_defaults(run=_models_list)

    build = command("build", _build, "turn recipes into engine directories", "saguaro build qwen2.5-coder-1.5b-cpu")
    build.add_argument("recipe", nargs="+", help="a .yaml file or the name of a shipped recipe")
    build.add_argument(
        "--dry-run", action="store_true", help="show commands, files and memory instead; needs no weights and no GPU"
    )
    build.add_argument("--json", action="store_true", help="print one JSON array, of plans or of directories")

    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument(
        "--deployment", default="qwen-coder-cpu", metavar="FILE", help="a .yaml file or a shipped name"
    )
    decoding.add_argument("--mode", choices=("ar", "sd", "ssd", "auto"), help="instead of the deployment's")
    decoding.add_argument("--lookahead", type=int, metavar="K", help="draft tokens per speculation")
    decoding.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    decoding.add_argument("--top-k", type=int, default=0, metavar="N", help="0 is off (default)")
    decoding.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    decoding.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off (default)")
    decoding.add_argument("--seed", type=int, metavar="N", help="same seed, same text, in every mode")
    decoding.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    decoding.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )
    decoding.add_argument("--bad-word", action="append", default=[], metavar="TEXT", help="never say it (repeatable)")
    decoding.add_argument("--json-schema", metavar="JSON", help="answer with JSON that fits this schema")
    decoding.add_argument("--regex", metavar="RE", help="the whole answer matches it")
    decoding.add_argument("--grammar", metavar="LARK", help="the whole answer follows this Lark grammar")
    decoding.add_argument("--logprobs", type=int, metavar="N", help="with --json: of each token and the N best (0-20)")

    generate = command(
        "generate",
        _generate,
        "answer one prompt",
        'saguaro generate "Write a Python function that reverses a list."',
        decoding,
    )
    generate.add_argument("prompt")
    generate.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    generate.add_argument("--trace", metavar="FILE", help="write a Chrome trace: the overlap of both roles can be seen")
    generate.add_argument("--echo", action="store_true", help="begin with the prompt")
    generate.add_argument("--n", type=int, default=1, metavar="N", help="answers; with --json a list of as many")
    generate.add_argument("--priority", type=int, default=0, metavar="N", help="lower goes first (default 0)")
    generate.add_argument("--timeout", type=float, metavar="S", help="end after this many seconds with what there is")
    generate.add_argument(
        "--compare",
        action="store_true",
        help="the same prompt in ar, sd and ssd (with `auto`: beside it), and do they agree",
    )

    command("chat", _chat, "talk to the model in the terminal", "saguaro chat --temperature 0.7", decoding)

    serve = command("serve", _serve, "serve a deployment over HTTP, gRPC and the OpenAI API", "saguaro serve tiny")
    serve.add_argument("deployment", help="a .yaml file or a shipped name")
    serve.add_argument("--detach", action="store_true", help="in the background; returns when it is ready")
    serve.add_argument("--log-file", metavar="FILE", help="log there too; with --detach instead of the default place")
    serve.add_argument(
        "--host", metavar="ADDRESS", help="bind the ports to it instead of the deployment's serving.host"
    )
    serve.add_argument("--no-openai", dest="openai", action="store_false", help="without the OpenAI front end")

    name_help = "the deployment's `name:`; may be left out when only one is served"
    status = command("status", _status, "parts, health and addresses of a served deployment", "saguaro status --json")
    status.add_argument("name", nargs="?", metavar="NAME", help=name_help)
    status.add_argument("--json", action="store_true", help="print one JSON object")

    load = command(
        "load", _load, "load a served deployment with perf_analyzer", "saguaro load tiny --concurrency 1 2 4 8"
    )
    load.add_argument("name", nargs="?", metavar="NAME", help=name_help)
    load.add_argument("--modes", nargs="+", default=[], choices=("ar", "sd", "ssd"), help="default: all it can do")
    load.add_argument(
        "--routes",
        nargs="+",
        default=["ensemble-grpc"],
        choices=("ensemble-grpc", "ensemble-http", "ssd-grpc"),
        help="past which parts (default ensemble-grpc)",
    )
    load.add_argument("--concurrency", nargs="*", type=int, default=[1, 2, 4], metavar="N", help="requests in flight")
    load.add_argument("--rate", nargs="*", type=float, default=[], metavar="R", help="Poisson arrivals per second")
    load.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    load.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    load.add_argument(
        "--window", type=int, default=10, metavar="N", help="requests in each of a level's 3 windows (10)"
    )
    load.add_argument("--out", default="load", metavar="DIR", help="for load.json, .csv and .png (default ./load)")
    load.add_argument("--json", action="store_true", help="print one JSON array instead of a table")

    stop = command("stop", _stop, "stop a served deployment when its requests are finished", "saguaro stop tiny")
    stop.add_argument("name", nargs="?", metavar="NAME", help=name_help)
    stop.add_argument("--now", action="store_true", help="end running requests instead of waiting for them")

    top = command("top", _top, "watch a served deployment", "saguaro top")
    top.add_argument("name", nargs="?", metavar="NAME", help=name_help + ", or its .yaml file")
    top.add_argument("--url", metavar="URL", help="of a deployment elsewhere: its monitor, http://HOST:8003")
    top.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks (default 2)"
    )
    top.add_argument("--once", action="store_true", help="one frame, of one interval")
    top.add_argument("--json", action="store_true", help="one frame, as one JSON object")

    bench = command(
        "bench",
        _bench,
        "measure ar, sd and ssd of a deployment side by side",
        "saguaro bench qwen-coder-cpu --sd-lookahead 2 4 6 8 --temperature 0 1",
    )
    bench.add_argument(
        "deployment", nargs="?", default="qwen-coder-cpu", metavar="DEPLOYMENT", help="name or .yaml file"
    )
    bench.add_argument("--modes", nargs="+", default=["ar", "sd", "ssd"], choices=("ar", "sd", "ssd"))
    bench.add_argument(
        "--sd-lookahead",
        nargs="*",
        type=int,
        default=[],
        metavar="K",
        help="sd takes the fastest (default: that of ssd)",
    )
    bench.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="prompts at once (default 1)")
    bench.add_argument("--temperature", nargs="+", type=float, default=[0.0], metavar="T", help="0 is greedy (default)")
    bench.add_argument(
        "--placement",
        nargs="+",
        default=["own"],
        choices=("own", "all", "both"),
        help="own: each model on cores of its own (default); all: both on all cores; both: either",
    )
    bench.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    bench.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of each answer (default 96)")
    bench.add_argument("--repeats", type=int, default=3, metavar="N", help="batches of each kind of prompt (default 3)")
    bench.add_argument("--quick", action="store_true", help="one short answer of each kind: is everything in order?")
    bench.add_argument("--out", default="bench", metavar="DIR", help="for bench.json and plots (default ./bench)")
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    doctor = command(
        "doctor", _doctor, "look at this machine, and at whether a deployment can run on it", "saguaro doctor tiny"
    )
    doctor.add_argument("deployment", nargs="?", metavar="DEPLOYMENT", help="a .yaml file or a shipped name")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    tuning = command(
        "tune",
        _tune,
        "measure a pair on this machine and these prompts, and recommend a speculation section",
        "saguaro tune qwen-coder-cpu --prompts mine.txt --plot tune.png --write speculation.yaml",
    )
    tuning.add_argument("deployment", help="a .yaml file or a shipped name")
    tuning.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    tuning.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="of the requests (default 0 1)"
    )
    tuning.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default 96)")
    tuning.add_argument("--seconds", type=float, metavar="S", help="about how long to measure (default 600)")
    tuning.add_argument("--quick", action="store_true", help="about a minute: fewer prompts, tokens and settings")
    tuning.add_argument("--write", metavar="FILE", help="put the recommended section there, too")
    tuning.add_argument("--plot", metavar="FILE", help="draw what was found into a .png, .svg or .pdf")
    tuning.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    planning = command(
        "simulate",
        _simulate,
        "what lookahead, fan-out, batch size and more draft devices would bring, by the analytic model; nothing is run",
        "saguaro simulate --acceptance 0.8 --draft-step 0.1 --lookahead 4 --budget 8 --batch 1 --plot plan.png",
    )
    for name, kind, default, text in (
        ("acceptance", float, 0.8, "probability that a draft token is accepted"),
        ("draft-step", float, 0.1, "one forward of the draft over one row, in verifications of the target"),
        ("row-cost", float, 0.03, "what a further row of that forward costs, as a share of it"),
        ("miss-scale", float, 0.4, "c: share of bonus tokens that the best guess misses; F guesses miss c F^-r"),
        ("miss-exponent", float, 0.6, "r"),
        ("fast-acceptance", float, 0.0, "acceptance of the tokens of a backup that costs nothing"),
        ("lookahead", int, 4, "draft tokens per speculation"),
        ("budget", int, 8, "branches that one draft device prepares for a sequence"),
        ("batch", int, 1, "sequences decoded together"),
        ("devices", int, 1, "draft devices, each with outcomes of its own"),
    ):
        planning.add_argument(f"--{name}", type=kind, default=default, metavar="X", help=f"{text} (default {default})")
    planning.add_argument("--json", action="store_true", help="print one JSON object")
    planning.add_argument("--plot", metavar="FILE", help="draw the four sweeps into a .png, .svg or .pdf")
    return parser


if __name__ == "__main__":
    sys.exit(main())
