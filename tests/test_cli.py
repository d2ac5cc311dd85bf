"""The command as people type it: its output, its errors and its exit status."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from saguaro import cli
from saguaro.commands import decoding
from saguaro.llm import LLM, Result, _with_overrides
from saguaro.orchestrator.config import (
    DeploymentConfig,
    DraftConfig,
    FanOutConfig,
    ModelConfig,
    SpeculationConfig,
    find_deployment,
    read_deployment,
)
from saguaro.orchestrator.types import SamplingParams, Setting


def saguaro(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "saguaro.cli", *arguments], capture_output=True, text=True, timeout=180
    )


def test_generate_json_and_trace(store: Path, tmp_path: Path, nothing_left: None) -> None:
    trace = tmp_path / "trace.json"
    done = saguaro(
        *("generate", "--deployment", "tiny", "--store", str(store), "--raw", "--json", "--trace", str(trace)),
        *("--temperature", "1", "--seed", "4", "--max-tokens", "30", "--lookahead", "2", "hello"),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "stats"}
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(answer["token_ids"]) == answer["stats"]["tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    wanted = "mode rounds tokens_per_second acceptance_length hit_rate e_hit e_miss t_p wait_ms"
    assert set(wanted.split()) <= set(answer["stats"])
    assert answer["stats"]["mode"] == "ssd"
    assert answer["stats"]["acceptance_length"] <= 3  # the lookahead was lowered to 2
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"verifier", "speculator", "sequences"}
    work = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in work} >= {"verify", "wait", "prepare"}
    assert all(event["dur"] >= 0 for event in work)


@pytest.fixture
def running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the deployment that all tests share instead of starting one."""
    monkeypatch.setattr(decoding, "start", lambda arguments: nullcontext(llm))


