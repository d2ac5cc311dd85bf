"""Load tests: perf_analyzer against the served pipeline, level after level, for each mode.

Every level is one run of the real tool; what it exports (a time stamp for each response) gives what it does not report
itself: time to first token, inter-token latency and tokens per second.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from saguaro.errors import ConfigError, LaunchError
from saguaro.orchestrator.types import Mode

_log = logging.getLogger(__name__)

Route = Literal["ensemble-grpc", "ensemble-http", "ssd-grpc"]
ROUTES: tuple[Route, ...] = ("ensemble-grpc", "ensemble-http", "ssd-grpc")
_PATIENCE = 3600.0  # seconds a level may take


@dataclass(frozen=True)
class Level:
    """Either a number of requests kept in flight, or a rate of Poisson arrivals in requests per second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.concurrency is None else f"{self.concurrency} in flight"

    def options(self) -> list[str]:
        if self.concurrency is not None:
            return ["--concurrency-range", str(self.concurrency)]
        return ["--request-rate-range", f"{self.rate:g}", "--request-distribution", "poisson"]


@dataclass(frozen=True)
class LoadPlan:
    """What to measure: every mode by every route at every level."""

    prompts: tuple[str, ...]
    modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
    routes: tuple[Route, ...] = ("ensemble-grpc",)
    concurrencies: tuple[int, ...] = (1, 2, 4)
    rates: tuple[float, ...] = ()
    max_tokens: int = 64
    temperature: float = 0.0
    window: int = 10  # requests at least in a window of measurement; there are three at each level

    def __post_init__(self) -> None:
        def check(valid: bool, name: str, limit: str) -> None:
            if not valid:
                raise ConfigError(f"{name} must be {limit}, got {getattr(self, name)}")

        check(bool(self.prompts), "prompts", "at least one text")
        check(all(1 <= level <= 4096 for level in self.concurrencies), "concurrencies", "between 1 and 4096")
        check(all(rate > 0 for rate in self.rates), "rates", "above 0")
        check(bool(self.concurrencies or self.rates), "concurrencies", "given, or rates")
        check(set(self.routes) <= set(ROUTES), "routes", f"among {', '.join(ROUTES)}")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(self.window >= 1, "window", "at least 1")

    def levels(self) -> list[Level]:
        return [Level(concurrency=n) for n in self.concurrencies] + [Level(rate=rate) for rate in self.rates]


@dataclass(frozen=True)
class LoadPoint:
    """One level of one mode by one route. Times in milliseconds; a percentile over requests."""

    route: Route
    mode: Mode
    concurrency: int | None
    rate: float | None
    requests: int
    requests_per_second: float
    tokens_per_second: float
    latency_p50: float
    latency_p99: float
    ttft_p50: float  # to the first token
    ttft_p99: float
    itl_p50: float | None  # inter-token latency: time after the first token over the tokens after it
    itl_p99: float | None


