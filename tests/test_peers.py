"""Saguaro beside other engines: who is run when, what is made of it, and that a peer's answers are its models'."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fake_peer import FakePeer
from saguaro.bench.peers import __main__ as command
from saguaro.bench.peers.huggingface import HuggingFace
from saguaro.bench.peers.llama_cpp import LlamaCpp
from saguaro.bench.peers.measure import PeerPlan, PeerRun, measure
from saguaro.bench.peers.openvino import OpenVino
from saguaro.bench.peers.peer import Answer, Arrivals, Method, Pair
from saguaro.bench.peers.process import PeerProcess
from saguaro.bench.peers.record import Record
from saguaro.bench.peers.report import report
from saguaro.errors import ConfigError, EngineError
from saguaro.orchestrator.types import SamplingParams

if TYPE_CHECKING:
    from saguaro.llm import LLM

AR, SD, SSD = Method("ar"), Method("sd", 4), Method("ssd", 4)


def plan(**changes: Any) -> PeerPlan:
    rounds = {0: {"code": (1, 2), "chat": (3,)}, 1: {"code": (4,), "chat": (5,)}}
    return PeerPlan(**({"rounds": rounds, "ssd_lookahead": 4, "sd_lookaheads": (4,), "max_tokens": 16} | changes))


def run(peer: str, method: Method, speed: float, tokens: Sequence[int] = (1, 2, 3), **where: Any) -> PeerRun:
    return PeerRun(
        **({"peer": peer, "method": method, "kind": "code", "round": 0} | where), answer=Answer(tuple(tokens), speed)
    )


class InProcess:
    """In place of a process, where only the order matters."""

    def __init__(self, peer: FakePeer, methods: Sequence[Method]) -> None:
        self.peer = peer
        peer.load(methods)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def generate(self, method: Method, prompt: Sequence[int], max_tokens: int) -> Answer:
        return self.peer.generate(method, prompt, max_tokens)


def test_peers_take_turns_and_each_prompt_goes_through_all_methods() -> None:
    peers = [FakePeer("a"), FakePeer("b", modes=("ar",))]
    runs = list(measure(plan(), peers, {}, lambda text: None, InProcess))  # type: ignore[arg-type]
    assert [(r.round, r.peer, r.kind, r.method.mode) for r in runs] == [
        (0, "a", "code", "ar"),
        (0, "a", "code", "sd"),
        (0, "a", "chat", "sd"),
        (0, "a", "chat", "ar"),
        (0, "b", "code", "ar"),
        (0, "b", "chat", "ar"),
        (1, "b", "code", "ar"),
        (1, "b", "chat", "ar"),
        (1, "a", "code", "ar"),
        (1, "a", "code", "sd"),
        (1, "a", "chat", "sd"),
        (1, "a", "chat", "ar"),
    ]


def test_each_peer_has_a_process_of_its_own_and_what_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    peers = [FakePeer("good"), FakePeer("absent", why_missing="not installed: make it")]
    peers += [FakePeer(fails, fails=fails) for fails in ("load", "generate", "dies", "short")]
    failures: dict[str, str] = {}
    runs = list(measure(plan(rounds={0: {"code": (1,)}}), peers, failures, lambda text: None))
    assert {r.peer for r in runs} == {"good"}
    assert len({r.answer.token_ids[0] for r in runs} - {os.getpid()}) == 1
    assert failures == {
        "absent": "not installed: make it",
        "load": "load: ValueError: no such weights",
        "generate": "generate: ValueError: no such token",
        "dies": "dies: its process ended with status 3",
        "short": "short, ar: 15 tokens came where 16 were asked for",
    }
    out, err = capfd.readouterr()
    assert "libraries" not in out  # where a document may go
    assert "libraries" in err


def test_a_peer_that_fails_leaves_no_process() -> None:
    with PeerProcess(FakePeer(fails="generate"), [AR]) as process:
        pid = process._process.pid
        with pytest.raises(EngineError, match="no such token"):
            process.generate(AR, (1,), 4)
    assert not Path(f"/proc/{pid}").exists()


def test_speed_is_of_the_tokens_after_those_that_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.0, 13.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    arrivals = Arrivals()
    for tokens in ((1, 2), (), (3, 4, 5), (6,)):
        arrivals.add(tokens)
    assert arrivals.answer(2) == Answer((1, 2, 3, 4, 5, 6), tokens_per_second=4 / 3, acceptance_length=2.0)
    assert arrivals.answer().acceptance_length is None


def test_figures_are_medians_and_ratios_are_to_each_peers_fastest_over_the_same_prompts() -> None:
    peers = {"saguaro": {"precision": "exact"}, "theirs": {"precision": "Q4"}}
    runs = [
        run("saguaro", AR, 1.0),
        run("saguaro", SSD, 6.0),
        run("saguaro", SSD, 8.0, round=1),
        run("saguaro", SSD, 9.0, round=2),
    ]
    runs += [run("theirs", SD, 3.0, (1, 2, 9)), run("theirs", Method("sd", 8), 2.0), run("theirs", SD, 2.0, round=1)]
    document = report(runs, peers, {"absent": "not installed"})
    rows = {(row["peer"], row["mode"], row["lookahead"]): row for row in document["runs"]}
    assert rows["saguaro", "ssd", 4]["tokens_per_second"] == 8.0
    assert rows["saguaro", "ssd", 4]["quartiles"] == [7.0, 8.5]
    assert rows["theirs", "sd", 4]["precision"] == "Q4"
    assert [(row["of"], row["to"], row["median"], row["answers"]) for row in document["ratios"]] == [
        ("saguaro ssd K=4", "saguaro ar", 6.0, 1),
        ("saguaro ssd K=4", "theirs sd K=4", 3.0, 2),
    ]
    # Agreement: of the answers whose prompt plain decoding answered, too.
    assert rows["theirs", "sd", 4]["compared"] == 1
    assert (rows["theirs", "sd", 4]["same_answers"], rows["theirs", "sd", 4]["agreeing_tokens"]) == (0, 2)
    assert (rows["theirs", "sd", 8]["same_answers"], rows["theirs", "sd", 8]["agreeing_tokens"]) == (1, 3)
    assert document["not_measured"] == {"absent": "not installed"}


def test_answers_are_kept_and_added_to_under_the_same_conditions_only(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = Record(path, {"max_tokens": 3, "machine": {"cores": 2}}, "one", [FakePeer("ours")], add=False)
    first.add(run("ours", SSD, 6.0))
    second = Record(
        path, {"max_tokens": 3, "machine": {"cores": 2}}, "two", [FakePeer("theirs", why_missing="no")], add=True
    )
    assert second.runs == first.runs
    assert second.peers == {"ours": {"precision": "exact", "settings": "none", "version": "1"}}
    assert second.commands == ["one", "two"]
    with pytest.raises(ConfigError, match="is of another max_tokens: "):
        Record(path, {"max_tokens": 4, "machine": {"cores": 2}}, "three", [], add=True)
    with pytest.raises(ConfigError, match="Measure without --add first"):
        Record(tmp_path / "none.jsonl", {}, "one", [], add=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": {}}, "rounds must be at least 1"),
        ({"rounds": {0: {}}}, "rounds must be at least 1, and each have a prompt"),
        ({"max_tokens": 5}, "max_tokens must be at least 6, got 5"),
        ({"sd_lookaheads": (0,)}, "lookaheads must be 1 to 32"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(**change)


def test_hugging_face_gives_the_tokens_of_plain_decoding(llm: LLM, store: Path) -> None:
    pair = command.find_pair("tiny", store)
    prompt = llm.encode("def fib(n):")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    ours = llm.generate([prompt], params, mode="ar")[0].token_ids
    peer = HuggingFace(pair, 1, "float32")
    assert peer.missing() is None
    peer.load([AR, SD])
    plain, assisted = (peer.generate(method, prompt, 32) for method in (AR, SD))
    assert list(plain.token_ids) == list(assisted.token_ids) == ours
    assert plain.tokens_per_second is not None
    assert assisted.acceptance_length is not None
    assert 1 <= assisted.acceptance_length <= 5


@pytest.mark.parametrize(("kind", "package"), [(OpenVino, "openvino_genai"), (LlamaCpp, "xllamacpp")])
def test_peers_that_cannot_run_say_what_to_do(
    kind: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (2, tmp_path) if kind is OpenVino else (2,)
    files = Pair(tmp_path, tmp_path, Path("a-q4_k_m.gguf"), Path("b-q8_0.gguf"))
    monkeypatch.setattr("sys.path", [])
    assert kind(files, *options).missing() == "not installed: pip install saguaro-serving[peers]"
    (tmp_path / f"{package}.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert kind(files, *options).missing() is None
    assert kind(replace(files, draft_gguf=None), *options).missing() == "needs a pair that was built from GGUF files"
    assert kind(files, *options).precision.startswith("Q4_K_M and Q8_0")


def test_the_command_writes_what_it_measured(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fakes(arguments: Namespace, pair: Pair, store: Path) -> dict[str, list[Any]]:
        missing = FakePeer("llama.cpp", why_missing="not installed: build it")
        return {
            "saguaro": [FakePeer("saguaro", ("ar", "ssd"))],
            "llama.cpp": [missing],
            "openvino": [FakePeer("openvino")],
        }

    monkeypatch.setattr(command, "peers_of", fakes)
    base = ["tiny", "--store", str(store), "--out", str(tmp_path), "--rounds", "1", "--max-tokens", "8"]
    assert command.main([*base, "--peers", "saguaro", "llama.cpp"]) == 0
    assert command.main([*base, "--peers", "openvino", "--lookaheads", "2", "--add"]) == 0
    document = json.loads((tmp_path / "peers.json").read_text())
    assert {"runs", "ratios", "machine", "versions", "command", "not_measured"} <= document.keys()
    assert [(row["peer"], row["mode"], row["tokens_per_second"]) for row in document["runs"]] == [
        ("saguaro", "ar", 1.0),
        ("saguaro", "ssd", 4.0),
        ("openvino", "ar", 1.0),
        ("openvino", "sd", 3.0),
    ]
    assert len(document["runs"][0]["speeds"]) == 4  # a prompt of each kind
    assert document["not_measured"] == {"llama.cpp": "not installed: build it"}
    assert len(document["command"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"answers.jsonl", "peers.json", "peers.png"}
    shown = capsys.readouterr().out
    assert "not installed: build it" in shown
    assert command.main([*base[:-1], "9", "--add", "--peers", "saguaro"]) == 1
    assert "is of another max_tokens" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("others", [[], ["saguaro"]])
def test_a_peer_that_fails_is_an_error_when_everything_is_written(
    others: list[str],
    tmp_path: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fakes(arguments: Namespace, pair: Pair, store: Path) -> dict[str, list[Any]]:
        absent = FakePeer("llama.cpp", why_missing="not installed: build it", fails="load")
        return {
            "saguaro": [FakePeer("saguaro")],
            "openvino": [FakePeer("openvino", fails="load")],
            "llama.cpp": [absent],
        }

    monkeypatch.setattr(command, "peers_of", fakes)
    base = ["tiny", "--store", str(store), "--out", str(tmp_path), "--rounds", "1", "--max-tokens", "6"]
    assert command.main([*base, "--peers", "llama.cpp", "openvino", *others]) == 1
    document = json.loads((tmp_path / "peers.json").read_text())
    assert document["failed"] == ["openvino"]
    assert document["not_measured"]["openvino"] == "openvino: ValueError: no such weights"
    assert {row["peer"] for row in document["runs"]} == set(others)
    assert "no such weights" in " ".join(capsys.readouterr().out.split())


def test_other_weights_are_nothing_to_compare(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "weights", lambda pair: [os.urandom(4).hex()])
    assert command.main(["tiny", "tiny", "--store", str(store), "--out", str(tmp_path)]) == 1
    assert "has other weights than tiny" in " ".join(capsys.readouterr().err.split())
