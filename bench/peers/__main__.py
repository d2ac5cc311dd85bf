"""Saguaro and other engines side by side: same weights, prompts, tokens and cores, greedy, in one run.

python -m saguaro.bench.peers qwen-coder-cpu --lookaheads 3 5 --rounds 3

`--out` gets peers.json, peers.png, and answers.jsonl, to which further peers or rounds can be added (--add).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from saguaro.bench.load import read_prompts
from saguaro.bench.peers.huggingface import HuggingFace
from saguaro.bench.peers.llama_cpp import LlamaCpp
from saguaro.bench.peers.measure import PeerPlan, measure
from saguaro.bench.peers.openvino import OpenVino
from saguaro.bench.peers.peer import Pair, Peer
from saguaro.bench.peers.record import Record
from saguaro.bench.peers.report import draw, figures_table, ratios_table, report
from saguaro.bench.peers.saguaro import Saguaro
from saguaro.bench.speed import PLACEMENTS, prompts_by_kind
from saguaro.bench.speed_command import about
from saguaro.build.driver import build
from saguaro.build.models import pull
from saguaro.cache import cache_folder
from saguaro.engines.manifest import Manifest
from saguaro.errors import ConfigError, SaguaroError
from saguaro.llm import find_recipes
from saguaro.orchestrator.config import find_deployment, read_deployment
from saguaro.orchestrator.prompts import encode_prompt, load_tokenizer

KINDS = ("saguaro", "transformers-bfloat16", "transformers-float32", "openvino", "llama.cpp")


def find_pair(deployment: str, store: Path) -> Pair:
    """The weights of a deployment, built where they are missing. Raises ConfigError without a draft."""
    path = find_deployment(deployment)
    recipes = find_recipes(read_deployment(path), path)
    if "draft" not in recipes:
        raise ConfigError(f"deployment {deployment} has no draft: there is nothing to speculate with")
    models = {role: pull(recipe.model, store)[0] if recipe.model else None for role, recipe in recipes.items()}
    ggufs = {role: file if file and file.suffix == ".gguf" else None for role, file in models.items()}
    engines = {role: build(recipe, store) for role, recipe in recipes.items()}
    return Pair(engines["target"], engines["draft"], ggufs["target"], ggufs["draft"])


def weights(pair: Pair) -> list[str]:
    return [Manifest.load(engine).source_sha256 for engine in (pair.target, pair.draft)]


def peers_of(arguments: argparse.Namespace, pair: Pair, store: Path) -> dict[str, list[Peer]]:
    """All there are, by kind."""
    threads = len(os.sched_getaffinity(0))
    return {
        "saguaro": [
            Saguaro(name, placement, store) for name in arguments.deployment for placement in arguments.placement
        ],
        "transformers-bfloat16": [HuggingFace(pair, threads, "bfloat16")],
        "transformers-float32": [HuggingFace(pair, threads, "float32")],
        # Apart, so that a draft that cannot be read leaves plain decoding.
        "openvino": [OpenVino(pair, threads, store / "openvino", (mode,)) for mode in ("ar", "sd")],
        "llama.cpp": [LlamaCpp(pair, threads)],
    }


def plan_of(arguments: argparse.Namespace, pair: Pair) -> PeerPlan:
    texts = {"prompts": read_prompts(arguments.prompts)} if arguments.prompts else prompts_by_kind()
    tokenizer = load_tokenizer(pair.target)
    speculation = read_deployment(find_deployment(arguments.deployment[0])).speculation
    rounds = {
        number: {
            kind: tuple(encode_prompt(tokenizer, [{"role": "user", "content": some[number % len(some)]}]))
            for kind, some in texts.items()
        }
        for number in range(arguments.first_round, arguments.first_round + arguments.rounds)
    }
    return PeerPlan(rounds, speculation.max_lookahead, tuple(arguments.lookaheads), arguments.max_tokens)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, write and return the document. Raises SaguaroError for what stops everything.

    `failed`: the peers of this run that could have run here and did not answer everything; `not_measured` says why.
    """
    store = arguments.store or cache_folder()
    pair = find_pair(arguments.deployment[0], store)
    for other in arguments.deployment[1:]:
        if weights(find_pair(other, store)) != weights(pair):
            raise ConfigError(
                f"deployment {other} has other weights than {arguments.deployment[0]}: nothing to compare"
            )
    plan = plan_of(arguments, pair)
    by_kind = peers_of(arguments, pair, store)
    everyone = [peer for peers in by_kind.values() for peer in peers]
    facts = about(arguments.deployment[0])
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = arguments.prompts.read_bytes() if arguments.prompts else b""
    conditions = {
        "machine": facts["machine"],
        "weights": weights(pair),
        "max_tokens": plan.max_tokens,
        "prompts": hashlib.sha256(text).hexdigest() if arguments.prompts else "shipped",
    }
    command = shlex.join(["python", "-m", "saguaro.bench.peers", *sys.argv[1:]])
    chosen = [peer for kind in arguments.peers for peer in by_kind[kind]]
    record = Record(arguments.out / "answers.jsonl", conditions, command, chosen, add=arguments.add)
    failures: dict[str, str] = {}
    console = Console(stderr=True)
    with console.status("starting") as line:
        for answer in measure(plan, chosen, failures, line.update):
            record.add(answer)
    failed = [peer.name for peer in chosen if peer.name in failures and peer.missing() is None]
    measured = {run.peer for run in record.runs}
    for peer in everyone:
        if peer.name not in measured:
            failures.setdefault(peer.name, peer.missing() or "not asked for")
    document = report(record.runs, record.peers, failures) | facts | {"command": record.commands}
    document |= {"max_tokens": plan.max_tokens, "weights": conditions["weights"], "failed": failed}
    (arguments.out / "peers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not draw(document["runs"], arguments.out / "peers.png"):
        console.print("no plot: install saguaro-serving[bench]")
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m saguaro.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("deployment", nargs="*", default=["qwen-coder-cpu"], help="names or files, of the same weights")
    add("--peers", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    add(
        "--placement",
        nargs="+",
        choices=PLACEMENTS,
        default=list(PLACEMENTS),
        help="of Saguaro's models (default: both)",
    )
    add("--lookaheads", nargs="+", type=int, default=[4], metavar="K", help="of sd, ours and theirs (default 4)")
    add("--max-tokens", type=int, default=96, metavar="N", help="of each answer (default 96)")
    add("--rounds", type=int, default=3, metavar="N", help="each with the next prompt of every kind (default 3)")
    add("--first-round", type=int, default=0, metavar="N", help="to add rounds to a measurement (default 0)")
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line (default: shipped ones of four kinds)")
    add("--store", type=Path, metavar="DIR", help="where models and engines are (default: the user's cache)")
    add("--out", type=Path, default=Path("peers-results"), metavar="DIR", help="default %(default)s")
    add("--add", action="store_true", help="to the answers that are in --out")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, whatever is not installed; 1 an error, or a peer that has failed; 2 wrong usage."""
    try:
        document = run(_parser().parse_args(words))
    except SaguaroError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 1
    table = Console()
    if not table.is_terminal:
        table.width = 180  # in a file nothing says how wide it is
    table.print(figures_table(document))
    table.print(ratios_table(document["ratios"]))
    return 1 if document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
