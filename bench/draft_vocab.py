"""What a reduced head saves a draft, and what it costs in acceptance: heads of several sizes beside the whole one.

python -m saguaro.bench.draft_vocab [DEPLOYMENT] --part rounds|times --out FILE [--sizes N ...] [--text FILE ...]

The deployment's target answers the shipped prompts. What a draft with each list of tokens would have made of that is
replayed exactly (`bench/replay.py`), at temperature 0 and under `coupled` at temperature 1. Forwards are timed in
turns, by drafts loaded from directories that differ in the list alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from saguaro.bench.load import shipped_prompts
from saguaro.bench.replay import Scored, Text, answer_logits, score
from saguaro.bench.tune import Judge, Stopwatch, Times
from saguaro.build.draft_vocab import frequent_tokens
from saguaro.build.driver import build
from saguaro.cache import cache_folder
from saguaro.engines import load_engine
from saguaro.engines.base import Engine, causal_batch
from saguaro.engines.manifest import DRAFT_VOCAB, TOKENIZER, FileRecord, Manifest, file_sha256
from saguaro.errors import ConfigError
from saguaro.llm import find_recipes
from saguaro.orchestrator import sampling
from saguaro.orchestrator.config import SpeculationConfig, find_deployment, read_deployment
from saguaro.orchestrator.prompts import encode_prompt, load_tokenizer
from saguaro.orchestrator.types import RequestSampling, SamplingParams, Speculation

TEMPERATURES = (0.0, 1.0)
ROWS = (1, 4, 8)
WHOLE = "all"
_BLOCK = 16


def answers_of(
    target: Engine, prompts: Sequence[Sequence[int]], temperature: float, ends: Collection[int], max_tokens: int
) -> list[Text]:
    """Plain decoding of all prompts together, each with a seed of its own."""
    requests = [
        RequestSampling(SamplingParams(temperature=temperature), seed, len(prompt))
        for seed, prompt in enumerate(prompts)
    ]
    each = -(-(max(map(len, prompts)) + max_tokens) // _BLOCK)
    tables = [range(n * each, (n + 1) * each) for n in range(len(prompts))]
    said = [list(prompt) for prompt in prompts]
    going, fed = list(range(len(prompts))), [0] * len(prompts)
    for _ in range(max_tokens):
        batch = causal_batch(
            [said[n][fed[n] :] for n in going],
            [fed[n] for n in going],
            [tables[n] for n in going],
            [1] * len(going),
            _BLOCK,
        )
        trials = [sampling.Trial(requests[n], said[n], Speculation(())) for n in going]
        outcomes = sampling.verify(target.forward(batch).logits, trials, "coupled")
        for n, outcome in zip(going, outcomes, strict=True):
            if isinstance(outcome, ConfigError):
                raise outcome
            fed[n] = len(said[n])
            said[n].append(outcome.bonus)
        going = [n for n in going if said[n][-1] not in ends]
        if not going:
            break
    return [
        Text(tuple(prompt), tuple(tokens[len(prompt) :]), request)
        for prompt, tokens, request in zip(prompts, said, requests, strict=True)
    ]


def lists_of(directory: Path, sizes: Sequence[int], texts: Sequence[Path]) -> dict[str, list[int]]:
    """Token ids by name: of each size by the tokenizer's order and, if there are texts, by their counts."""
    tokenizer, ends = Tokenizer.from_file(str(directory / TOKENIZER)), Manifest.load(directory).eos_token_ids
    lists = {str(size): frequent_tokens(tokenizer, size, ends, []) for size in sizes}
    if texts:
        lists |= {f"{size} by text": frequent_tokens(tokenizer, size, ends, texts) for size in sizes}
    return lists