def shipped_prompts() -> tuple[str, ...]:
    """Prompts of four kinds, mixed: code, maths, chat, instructions."""
    kinds = yaml.safe_load((resources.files("saguaro.bench") / "prompts.yaml").read_text()).values()
    return tuple(prompt for row in itertools.zip_longest(*kinds) for prompt in row if prompt is not None)


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt a line. Raises ConfigError."""
    try:
        return tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt file {path} cannot be read: {error}") from None


def run_load(
    plan: LoadPlan,
    *,
    tool: Sequence[str],
    http: str,
    grpc: str,
    encode: Callable[[str], list[int]],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[LoadPoint]:
    """Measure every level of the plan against a served deployment, at `http` and `grpc` (host:port).

    `tool` is the command of `perf_analyzer()`, `encode` turns a prompt into the tokens that the route past the
    ensemble needs. The modes of a level follow each other, so that what disturbs a machine for a while disturbs all.
    Raises LaunchError when the tool fails or a request does.
    """
    for route, level, mode in itertools.product(plan.routes, plan.levels(), plan.modes):
        progress(f"{route}, {level}, {mode}")
        with tempfile.TemporaryDirectory(prefix="saguaro-load-") as folder:
            inputs, export = Path(folder) / "inputs.json", Path(folder) / "export.json"
            data = [_inputs(route, plan, mode, prompt, encode) for prompt in plan.prompts]
            inputs.write_text(json.dumps({"data": data}))
            command = [*tool, *_destination(route, http, grpc), "--async", "--input-data", str(inputs)]
            command += [*level.options(), "--profile-export-file", str(export)]
            # Windows of requests, not of time: in a time that suits one machine another finishes none.
            command += ["--measurement-mode", "count_windows", "--measurement-request-count", str(plan.window)]
            _run([*command, "--stability-percentage", "999"])
            requests = list(_requests(json.loads(export.read_text())))
        yield summarise(requests, route, level, mode)


def _destination(route: Route, http: str, grpc: str) -> list[str]:
    if route == "ensemble-http":  # the tool measures a stream of server-sent events as it does OpenAI's
        endpoint = ["--service-kind", "openai", "--endpoint", "v2/models/ensemble/generate_stream"]
        return ["-m", "ensemble", *endpoint, "-i", "http", "-u", f"http://{http}"]
    return ["-m", route.removesuffix("-grpc"), "-i", "grpc", "--streaming", "-u", grpc]


def _inputs(
    route: Route, plan: LoadPlan, mode: Mode, prompt: str, encode: Callable[[str], list[int]]
) -> dict[str, Any]:
    shared = {"temperature": plan.temperature, "stream": True, "ignore_eos": True, "speculation_mode": mode}
    if route == "ssd-grpc":
        ids = encode(prompt)
        tensors = {name: [value] for name, value in shared.items()} | {"max_tokens": [plan.max_tokens]}
        return tensors | {"input_ids": {"content": ids, "shape": [len(ids)]}}
    messages = json.dumps([{"role": "user", "content": prompt}])
    fields = shared | {"text_input": "", "messages": messages, "max_tokens": plan.max_tokens}
    return {"payload": [fields]} if route == "ensemble-http" else {name: [value] for name, value in fields.items()}


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"perf_analyzer did not finish within {_PATIENCE:g} s: a request hangs, or a level is far above what the "
            "deployment can serve; look at `saguaro status`"
        ) from None
    if result.returncode:
        words = " ".join((result.stdout + result.stderr).split())[-600:]
        raise LaunchError(f"perf_analyzer ended with status {result.returncode}: {words}")


@dataclass(frozen=True)
class _Request:
    """When a request was sent, and when how many tokens of its answer came. Nanoseconds."""

    start: int
    arrivals: tuple[tuple[int, int], ...]


def _requests(export: dict[str, Any]) -> Iterator[_Request]:
    for experiment in export["experiments"]:
        for request in experiment["requests"]:
            arrivals = zip(request["response_timestamps"], map(_tokens, request["response_outputs"]))
            counted = tuple((time, tokens) for time, tokens in arrivals if tokens)
            if not counted:
                raise LaunchError(f"a request had no answer: {str(request['response_outputs'])[:300]}")
            yield _Request(request["timestamp"], counted)


def _tokens(output: dict[str, Any]) -> int:
    """How many tokens a response carries; the one that only closes a stream carries none."""
    if "response" in output:  # the raw server-sent event
        data = output["response"].removeprefix("data:").strip()
        output = json.loads(data) if data else {}
        if "error" in output:
            raise LaunchError(f"a request failed: {output['error']}")
    ids = output.get("output_ids", [])
    return len(ids) if isinstance(ids, list) else 1


def summarise(requests: Sequence[_Request], route: Route, level: Level, mode: Mode) -> LoadPoint:
    tokens = [sum(count for _, count in request.arrivals) for request in requests]
    first = np.array([request.arrivals[0][0] - request.start for request in requests]) / 1e6
    whole = np.array([request.arrivals[-1][0] - request.start for request in requests]) / 1e6
    # What the first response brought came at once; the others' tokens share the time after it.
    later = [
        (request.arrivals[-1][0] - request.arrivals[0][0]) / 1e6 / (count - request.arrivals[0][1])
        for request, count in zip(requests, tokens)
        if count > request.arrivals[0][1]
    ]
    seconds = (max(r.arrivals[-1][0] for r in requests) - min(r.start for r in requests)) / 1e9

    def percentile(values: Any, q: int) -> float:
        return round(float(np.percentile(values, q)), 3)

    return LoadPoint(
        route=route,
        mode=mode,
        concurrency=level.concurrency,
        rate=level.rate,
        requests=len(requests),
        requests_per_second=round(len(requests) / seconds, 4),
        tokens_per_second=round(sum(tokens) / seconds, 3),
        latency_p50=percentile(whole, 50),
        latency_p99=percentile(whole, 99),
        ttft_p50=percentile(first, 50),
        ttft_p99=percentile(first, 99),
        itl_p50=percentile(later, 50) if later else None,
        itl_p99=percentile(later, 99) if later else None,
    )


def write_results(folder: Path, plan: LoadPlan, points: Sequence[LoadPoint], **about: Any) -> None:
    """load.json, load.csv and load.png: latency over throughput, a line for each mode and route."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [asdict(point) for point in points]
    (folder / "load.json").write_text(json.dumps(about | {"plan": asdict(plan), "runs": runs}, indent=1) + "\n")
    with (folder / "load.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(LoadPoint)])
        writer.writeheader()
        writer.writerows(runs)
    _plot(folder / "load.png", points)


def _plot(file: Path, points: Iterable[LoadPoint]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[LoadPoint]] = {}
    for point in points:
        load = "requests in flight" if point.rate is None else "arrivals per second"
        lines.setdefault(f"{point.mode}, {point.route}, {load}", []).append(point)
    for name, line in lines.items():
        axes.plot([p.tokens_per_second for p in line], [p.latency_p50 / 1e3 for p in line], marker="o", label=name)
        for point in line:
            where = (point.tokens_per_second, point.latency_p50 / 1e3)
            axes.annotate(f"{point.concurrency or point.rate:g}", where, textcoords="offset points", xytext=(4, 4))
    axes.set(xlabel="tokens per second, all requests", ylabel="median latency of a request (s)", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
