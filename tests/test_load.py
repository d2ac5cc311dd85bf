"""The load test: what it asks perf_analyzer for, what it makes of the answer, and a sweep with the real tool."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from saguaro.bench.load import LoadPlan, read_prompts, run_load, shipped_prompts, write_results
from saguaro.bench.perf_analyzer import perf_analyzer
from saguaro.cache import cache_folder
from saguaro.errors import ConfigError, LaunchError
from serving import Served

MS = 1_000_000


@pytest.fixture(scope="session")
def tools() -> Path:
    """Where perf_analyzer is kept: in the user's own cache, because it is fetched and never changes."""
    try:
        perf_analyzer(cache_folder())
    except LaunchError as error:
        pytest.skip(f"NOT TESTED: perf_analyzer cannot be had on this machine: {error}")
    return cache_folder()


# Stands where perf_analyzer would: notes how it was called and exports what the test laid out.
TOOL = """
import json, pathlib, sys
here = pathlib.Path(sys.argv[1])
arguments = sys.argv[2:]
inputs = json.loads(pathlib.Path(arguments[arguments.index("--input-data") + 1]).read_text())
with (here / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps({"arguments": arguments, "inputs": inputs}) + "\\n")
export = pathlib.Path(arguments[arguments.index("--profile-export-file") + 1])
export.write_text((here / "export.json").read_text())
sys.exit(int((here / "status").read_text()) if (here / "status").exists() else 0)
"""


def scripted_tool(folder: Path, requests: list[dict[str, object]]) -> list[str]:
    (folder / "tool.py").write_text(TOOL)
    (folder / "export.json").write_text(json.dumps({"experiments": [{"requests": requests}]}))
    return [sys.executable, str(folder / "tool.py"), str(folder)]


def request(start_ms: int, arrivals: list[tuple[int, list[int]]]) -> dict[str, object]:
    return {
        "timestamp": start_ms * MS,
        "response_timestamps": [time * MS for time, _ in arrivals],
        "response_outputs": [{"output_ids": ids} if ids else {} for _, ids in arrivals],
    }


def measure(plan: LoadPlan, tool: list[str]) -> list[object]:
    return list(run_load(plan, tool=tool, http="h:1", grpc="g:2", encode=lambda text: [len(text)]))


def calls(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_figures_of_a_level(tmp_path: Path) -> None:
    """Two requests over one second: five tokens and one; the response that only closes a stream counts for nothing."""
    requests = [
        request(0, [(100, [1]), (200, [2, 3]), (500, [4, 5]), (501, [])]),
        request(400, [(1000, [6])]),
    ]
    plan = LoadPlan(("hello",), modes=("ssd",), concurrencies=(2,))
    (point,) = measure(plan, scripted_tool(tmp_path, requests))
    assert (point.route, point.mode, point.concurrency, point.rate, point.requests) == (
        "ensemble-grpc",
        "ssd",
        2,
        None,
        2,
    )
    assert (point.requests_per_second, point.tokens_per_second) == (2.0, 6.0)
    assert (point.ttft_p50, point.latency_p50) == (350.0, 550.0)
    assert point.ttft_p99 == pytest.approx(100 + 0.99 * 500)
    assert (point.itl_p50, point.itl_p99) == (100.0, 100.0)  # 400 ms over the four tokens after the first


def test_levels_modes_and_routes_are_asked_for(tmp_path: Path) -> None:
    tool = scripted_tool(tmp_path, [request(0, [(5, [1])])])
    plan = LoadPlan(
        ("hello", "you"),
        modes=("ar", "ssd"),
        routes=("ensemble-grpc", "ssd-grpc"),
        concurrencies=(1,),
        rates=(0.5,),
        max_tokens=7,
        window=5,
    )
    points = measure(plan, tool)
    assert [(p.route, p.concurrency, p.rate, p.mode) for p in points] == [
        (route, concurrency, rate, mode)
        for route in ("ensemble-grpc", "ssd-grpc")
        for concurrency, rate in ((1, None), (None, 0.5))
        for mode in ("ar", "ssd")
    ]
    first, *_, last = calls(tmp_path)
    assert first["arguments"][:6] == ["-m", "ensemble", "-i", "grpc", "--streaming", "-u"]
    assert ("--concurrency-range", "1") in zip(first["arguments"], first["arguments"][1:])
    assert ("--measurement-request-count", "5") in zip(first["arguments"], first["arguments"][1:])
    assert ("--request-rate-range", "0.5") in zip(last["arguments"], last["arguments"][1:])
    assert [entry["speculation_mode"] for entry in first["inputs"]["data"]] == [["ar"], ["ar"]]
    assert json.loads(first["inputs"]["data"][1]["messages"][0]) == [{"role": "user", "content": "you"}]
    assert last["inputs"]["data"][0]["input_ids"] == {"content": [5], "shape": [1]}
    assert last["inputs"]["data"][0]["max_tokens"] == [7]


def test_server_sent_events_are_read(tmp_path: Path) -> None:
    events = ['data: {"output_ids":[3,4]}\n\n', 'data: {"output_ids":5}\n\n', ""]
    answer = {
        "timestamp": 0,
        "response_timestamps": [MS, 3 * MS, 4 * MS],
        "response_outputs": [{"response": e} for e in events],
    }
    plan = LoadPlan(("hello",), modes=("sd",), routes=("ensemble-http",), concurrencies=(1,))
    (point,) = measure(plan, scripted_tool(tmp_path, [answer]))
    assert (point.ttft_p50, point.latency_p50, point.itl_p50) == (1.0, 3.0, 2.0)
    assert calls(tmp_path)[0]["inputs"]["data"][0]["payload"][0]["max_tokens"] == 64


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"response": 'data: {"error":"queue full"}'}, "queue full"),
        ({}, "no answer"),
    ],
)
def test_a_failed_request_fails_the_level(tmp_path: Path, answer: dict[str, str], said: str) -> None:
    failed = {"timestamp": 0, "response_timestamps": [MS], "response_outputs": [answer]}
    with pytest.raises(LaunchError, match=said):
        measure(LoadPlan(("hello",)), scripted_tool(tmp_path, [failed]))