def reduced(directory: Path, token_ids: Sequence[int], folder: Path) -> Path:
    """The engine directory with a reduced head: a new folder, in which its files are linked."""
    folder.mkdir()
    manifest = Manifest.load(directory)
    for name in manifest.files:
        (folder / name).symlink_to(directory / name)
    path = folder / DRAFT_VOCAB
    path.write_text(json.dumps(list(token_ids)))
    record = FileRecord(path.stat().st_size, file_sha256(path))
    dataclasses.replace(manifest, files=manifest.files | {DRAFT_VOCAB: record}).write(folder)
    return folder


def scored_by(
    draft: Engine, texts: Sequence[Text], lists: Mapping[str, Sequence[int]], width: int
) -> dict[str, list[Scored]]:
    """What a draft with each list says at every position of the answers: the whole head's logits, and -inf outside."""
    found: dict[str, list[Scored]] = {name: [] for name in (WHOLE, *lists)}
    for text in texts:
        said = answer_logits(draft, text)
        found[WHOLE].append(score(said, None, text, "coupled", width))
        for name, ids in lists.items():
            kept = torch.full_like(said, -torch.inf)
            kept[:, ids] = said[:, ids]
            found[name].append(score(kept, None, text, "coupled", width))
    return found


def compare(scored: Mapping[str, Sequence[Scored]], setting: SpeculationConfig, vocab_size: int) -> dict[str, Any]:
    """The deployment's rounds with each list. Intervals are 95%, by drawing whole answers again."""
    none = Times({}, {}, {})  # rounds are counted, not timed
    judges = {
        name: Judge([{"coupled": s} for s in texts], none, setting, range(vocab_size)) for name, texts in scored.items()
    }
    figures = {name: judge.figures(setting) for name, judge in judges.items()}
    again = {name: each.resampled(judges[name].weights).tokens_per_round for name, each in figures.items()}
    found = {}
    for name, each in figures.items():
        low, high = np.percentile(again[name] / again[WHOLE], [2.5, 97.5])
        found[name] = {
            "acceptance": float(each.acceptance),
            "hit_rate": float(each.hit_rate),
            "tokens_per_round": float(each.tokens_per_round),
            "of_all": [float(each.tokens_per_round / figures[WHOLE].tokens_per_round), float(low), float(high)],
        }
    return found


def rounds(
    target: Engine,
    draft: Engine,
    chats: Sequence[Sequence[int]],
    ends: Collection[int],
    max_tokens: int,
    lists: Mapping[str, Sequence[int]],
    setting: SpeculationConfig,
) -> dict[str, Any]:
    """What each list does to acceptance and hits."""
    texts = {t: answers_of(target, chats, t, ends, max_tokens) for t in TEMPERATURES}
    answered = [token for each in texts.values() for text in each for token in text.answer]
    return {
        "answers": {f"{t:g}": [len(each), sum(len(text.answer) for text in each)] for t, each in texts.items()},
        "covered": {name: float(np.isin(answered, ids).mean()) for name, ids in lists.items()},
        "rounds": {
            f"{t:g}": compare(scored_by(draft, each, lists, setting.width), setting, draft.vocab_size)
            for t, each in texts.items()
        },
    }


def times(
    drafts: Mapping[str, Engine], prompt: Sequence[int], setting: SpeculationConfig, threads: int, passes: int
) -> dict[str, Any]:
    """Median seconds of a draft step by branches, and of the trunk with its guesses. Every pass times everything once,
    in turns; the first warms up."""
    lookahead = setting.max_lookahead
    text = Text(
        tuple(prompt[:-lookahead]), tuple(prompt[-lookahead:]), RequestSampling(SamplingParams(), 0, len(prompt))
    )
    watches = {name: Stopwatch(each, each, text, (threads, threads), setting.width) for name, each in drafts.items()}
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in drafts}
    for number in range(passes + 1):
        for branches in ROWS:
            for name, watch in watches.items():
                seconds = watch.step(branches)
                if number:
                    seen[name].setdefault(f"step of {branches}", []).append(seconds)
        for name, watch in watches.items():
            seconds = watch.trunk(lookahead)
            if number:
                seen[name].setdefault("trunk", []).append(seconds)
    return {
        "lookahead": lookahead,
        "passes": passes,
        "times": {name: {what: float(np.median(s)) for what, s in each.items()} for name, each in seen.items()},
    }


