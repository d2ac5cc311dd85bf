"""What a round costs beside its forwards, by part: the real processes around models that only take time.

python -m saguaro.bench.orchestration --out FILE        (needs nothing else to be running)

The target takes 20 ms a forward, the draft next to nothing, and every speculation is prepared and accepted. So whatever
a round takes beyond those 20 ms is orchestration: scheduling, two messages, lookup, deciding, committing. Streaming is
done while the forward runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich.console import Console

from saguaro.bench.speed_command import about
from saguaro.llm import LLM
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.types import SamplingParams

_FORWARD_MS = 20.0
_LOOKAHEAD = 4
_SKIPPED = 5  # rounds at either end, in which not every sequence takes part


@dataclass(frozen=True)
class Cost:
    """Medians over rounds, in milliseconds."""

    batch: int
    temperature: float
    rounds: int
    total: float  # a round, less the target's forward
    verify: float  # of that: launching, sampling, deciding
    exchange: float  # waiting for the speculations: two messages, and the lookup between
    rest: float  # committing, scheduling, asking, laying out the batch
    prepare: float  # of the speculator, beside the verification: not part of the total


def deployment(folder: Path, vocab_size: int) -> Path:
    """The YAML of the pair described above."""
    agreement = {"acceptance": 1.0, "miss_scale": 0.0, "miss_exponent": 1.0}
    for role, profile in (
        ("target", {"forward_ms": {1: _FORWARD_MS}}),
        ("draft", {"forward_ms": {1: 0.0}, "agreement": agreement, "sharpness": 3.0}),
    ):
        recipe = {"name": role, "engine": "simulated", "simulated": {"profile": profile, "vocab_size": vocab_size}}
        (folder / f"{role}.yaml").write_text(yaml.safe_dump(recipe))
    model = {"kv_tokens": 131072}
    document = {
        "name": "orchestration",
        "target": {"recipe": "target.yaml"} | model,
        "draft": {"recipe": "draft.yaml"} | model,
        "speculation": {"lookahead": _LOOKAHEAD, "fan_out": {"budget": 8}},
        "serving": {"max_sequences": 32, "max_batch_tokens": 4096},
    }
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def measure(llm: LLM, batch: int, temperature: float, rounds: int) -> Cost:
    """One batch of equal length; the spans of all rounds in which the whole of it took part."""
    results = llm.generate(
        [[7 + i, 8, 9] for i in range(batch)],
        SamplingParams(temperature=temperature, seed=1, max_tokens=rounds * (_LOOKAHEAD + 1), ignore_eos=True),
        trace=True,
    )
    return cost(results[0].spans, batch, temperature)


def cost(spans: Sequence[Span], batch: int, temperature: float) -> Cost:
    def named(name: str) -> list[Span]:
        return sorted((span for span in spans if span.name == name), key=lambda span: span.start)

    verifications = named("verify")[_SKIPPED:-_SKIPPED]
    periods = [(b.start - a.start) / 1e6 for a, b in zip(verifications, verifications[1:])]
    verify = statistics.median(_ms(span) for span in verifications) - _FORWARD_MS
    exchange = statistics.median(_ms(span) for span in named("wait")[_SKIPPED:-_SKIPPED])
    total = statistics.median(periods) - _FORWARD_MS
    return Cost(
        batch=batch,
        temperature=temperature,
        rounds=len(periods),
        total=round(total, 3),
        verify=round(verify, 3),
        exchange=round(exchange, 3),
        rest=round(total - verify - exchange, 3),
        prepare=round(statistics.median(_ms(span) for span in named("prepare")), 3),
    )


def _ms(span: Span) -> float:
    return (span.end - span.start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--vocab-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = deployment(Path(folder), arguments.vocab_size)
        with LLM(str(path), store=Path(folder)) as llm:
            measure(llm, 1, 0.0, 20)  # what is allocated and imported at the first time is no round's cost
            costs = [
                asdict(measure(llm, batch, temperature, arguments.rounds))
                for temperature in arguments.temperature
                for batch in arguments.batch
            ]
    result = {"unit": "ms", "vocab_size": arguments.vocab_size, "costs": costs} | about(
        "orchestration", "python -m saguaro.bench.orchestration"
    )
    Console().print_json(data=result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