def test_generate_streams_then_says_one_line(
    llm: LLM, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []
    monkeypatch.setattr(
        "saguaro.llm.LLM", lambda *given, **options: started.append((given, options)) or nullcontext(llm)
    )
    options = ["--deployment", "tiny", "--store", str(store), "--mode", "sd", "--raw", "--seed", "4"]
    assert cli.main(["generate", *options, "--max-tokens", "8", "hello"]) == 0
    assert started == [(("tiny",), {"mode": "sd", "lookahead": None, "store": store})]
    config = read_deployment(find_deployment("tiny"))
    assert _with_overrides(config, "sd", None).speculation == replace(config.speculation, mode="sd")
    said = capsys.readouterr()
    assert said.out.endswith("\n")
    line = said.err.strip().splitlines()[-1]
    assert line.startswith("[ssd] ")  # the mode of the deployment that all tests share
    assert "tokens/s, acceptance length" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--n", "2"], "--n 2: more than one answer needs --json"),
        (["--logprobs", "1"], "--logprobs needs --json"),
        (["--compare", "--echo", "--trace", "x"], "--compare .* takes no --echo and --trace"),
        (["--trace", "/no/folder"], "--trace /no/folder cannot be written .No such file"),
    ],
)
def test_options_that_would_be_in_vain_are_refused_before_anything_is_loaded(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(decoding, "start")
    assert cli.main(["generate", *options, "hello"]) == 1
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.usefixtures("running")
def test_a_prompt_that_is_too_long_is_one_error_and_no_warning_before_it(
    llm: LLM, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm._tokenizer, "deprecation_warnings", {})  # each is said once
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert cli.main(["generate", "--raw", "hello " * 600]) == 1
    assert "tokens and the context holds 512" in capsys.readouterr().err
    assert not caplog.records


@pytest.mark.usefixtures("running")
def test_compare_says_whether_the_texts_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--raw", "--compare", "--max-tokens", "20", "hello"]) == 0
    said = capsys.readouterr().out
    assert "The 3 texts agree, token for token." in said
    _, in_turn, ahead = lines = said.splitlines()[-4:-1]
    assert [line.split()[0] for line in lines] == ["ar", "sd", "ssd"]
    assert "T_p" in ahead
    assert not any(name in in_turn for name in ("hit rate", "E_hit", "E_miss", "T_p"))  # nothing is prepared ahead


@pytest.mark.usefixtures("running")
def test_compare_says_where_a_text_ends_early(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(*arguments: object, mode: str, **order: object) -> list[Result]:
        return [replace(answer, token_ids=answer.token_ids[: 3 if mode == "ssd" else None])]

    answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))[0]
    monkeypatch.setattr(llm, "generate", cut)
    assert cli.main(["generate", "--raw", "--compare", "hello"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("ar and ssd part at token 3, not a near-tie: please report this.\n")


def test_compare_fixes_what_auto_has_found(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deployment as it is, then, when that has gone, one with nothing left to choose for each mode."""
    answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))[0]
    auto = replace(llm.config, speculation=SpeculationConfig(mode="auto", lookahead="auto", backup="auto"))
    best = [Setting("ar", 1, 0, "primary"), Setting("sd", 3, 0, "suffix"), Setting("ssd", 5, 12, "primary")]
    happened: list[object] = []

    class Recorder:
        store = None

        def __init__(self, config: DeploymentConfig = auto, store: Path | None = None) -> None:
            self.config = config
            happened.append(config.speculation)

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

        def close(self) -> None:
            happened.append("closed")

        def settings(self) -> list[Setting]:
            return best

        def generate(self, prompt: object, params: object, mode: str | None = None, **order: object) -> list[Result]:
            happened.append(mode)
            return [answer]

    monkeypatch.setattr(decoding, "start", lambda arguments: Recorder())
    monkeypatch.setattr("saguaro.llm.LLM", Recorder)
    assert cli.main(["generate", "--raw", "--compare", "--json", "hello"]) == 0
    found = json.loads(capsys.readouterr().out)
    in_turn = replace(auto.speculation, mode="sd", lookahead=3, backup="suffix")
    ahead = replace(auto.speculation, mode="ssd", lookahead=5, backup="primary")
    assert happened == [
        *(auto.speculation, None, None, "closed"),
        *(in_turn, "ar", "sd", "closed"),
        *(ahead, "ssd", "closed"),
        "closed",  # once more: harmless
    ]
    assert [run["run"] for run in found["runs"]] == ["auto", "ar", "sd", "ssd"]
    assert found["fixed"]["ssd"] == {"mode": "ssd", "lookahead": 5, "budget": 12, "backup": "primary"}
    assert cli.main(["generate", "--raw", "--compare", "hello"]) == 0
    said = capsys.readouterr().out
    assert "ssd was fixed at lookahead 5, budget 12, backup primary." in said
    assert said.endswith("The 4 texts agree, token for token.\n")


def test_a_fixed_deployment_has_nothing_left_to_choose() -> None:
    config = DeploymentConfig("x", ModelConfig("t"), DraftConfig("d"), SpeculationConfig(preset="pearl", mode="auto"))
    automatic = replace(config.speculation, lookahead="auto", fan_out=FanOutConfig(budget="auto"), backup="auto")
    fixed = replace(config, speculation=automatic).fixed(Setting("ssd", 7, 12, "defer")).speculation
    assert not fixed.adaptive
    assert (fixed.preset, fixed.mode, fixed.lookahead, fixed.budgets(), fixed.backup) == (
        None,
        "ssd",
        7,
        (12,),
        "defer",
    )
    written = replace(config, speculation=replace(automatic, fan_out=FanOutConfig(counts=(0, 2))))
    assert written.fixed(Setting("ssd", 7, 2, "none")).speculation.fan_out == FanOutConfig(counts=(0, 2))


@pytest.mark.usefixtures("running")
def test_chat_remembers_and_leaves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand again\n/clear\nhello\n/exit\n"))
    assert cli.main(["chat", "--seed", "1", "--max-tokens", "8"]) == 0
    answers = [part.strip() for part in capsys.readouterr().out.split("\n> ")[1:]]
    assert answers[0] == answers[3]  # forgotten, the same question has the same answer
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--deployment", "tinny", "x"], "did you mean tiny?"),
        (
            ["generate", "--deployment", "tiny", "--lookahead", "0", "x"],
            "lookahead must be `auto`, or between 1 and 32, got 0",
        ),
        (["generate", "--deployment", "tiny", "--temperature", "-1", "x"], "temperature must be between 0 (greedy)"),
        (["models", "pull", "qwen2.5-codr"], "qwen2.5-coder"),
        (["build", "tiny-targt"], "did you mean tiny-target?"),
    ],
)
def test_an_error_is_one_paragraph_and_status_1(
    arguments: list[str], message: str, store: Path, capsys: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    assert cli.main([*arguments[:1], *arguments[1:], "--store", str(store)]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("saguaro: ")
    assert "\n" not in error


def test_models_list(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    assert cli.main(["models", "list", "--json", "--store", str(store)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"qwen2.5-coder", "smollm2-135m"} <= set(rows)
    assert not rows["smollm2-135m"]["installed"]


COMMANDS = ("models", "build", "generate", "chat", "serve", "status", "stop", "top", "load")


@pytest.mark.parametrize(
    "command",
    [[], ["models", "pull"], *([name] for name in COMMANDS)],
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main([*command, "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert "usage: saguaro" in text
    assert "example:" in text or command in ([], ["models"])