def run(
    deployment: str,
    part: str,
    sizes: Sequence[int],
    counted: Sequence[Path],
    prompts: int,
    max_tokens: int,
    passes: int,
) -> dict[str, Any]:
    path, store = find_deployment(deployment), cache_folder()
    config = read_deployment(path)
    if config.draft is None:
        raise ConfigError(f"{path} has no draft, whose head could be reduced")
    recipes = find_recipes(config, path)
    target = build(recipes["target"], store)
    draft = build(dataclasses.replace(recipes["draft"], draft_vocab=None, vocab_text=None), store)
    setting = dataclasses.replace(config.speculation, rule="coupled")
    tokenizer = load_tokenizer(target)
    chats = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in shipped_prompts()[:prompts]]
    blocks = -(-(max(map(len, chats)) + max_tokens + setting.max_lookahead + max(ROWS) + 1) // _BLOCK)
    found = {
        "deployment": config.name,
        f"{part}_command": shlex.join(["python", "-m", "saguaro.bench.draft_vocab", *sys.argv[1:]]),
        "machine": {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "setting": dataclasses.asdict(setting),
    }
    whole = load_engine(draft, block_size=_BLOCK, num_blocks=blocks)
    if part == "rounds":
        verifier = load_engine(target, block_size=_BLOCK, num_blocks=blocks * len(chats))
        ends, lists = Manifest.load(target).eos_token_ids, lists_of(draft, sizes, counted)
        return found | rounds(verifier, whole, chats, ends, max_tokens, lists, setting)
    with tempfile.TemporaryDirectory() as folder:
        heads = {name: reduced(draft, ids, Path(folder) / name) for name, ids in lists_of(draft, sizes, ()).items()}
        drafts = {name: load_engine(each, block_size=_BLOCK, num_blocks=blocks) for name, each in heads.items()}
    return found | times({WHOLE: whole} | drafts, chats[0], setting, config.draft.threads, passes)


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    if "times" in result:
        clocked = Table("head", *(f"{what} ms" for what in result["times"][WHOLE]))
        for name, each in result["times"].items():
            clocked.add_row(name, *(f"{1e3 * seconds:.1f}" for seconds in each.values()))
        yield clocked
    for temperature, lists in result.get("rounds", {}).items():
        table = Table(
            "head", "covered", "acceptance", "hits", "tokens per round", "of all's", title=f"T = {temperature}"
        )
        for name, row in lists.items():
            mean, low, high = row["of_all"]
            table.add_row(
                name,
                f"{result['covered'].get(name, 1):.4f}",
                *(f"{row[key]:.3f}" for key in ("acceptance", "hit_rate", "tokens_per_round")),
                f"{mean:.3f} ({low:.3f} … {high:.3f})",
            )
        yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deployment", nargs="?", default="qwen-coder-cpu")
    parser.add_argument("--prompts", type=int, default=16, help="of the shipped ones that are answered (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (default: 96)")
    parser.add_argument("--part", choices=("rounds", "times"), required=True, help="what to measure")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 32768, 65536], help="token ids of a head")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="count tokens in these files, too")
    parser.add_argument("--passes", type=int, default=10, help="of the clock (default: 10)")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    arguments = parser.parse_args()
    result = run(
        arguments.deployment,
        arguments.part,
        arguments.sizes,
        arguments.text,
        arguments.prompts,
        arguments.max_tokens,
        arguments.passes,
    )
    if arguments.out.exists():  # what the other part found
        result = json.loads(arguments.out.read_text(encoding="utf-8")) | result
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(*tables(result))


if __name__ == "__main__":
    main()
