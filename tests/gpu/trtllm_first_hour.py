"""What only a real TensorRT-LLM can answer, as a list of checks with pass or fail. Started by trtllm_first_hour.sh.

The target on the Executor (`saguaro.engines.trtllm`, `saguaro.orchestrator.executor_target`) was written against
documents and neighbouring sources. Each check here is one thing taken from them. `checks` run over any session, so the
test suite runs them over the fake, which is right by definition, and over a wrong one, where they fail.

    python tests/gpu/trtllm_first_hour.py api                      names, order, defaults against the tables
    mpirun -n $((1 + TP)) python tests/gpu/trtllm_first_hour.py run ENGINE
    mpirun -n $((2 + TP)) python tests/gpu/trtllm_first_hour.py run ENGINE    a rank more, which has no Executor
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).parents[1] / "golden"
PREFIX = "tensorrt_llm.bindings.executor."
SAMPLES = 2000
TOLERANCE = 0.065  # four standard deviations of the difference of two shares of 2000
NUCLEUS = 0.7  # a top_p that keeps both tokens of the pair


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.detail}"


# The API ------------------------------------------------------------------------------------------------------------


def api_checks(module: Any) -> Iterator[Check]:
    """The installed `tensorrt_llm.bindings.executor` against the tables the fake is made of."""
    contract, more = (
        json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("trtllm_contract", "trtllm_executor")
    )
    for name, table in (contract["enums"] | more["enums"]).items():
        if not name.startswith(PREFIX) or "values" not in table:
            continue
        found = _find(module, name)
        members = {member.name for member in found} if found is not None else set()
        missing = set(table["values"]) - members
        yield Check(name, not missing, f"without {sorted(missing)}" if missing else ", ".join(sorted(members)))
    for name, table in (contract["classes"] | more["classes"]).items():
        if not name.startswith(PREFIX):
            continue
        found = _find(module, name)
        if found is None:
            yield Check(name, False, "is not there")
            continue
        wrong = [attribute for attribute in attributes(table) if not hasattr(found, attribute)]
        if "init" in table and (said := signature(found)) is not None:
            expected = [(entry["name"], entry["kind"] == "keyword_only") for entry in table["init"]]
            if said != expected:
                wrong.append(f"parameters are {said}, not {expected}")
        yield Check(name, not wrong, "; ".join(wrong) or "as in the table")


def attributes(table: dict[str, Any]) -> list[str]:
    return [*table.get("attributes_rw", ()), *table.get("attributes_ro", ()), *table.get("methods", ())]


def signature(cls: Any) -> list[tuple[str, bool]] | None:
    """(parameter, keyword-only) of the constructor, from nanobind's documentation of it; None where it has none."""
    text = cls.__init__.__doc__ or ""
    found = re.search(r"__init__\(self(?:: [^,)]*)?(?:, )?(.*)\) -> None", text)
    if not found:
        return None
    named: list[tuple[str, bool]] = []
    keyword_only = False
    for part in _split(found.group(1)):
        if part == "*":
            keyword_only = True
        elif part:
            named.append((part.partition(":")[0].partition("=")[0].strip(), keyword_only))
    return named