def test_a_failing_tool_is_quoted(tmp_path: Path) -> None:
    tool = scripted_tool(tmp_path, [])
    (tmp_path / "status").write_text("99")
    with pytest.raises(LaunchError, match="status 99"):
        measure(LoadPlan(("hello",)), tool)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"prompts": ()}, "prompts"),
        ({"concurrencies": (0,)}, "concurrencies"),
        ({"concurrencies": ()}, "concurrencies"),
        ({"rates": (-1.0,)}, "rates"),
        ({"routes": ("carrier pigeon",)}, "routes"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"window": 0}, "window"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} must be"):
        LoadPlan(**{"prompts": ("hello",)} | wrong)


def test_prompts(tmp_path: Path) -> None:
    assert len(shipped_prompts()) >= 16
    assert all(isinstance(prompt, str) for prompt in shipped_prompts())
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "prompts.txt") == ("one", "two")
    with pytest.raises(ConfigError, match=r"missing\.txt"):
        read_prompts(tmp_path / "missing.txt")


def test_results_are_written(tmp_path: Path) -> None:
    plan = LoadPlan(("hello",), modes=("ar", "ssd"), concurrencies=(1, 2))
    tool = scripted_tool(tmp_path, [request(0, [(5, [1]), (9, [2])])])
    points = measure(plan, tool)
    write_results(tmp_path / "out", plan, points, deployment="tiny")
    written = json.loads((tmp_path / "out/load.json").read_text())
    assert (written["deployment"], len(written["runs"]), written["plan"]["max_tokens"]) == ("tiny", 4, 64)
    with (tmp_path / "out/load.csv").open() as file:
        assert [row["mode"] for row in csv.DictReader(file)] == ["ar", "ssd", "ar", "ssd"]
    assert (tmp_path / "out/load.png").read_bytes()[:4] == b"\x89PNG"


def test_the_real_tool_sweeps_the_real_server(served: Served, tools: Path) -> None:
    """Every route, and 1 and 8 requests in flight over gRPC: no request fails, and every answer is complete."""
    about = {"prompts": ("hello there", "a somewhat longer prompt"), "max_tokens": 12, "window": 2}
    plans = [
        LoadPlan(**about, concurrencies=(1, 8), modes=("ssd",)),
        LoadPlan(**about, concurrencies=(2,), routes=("ensemble-http", "ssd-grpc"), modes=("ar",)),
        LoadPlan(**about, concurrencies=(), rates=(4.0,), modes=("sd",)),
    ]
    server = served.server
    http, grpc = f"{server.host}:{server.http_port}", f"{server.host}:{server.grpc_port}"
    tool = perf_analyzer(tools)
    encode = served.llm.encode
    points = [p for plan in plans for p in run_load(plan, tool=tool, http=http, grpc=grpc, encode=encode)]
    assert len(points) == 5
    for point in points:
        assert point.requests > 0
        tokens = point.tokens_per_second / point.requests_per_second
        assert tokens == pytest.approx(12, rel=1e-3)  # of every answer: the ends of the model are ignored
        assert 0 < point.ttft_p50 <= point.latency_p50 <= point.latency_p99
    served.until_idle()