def _split(arguments: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, part = [], 0, ""
    for letter in arguments:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return [*parts, part.strip()]


def _find(module: Any, name: str) -> Any:
    thing = module
    for part in name.removeprefix(PREFIX).split("."):
        thing = getattr(thing, part, None)
    return thing


# The Executor -------------------------------------------------------------------------------------------------------


class Lab:
    """A session, and a prompt after which two tokens of about the same probability may follow, nothing else."""

    def __init__(self, session: Any, ask: Callable[..., Any], never: float) -> None:
        self.session, self.ask, self.never = session, ask, never
        self.prompt = [index * 7 % session.vocab_size for index in range(2 * session.engine.tokens_per_block + 3)]
        (first,) = self.greedy(1)
        (second,) = self.greedy(1, bias=self.bias({first: never}))
        self.pair = (first, second)
        shift = 0.0
        for _ in range(12):
            self.only = self.bias({first: 0.0, second: shift}, otherwise=never)
            share = self.share([self.sample(seed, bias=self.only) for seed in range(SAMPLES // 5)])
            if 0.35 < share < 0.65:
                break
            shift += 1.0 if share > 0.5 else -0.4

    def bias(self, values: dict[int, float], otherwise: float = 0.0) -> torch.Tensor:
        tensor = torch.full((self.session.engine.padded_vocab_size,), otherwise)
        for token, value in values.items():
            tensor[token] = value
        return tensor

    def run(self, asks: Sequence[Any]) -> list[Any]:
        """In batches the engine takes; raises what the executor says against one of them."""
        size = self.session.engine.max_batch_size
        replies = [reply for at in range(0, len(asks), size) for reply in self.session.run(asks[at : at + size])]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def greedy(self, count: int, **options: Any) -> tuple[int, ...]:
        (reply,) = self.run([self.ask(self.prompt, count, **options)])
        return tuple(reply.tokens)

    def sample(self, seed: int, **options: Any) -> Any:
        draft = options.get("draft", ())
        return self.ask(self.prompt, len(draft) + 1, temperature=1.0, seed=seed, **options)

    def share(self, asks: Sequence[Any]) -> float:
        """How often the first emitted token is the first of the pair."""
        return statistics.fmean(reply.tokens[0] == self.pair[0] for reply in self.run(asks))

    def log_q(self, *probs: float) -> torch.Tensor:
        row = torch.full((1, self.session.engine.padded_vocab_size), self.never)
        for token, p in zip(self.pair, probs, strict=True):
            row[0, token] = torch.tensor(p).log() if p else self.never
        return row


def checks(lab: Lab) -> Iterator[Check]:
    """Every check; one that cannot be made says so and fails, and the others go on."""
    for check in (
        plain_decoding, one_iteration, accepted_prefix, end_of_the_context, tokens_alone, with_q, point_mass,
        nucleus_without_draft, nucleus_with_draft, seeds, penalties_inside_a_draft, bad_words_inside_a_draft,
        raw_logits, embedding_bias, reuse, statistics_of_iterations,
    ):  # fmt: skip
        name = (inspect.getdoc(check) or check.__name__).splitlines()[0].rstrip(".")
        try:
            passed, detail = check(lab)
        except Exception as error:  # the next check may still say something
            passed, detail = False, f"{type(error).__name__}: {error}"
        yield Check(name, passed, detail)


def plain_decoding(lab: Lab) -> tuple[bool, str]:
    """An engine for external drafts decodes requests without drafts like any other."""
    whole = lab.greedy(6)
    step: list[int] = []
    for _ in range(6):
        (reply,) = lab.run([lab.ask([*lab.prompt, *step], 1)])
        step.append(reply.tokens[0])
    return list(whole) == step, f"{whole} at once, {tuple(step)} one by one"


def one_iteration(lab: Lab) -> tuple[bool, str]:
    """A request ends with the verification of its draft, rejected or not."""
    right = lab.greedy(4)
    wrong = (lab.pair[1] if right[0] == lab.pair[0] else lab.pair[0], *right[1:3])
    (accepted,) = lab.run([lab.ask(lab.prompt, 4, draft=right[:3])])
    (rejected,) = lab.run([lab.ask(lab.prompt, 4, draft=wrong)])
    lengths = (len(accepted.tokens), len(rejected.tokens))
    return lengths == (4, 1), f"{lengths[0]} tokens of a right draft of 3, {lengths[1]} of a wrong one"


def accepted_prefix(lab: Lab) -> tuple[bool, str]:
    """Output is the accepted part of the draft and one more token."""
    right = lab.greedy(4)
    other = (right[2] + 1) % lab.session.vocab_size
    (reply,) = lab.run([lab.ask(lab.prompt, 4, draft=(right[0], right[1], other))])
    return tuple(reply.tokens[:3]) == right[:3], f"{tuple(reply.tokens)} of {right}"


def end_of_the_context(lab: Lab) -> tuple[bool, str]:
    """A prompt of max_model_len - 1 gets its last token, and one with a draft there, too."""
    long = [lab.prompt[i % len(lab.prompt)] for i in range(lab.session.engine.max_model_len - 1)]
    plain, drafted = lab.run([lab.ask(long, 1), lab.ask(long, 2, draft=(long[-1],))])
    return len(plain.tokens) == 1 <= len(drafted.tokens), f"{len(plain.tokens)} and {len(drafted.tokens)} tokens"


def tokens_alone(lab: Lab) -> tuple[bool, str]:
    """Sampling with draft tokens alone is biased: p(2-p) instead of p."""
    p = lab.share([lab.sample(seed, bias=lab.only) for seed in range(SAMPLES)])
    found = lab.share([lab.sample(seed, bias=lab.only, draft=lab.pair[:1]) for seed in range(SAMPLES)])
    return abs(found - p * (2 - p)) < TOLERANCE, f"{found:.3f}; p = {p:.3f}, p(2-p) = {p * (2 - p):.3f}"


def with_q(lab: Lab) -> tuple[bool, str]:
    """Sampling with log q is exact."""
    p = lab.share([lab.sample(seed, bias=lab.only) for seed in range(SAMPLES)])
    q = 0.8
    drafts = [lab.pair[:1] if draw < q else lab.pair[1:] for draw in torch.rand(SAMPLES).tolist()]
    log_q = lab.log_q(q, 1 - q)
    found = lab.share(
        [lab.sample(10**6 + n, bias=lab.only, draft=draft, draft_logits=log_q) for n, draft in enumerate(drafts)]
    )
    return abs(found - p) < TOLERANCE, f"{found:.3f} with q = {q}; p = {p:.3f}"


def point_mass(lab: Lab) -> tuple[bool, str]:
    """A draft with all of q on it is exact."""
    p = lab.share([lab.sample(seed, bias=lab.only) for seed in range(SAMPLES)])
    log_q = lab.log_q(1, 0)
    found = lab.share(
        [lab.sample(10**6 + n, bias=lab.only, draft=lab.pair[:1], draft_logits=log_q) for n in range(SAMPLES)]
    )
    return abs(found - p) < TOLERANCE, f"{found:.3f}; p = {p:.3f}"


def nucleus_without_draft(lab: Lab) -> tuple[bool, str]:
    """Without a draft, top_p cuts the last token of the nucleus: the reason for pretended drafts."""
    p = lab.share([lab.sample(seed, bias=lab.only) for seed in range(SAMPLES)])
    found = lab.share([lab.sample(seed, bias=lab.only, top_p=NUCLEUS) for seed in range(SAMPLES)])
    cut = p / NUCLEUS if p >= 0.5 else 1 - (1 - p) / NUCLEUS
    return abs(found - cut) < TOLERANCE, f"{found:.3f}; cut: {cut:.3f}, whole: {p:.3f}"


def nucleus_with_draft(lab: Lab) -> tuple[bool, str]:
    """With a draft, top_p keeps the last token of the nucleus whole."""
    p = lab.share([lab.sample(seed, bias=lab.only) for seed in range(SAMPLES)])
    options = {"bias": lab.only, "top_p": NUCLEUS, "draft": lab.pair[:1], "draft_logits": lab.log_q(1, 0)}
    found = lab.share([lab.sample(10**6 + seed, **options) for seed in range(SAMPLES)])
    return abs(found - p) < TOLERANCE, f"{found:.3f}; whole: {p:.3f}"


def seeds(lab: Lab) -> tuple[bool, str]:
    """Equal seeds draw alike, other seeds do not: seeds have to vary between rounds."""
    same = {reply.tokens for reply in lab.run([lab.sample(7, bias=lab.only) for _ in range(32)])}
    other = {reply.tokens for reply in lab.run([lab.sample(seed, bias=lab.only) for seed in range(32)])}
    return len(same) == 1 and len(other) == 2, f"{len(same)} results of one seed, {len(other)} of 32"


def penalties_inside_a_draft(lab: Lab) -> tuple[bool, str]:
    """A repetition penalty counts the draft tokens that have been accepted."""
    plain = lab.greedy(6, repetition_penalty=1.3)
    (reply,) = lab.run([lab.ask(lab.prompt, 6, repetition_penalty=1.3, draft=plain[:5])])
    return reply.tokens == plain, f"{reply.tokens} with a draft, {plain} without"


def bad_words_inside_a_draft(lab: Lab) -> tuple[bool, str]:
    """A bad word of two tokens is seen across the draft, and across prompt and draft."""
    first, second, *_ = lab.greedy(3)
    (inside,) = lab.run([lab.ask(lab.prompt, 3, draft=(first, second), bad_words=((first, second),))])
    (across,) = lab.run([lab.ask(lab.prompt, 2, draft=(first,), bad_words=((lab.prompt[-1], first),))])
    good = inside.tokens[0] == first and inside.tokens[1] != second and across.tokens[0] != first
    return good, f"{inside.tokens} without ({first}, {second}), {across.tokens} without {first}"


def raw_logits(lab: Lab) -> tuple[bool, str]:
    """Generation logits are the model's own, of every emitted token, whatever bias and penalties do."""
    if not lab.session.engine.gather_generation_logits:
        return True, "not needed: the engine was built without gather_generation_logits, so logprobs are refused"
    tokens = lab.greedy(3)
    other = next(token for token in range(lab.session.vocab_size) if token not in tokens)
    bias = lab.bias({other: -1.0})
    plain, drafted = lab.run(
        [lab.ask(lab.prompt, 1, logits=True), lab.ask(lab.prompt, 3, draft=tokens[:2], bias=bias, logits=True)]
    )
    apart = float((plain.logits[0] - drafted.logits[0]).abs().max())
    return len(drafted.logits) == 3 and apart < 0.5, f"{apart:.3f} apart at most, {len(drafted.logits)} rows"


def embedding_bias(lab: Lab) -> tuple[bool, str]:
    """A bias excludes tokens in every row of a draft."""
    tokens = lab.greedy(3)
    (reply,) = lab.run([lab.ask(lab.prompt, 3, draft=tokens[:2], bias=lab.bias({tokens[1]: lab.never}))])
    return tokens[1] not in reply.tokens, f"{reply.tokens} without {tokens[1]}"


def reuse(lab: Lab) -> tuple[bool, str]:
    """A round finds the blocks of the one before."""
    before = replace(lab.session.counts)
    tokens = lab.greedy(1)
    lab.run([lab.ask([*lab.prompt, *tokens], 1)])
    found = lab.session.counts.reused_blocks - before.reused_blocks
    return found >= 2, f"{found} blocks found by two requests of {len(lab.prompt)} tokens"


def statistics_of_iterations(lab: Lab) -> tuple[bool, str]:
    """Iterations are counted, and none is lost between two rounds."""
    counts, stats = lab.session.counts, lab.session.stats
    good = counts.iterations > 0 and counts.missed_iterations == 0
    return (
        good,
        f"{counts.iterations} read, {counts.missed_iterations} lost; {stats.kv_cache_stats.max_num_blocks} blocks",
    )


def overheads(lab: Lab, lookahead: int) -> Iterator[str]:
    """Time of a round by length of the prefix: information, not a check."""
    length = 64
    while length + lookahead + 1 < lab.session.engine.max_model_len:
        text = [lab.prompt[i % len(lab.prompt)] for i in range(length)]
        times = []
        for _ in range(8):
            ask = lab.ask(text, lookahead + 1, draft=tuple(text[:lookahead]))
            start = time.perf_counter()
            (reply,) = lab.run([ask])
            times.append(time.perf_counter() - start)
            text = [*text, *reply.tokens][: lab.session.engine.max_model_len - lookahead - 2]
        milliseconds = 1e3 * statistics.median(times[1:])
        yield f"info  a round of {lookahead + 1} rows after {length} tokens: {milliseconds:.2f} ms"
        length *= 4


# ----------------------------------------------------------------------------------------------------------------------


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(directory: Path, kv_tokens: int, partial_reuse: bool) -> int:
    """A rank of the job. Rank 0 makes the checks, a rank beyond the engine's has no Executor and waits for the end."""
    from mpi4py import MPI

    from saguaro.engines import trtllm
    from saguaro.engines.manifest import Manifest
    from saguaro.engines.trtllm_config import read_trtllm_config

    ours = MPI.COMM_WORLD.Dup()
    rank, engine = ours.Get_rank(), read_trtllm_config(directory)
    options = trtllm.Options(kv_tokens=kv_tokens, timeout_s=120, start_timeout_s=900)
    if not partial_reuse:
        full = trtllm.trtllm.KvCacheConfig
        trtllm.trtllm.KvCacheConfig = lambda **given: full(**(given | {"enable_partial_reuse": False}))
    failed = 0
    if rank == 0:
        session = trtllm.ExecutorSession(
            directory, vocab_size=Manifest.load(directory).vocab_size, options=options, target=True
        )
        say(f"info  {engine}")
        if ours.Get_size() > engine.tp_size + 1:
            say("pass  A rank without an Executor does no harm: the others have started")
        mode = json.loads((directory / "config.json").read_text())["build_config"]["speculative_decoding_mode"]
        say(f"info  speculative_decoding_mode is written as {mode!r}")
        lab = Lab(session, trtllm.Ask, trtllm.NEVER)
        for check in checks(lab):
            failed += not check.passed
            say(check)
        for line in overheads(lab, min(4, engine.max_draft_len)):
            say(line)
        session.close()
    elif rank <= engine.tp_size:
        trtllm.work(directory, options, rank)
    ours.Barrier()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("api")
    executor = commands.add_parser("run")
    executor.add_argument("engine", type=Path)
    executor.add_argument("--kv-tokens", type=int, default=65536)
    executor.add_argument("--no-partial-reuse", action="store_true")
    given = parser.parse_args()
    if given.command == "run":
        return run(given.engine, given.kv_tokens, not given.no_partial_reuse)
    import tensorrt_llm
    from tensorrt_llm.bindings import executor as module

    say(f"info  tensorrt_llm {tensorrt_llm.__version__}")
    say(f"info  Request.__init__: {module.Request.__init__.__doc__}")
    failed = 0
    for check in api_checks(module):
        failed += not check.passed
        say(check)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
