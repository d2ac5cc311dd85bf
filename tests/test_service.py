"""The leader's loop over its real socket, in a thread, on exact tables and without a speculator."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from byte_tokenizer import byte_level
from conftest import in_loop
from saguaro.engines.base import ForwardBatch, ForwardOutput
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import CapacityError, ConfigError, DrainingError, EngineError, LinkError
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig, ModelConfig, ServingConfig, SpeculationConfig
from saguaro.orchestrator.grammar import Grammars, GrammarState
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.service_protocol import Tokens
from saguaro.orchestrator.target import EngineTarget
from saguaro.orchestrator.types import SamplingParams, Setting

TOKENIZER = byte_level()
CHAIN = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]  # 0 1 2 3 0 …
FLAT = [[1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2], [2, 1, 1, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ENDLESS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Where a running service listens."""
    with service(tmp_path / "socket"):
        yield tmp_path / "socket"


@contextmanager
def service(
    socket: Path, weights: list[list[int]] = CHAIN, limit: int | None = None, grammars: Grammars | None = None
) -> Iterator[Service]:
    """A service in a thread until the block ends; with a `limit` it dies without a word after that many rounds."""
    config = DeploymentConfig(
        "test",
        ModelConfig("none"),
        speculation=SpeculationConfig(mode="ar"),
        serving=ServingConfig(max_sequences=2, max_batch_tokens=8, max_queue=16),
    )
    engine = ScriptedEngine(markov_table([[Fraction(w, sum(row)) for w in row] for row in weights]), 4, 64, 4, 20)
    running = Service(
        config,
        EngineTarget(engine, "coupled"),
        BlockPool(4, 4),
        (3,),
        socket,
        lambda: None,
        TOKENIZER if grammars else None,
        grammars,
    )
    if limit is not None:
        step = running._round

        left = iter(range(limit, -1, -1))

        def round_or_end(batch: list[Sequence]) -> None:
            running._running = next(left) > 0
            if running._running:
                step(batch)

        running._round = round_or_end  # type: ignore[method-assign]
    thread = threading.Thread(target=running.run)
    thread.start()
    yield running
    if limit is None:
        asyncio.run(stop(socket))
    thread.join(20)
    assert not thread.is_alive()


async def stop(socket: Path) -> None:
    async with connect(socket) as client:
        await client.shutdown()


@asynccontextmanager
async def connect(socket: Path) -> AsyncIterator[Client]:
    client = Client(socket, patience=30)
    try:
        yield client
    finally:
        await client.close()


async def tokens(client: Client, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    return [token async for event in client.stream(prompt, params, **options) for token in event.tokens]


@in_loop
async def test_many_requests_from_two_clients_stream_at_once(socket: Path) -> None:
    endless = replace(GREEDY, max_tokens=5, ignore_eos=True)
    async with connect(socket) as one, connect(socket) as two:
        answers = await asyncio.gather(
            tokens(one, [0], endless), tokens(one, [1], endless), tokens(two, [3]), tokens(one, [2], endless)
        )
        assert answers == [[1, 2, 3, 0, 1], [2, 3, 0, 1, 2], [0, 1, 2, 3], [3, 0, 1, 2, 3]]
        status = await one.status()
        assert (status.running, status.waiting, status.free_target_blocks) == (0, 0, 20)


@in_loop
async def test_a_request_larger_than_a_message_is_refused_before_it_is_sent(socket: Path) -> None:
    async with connect(socket) as client:
        with pytest.raises(ConfigError, match=r"the request has \d+ bytes and the limit is 16777216: shorten it"):
            await tokens(client, [2**31] * 4_000_000)
        assert await tokens(client, [0]) == [1, 2, 3]


@in_loop
async def test_more_requests_than_may_run_wait_their_turn(socket: Path) -> None:
    async with connect(socket) as client:
        assert await asyncio.gather(*(tokens(client, [0]) for _ in range(9))) == [[1, 2, 3]] * 9


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ([], GREEDY, {}, "the prompt has no tokens"),
        ([4], GREEDY, {}, "token ids outside 0 to 3"),
        ([0] * 64, GREEDY, {}, "the context holds 64"),
        ([0], GREEDY, {"mode": "ssd"}, "mode 'ssd' is more than this deployment's 'ar'"),
        ([0], GREEDY, {"timeout_s": 0.0}, "timeout_s must be above 0, or left out for no limit, got 0.0"),
        ([0], GREEDY, {"timeout_s": float("nan")}, "timeout_s must be above 0"),
        ([0], GREEDY, {"lookahead": 5}, "lookahead must be between 1 and this deployment's 4, got 5"),
        ([0], SamplingParams(logit_bias={7: 1.0}), {}, "logit_bias names token id 7"),
        ([0], SamplingParams(n=2), {}, "a request has one answer"),
        ([0], SamplingParams(regex="a"), {}, "need a tokenizer"),
        ([0], SamplingParams(stop=("x",)), {}, "need a tokenizer"),
    ],
)
@in_loop
async def test_a_request_that_cannot_be_served_is_refused_alone(
    socket: Path, prompt: list[int], params: SamplingParams, options: dict[str, Any], message: str
) -> None:
    async with connect(socket) as client:
        before, refused, after = await asyncio.gather(
            tokens(client, [0]), tokens(client, prompt, params, **options), tokens(client, [1]), return_exceptions=True
        )
        assert (before, after) == ([1, 2, 3], [2, 3])
        assert isinstance(refused, ConfigError)
        assert message in str(refused)


@in_loop
async def test_leaving_a_stream_cancels_it(socket: Path) -> None:
    async with connect(socket) as client:
        stream = client.stream([0], ENDLESS)
        assert (await anext(stream)).tokens == [1]
        await stream.aclose()
        status = await client.status()
        assert (status.running, status.free_target_blocks) == (0, 20)
        assert await tokens(client, [0]) == [1, 2, 3]


@in_loop
async def test_a_vanished_client_takes_its_requests_along(socket: Path) -> None:
    async with connect(socket) as client:
        async with connect(socket) as vanishing:
            working = [asyncio.create_task(tokens(vanishing, [0], ENDLESS)) for _ in range(5)]
            while (status := await client.status()).running + status.waiting < 5:
                await asyncio.sleep(0.01)
        for task in working:
            task.cancel()
        assert await tokens(client, [0]) == [1, 2, 3]
        while (status := await client.status()).running + status.waiting:
            await asyncio.sleep(0.01)
        assert status.free_target_blocks == 20
        text = await client.metrics()
        assert 'saguaro_requests_finished_total{reason="cancelled"} 5.0' in text
        assert 'saguaro_requests_finished_total{reason="stop"} 1.0' in text
        assert await client.settings() == [Setting("ar", 4, 0, "primary")]


@in_loop
async def test_a_client_that_reads_late_loses_nothing(socket: Path) -> None:
    async with connect(socket) as slow, connect(socket) as other:
        streams = [slow.stream([0], replace(ENDLESS, max_tokens=50)) for _ in range(16)]
        first = await asyncio.gather(*(anext(stream) for stream in streams))
        assert await tokens(other, [0]) == [1, 2, 3]  # nobody waits for the slow one's reading
        while (await other.status()).running:
            await asyncio.sleep(0.01)
        rest = [[event async for event in stream] for stream in streams]
        assert [1 + len(events) for events in rest] == [50] * 16
        assert len(first) == 16


@in_loop
async def test_a_request_ends_at_its_deadline_waiting_or_running(socket: Path) -> None:
    async with connect(socket) as client:
        running = [asyncio.create_task(tokens(client, [0], ENDLESS)) for _ in range(2)]
        await asyncio.sleep(0)
        events = [event async for event in client.stream([0], ENDLESS, timeout_s=1e-9)]
        assert [(event.tokens, event.finish_reason) for event in events] == [([], "timeout")]
        assert events[-1].stats is not None
        assert await tokens(client, [0], timeout_s=1e9) == [1, 2, 3]
        assert [len(answer) for answer in await asyncio.gather(*running)] == [60, 60]
        assert (await client.status()).free_target_blocks == 20


@in_loop
async def test_a_running_request_keeps_what_it_has_at_its_deadline(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(socket) as client:
        stream = client.stream([0], ENDLESS, timeout_s=1e6)
        got = (await anext(stream)).tokens
        # The service's clock alone: the client, in the same process, goes by the real one.
        ahead = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e7, perf_counter_ns=time.perf_counter_ns)
        monkeypatch.setattr("saguaro.orchestrator.service.time", ahead)
        rest = [event async for event in stream]
        monkeypatch.undo()
        assert rest[-1].finish_reason == "timeout"
        got = got + [token for event in rest for token in event.tokens]
        assert len(got) < 60
        assert got == [(i + 1) % 4 for i in range(len(got))]
        assert await tokens(client, [0]) == [1, 2, 3]


@in_loop
async def test_a_full_queue_refuses_and_serves_the_others(socket: Path) -> None:
    async with connect(socket) as client:
        answers = await asyncio.gather(*(tokens(client, [0], ENDLESS) for _ in range(40)), return_exceptions=True)
        served = [answer for answer in answers if isinstance(answer, list)]
        refused = [answer for answer in answers if isinstance(answer, CapacityError)]
        assert len(served) + len(refused) == 40
        assert all(len(answer) == 60 for answer in served)
        assert all("serving.max_queue is 16" in str(error) for error in refused)
        assert len(served) >= 18
        assert len(refused) >= 1
        text = await client.metrics()
        assert f'saguaro_requests_refused_total{{reason="capacity"}} {len(refused)}.0' in text
        assert f'saguaro_requests_finished_total{{reason="length"}} {len(served)}.0' in text
        assert f"saguaro_generated_tokens_total {60 * len(served)}.0" in text
        assert f"saguaro_queue_seconds_count {len(served)}.0" in text


@in_loop
async def test_a_context_is_usable_to_its_last_token_and_its_prefix_is_cached(socket: Path) -> None:
    """I-16: a prompt one short of the context, in chunks of 8, without a limit of its own."""
    async with connect(socket) as client:
        for _ in range(2):
            params = SamplingParams(temperature=0, ignore_eos=True)
            events = [event async for event in client.stream([0] * 63, params)]
            assert [(event.tokens, event.finish_reason) for event in events] == [([1], "length")]
        assert await tokens(client, [0]) == [1, 2, 3]
        status = await client.status()
        assert (status.cached_target_blocks, status.free_target_blocks, status.preemptions) == (15, 20, 0)


@in_loop
async def test_requests_that_outgrow_the_pool_take_turns(socket: Path) -> None:
    async with connect(socket) as client:
        answers = await asyncio.gather(*(tokens(client, [start], ENDLESS) for start in (0, 1)))  # 16 blocks each of 20
        assert answers == [[(start + 1 + i) % 4 for i in range(60)] for start in (0, 1)]
        status = await client.status()
        assert status.preemptions >= 1
        assert (status.running, status.free_target_blocks) == (0, 20)


@in_loop
async def test_garbage_from_a_client_disturbs_nobody(socket: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"ipc://{socket}")
        for frames in ([b""], [b"\x80"], [b"\x93\x01\x02\x03"], [b"x" * 1000], [b"two", b"frames"]):
            stranger.send_multipart(frames)
        async with connect(socket) as client:
            assert await tokens(client, [0]) == [1, 2, 3]


def test_streams_go_on_where_they_were_when_another_service_takes_over(tmp_path: Path) -> None:
    """The client resubmits prompt and delivered tokens; with its own seed the text is that of an undisturbed run."""
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=8)

    async def work() -> list[list[int]]:
        async with connect(tmp_path / "socket") as client:
            return await asyncio.gather(*(tokens(client, [start], params) for start in (0, 1, 2)))

    with service(tmp_path / "socket", FLAT):
        undisturbed = asyncio.run(work())
    with ThreadPoolExecutor() as pool:
        with service(tmp_path / "socket", FLAT, limit=40):
            working = pool.submit(asyncio.run, work())
        assert not working.done()
        with service(tmp_path / "socket", FLAT):
            assert working.result(60) == undisturbed
    assert [len(tokens) for tokens in undisturbed] == [60] * 3


def test_what_an_earlier_service_took_is_not_refused_for_a_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saguaro.orchestrator.client._SILENCE", 0.2)
    full = threading.Event()

    async def fill() -> None:
        """As much as a new service takes, and then hold it until the resumed request waits as well."""
        async with connect(tmp_path / "socket") as client:
            others = [asyncio.create_task(tokens(client, [0], ENDLESS)) for _ in range(18)]
            while (await client.status()).waiting < 16:
                await asyncio.sleep(0.01)
            with pytest.raises(CapacityError, match="the queue is full"):
                await tokens(client, [0])
            full.set()
            async with asyncio.timeout(20):
                while (await client.status()).waiting < 17:
                    await asyncio.sleep(0.01)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def work() -> list[int]:
        async with connect(tmp_path / "socket") as client:
            return await tokens(client, [0], ENDLESS)

    with ThreadPoolExecutor() as pool:
        with service(tmp_path / "socket", limit=5):
            working = pool.submit(asyncio.run, work())
        monkeypatch.setattr(Client, "_resubmit", held_until(full, Client._resubmit))
        with service(tmp_path / "socket") as second:
            step = second._round
            second._round = lambda batch: (time.sleep(0.02), step(batch))  # type: ignore[assignment, method-assign]
            pool.submit(asyncio.run, fill()).result(60)
            second._round = step  # type: ignore[method-assign]
            assert working.result(60) == [1, 2, 3, 0] * 15


def held_until(event: threading.Event, resubmit: Callable[[Client], Coroutine[Any, Any, None]]) -> Any:
    async def later(client: Client) -> None:
        await asyncio.to_thread(event.wait)
        await resubmit(client)

    return later


def test_an_answer_that_is_over_is_not_generated_again_by_another_service(tmp_path: Path) -> None:
    """Also when its reader has yet to see the end."""
    over, replaced = threading.Event(), threading.Event()

    async def work() -> list[Tokens]:
        async with connect(tmp_path / "socket") as client:
            reader = client.stream([0], GREEDY)
            events = [await anext(reader)]
            while client._requests:
                await asyncio.sleep(0.01)
            over.set()
            await asyncio.to_thread(replaced.wait)
            before = client._epoch
            assert (await client.status()).epoch != before
            return events + [event async for event in reader]

    with ThreadPoolExecutor() as pool:
        with service(tmp_path / "socket"):
            working = pool.submit(asyncio.run, work())
            assert over.wait(20)
        with service(tmp_path / "socket") as second:
            replaced.set()
            events = working.result(20)
            assert second._next_id == 0
    assert [token for event in events for token in event.tokens] == [1, 2, 3]


def test_a_resumed_request_has_only_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[Tokens]:
        client = Client(tmp_path / "socket", patience=1e9)
        try:
            return [event async for event in client.stream([0], ENDLESS, timeout_s=1e6)]
        finally:
            await client.close()

    with ThreadPoolExecutor() as pool:
        with service(tmp_path / "socket", limit=5):
            working = pool.submit(asyncio.run, work())
        # The client's clock alone: to the second service the request is as new as any.
        monkeypatch.setattr(
            "saguaro.orchestrator.client.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e7)
        )
        with service(tmp_path / "socket"):
            events = working.result(60)
    assert events[-1].finish_reason == "timeout"
    assert [token for event in events for token in event.tokens] == [1, 2, 3, 0]  # the fifth was not sent yet


class Gated(Grammars):
    """Compiles when it is told to: a grammar that takes as long as the test wants."""

    def __init__(self, folder: Path) -> None:
        TOKENIZER.save(str(folder / "tokenizer.json"))
        super().__init__(folder / "tokenizer.json", TOKENIZER.get_vocab_size(), (0,))
        self.gate = threading.Event()

    def start(self, params: SamplingParams) -> GrammarState | None:
        assert self.gate.wait(60)
        return super().start(params)


def test_a_grammar_that_compiles_slowly_holds_up_nobody_else(tmp_path: Path) -> None:
    grammars = Gated(tmp_path)
    params = replace(ENDLESS, max_tokens=9, regex=re.escape(TOKENIZER.decode([1, 2])))

    async def work() -> None:
        async with connect(tmp_path / "socket") as client:
            structured = asyncio.create_task(tokens(client, [0], params))
            leaving = client.stream([0], params)
            left = asyncio.create_task(anext(leaving))
            overdue = asyncio.create_task(tokens(client, [0], params, timeout_s=0.2))
            assert await tokens(client, [0]) == [1, 2, 3]
            assert await overdue == []
            while (await client.status()).waiting < 2:
                await asyncio.sleep(0.01)
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left
            while (await client.status()).waiting > 1:
                await asyncio.sleep(0.01)
            assert not structured.done()
            grammars.gate.set()
            assert await structured == [1, 2]
            assert (await client.status()).free_target_blocks == 20
            with pytest.raises(ConfigError, match="regex cannot be used"):
                await tokens(client, [0], replace(params, regex="[a"))
            assert await tokens(client, [0]) == [1, 2, 3]

    with service(tmp_path / "socket", grammars=grammars):
        asyncio.run(work())


def test_a_grammar_that_takes_too_long_is_refused_and_so_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saguaro.orchestrator.service._COMPILE_S", 0.3)
    grammars = Gated(tmp_path)
    params = replace(ENDLESS, regex="x")

    async def work() -> None:
        async with connect(tmp_path / "socket") as client:
            refused = await asyncio.gather(*(tokens(client, [0], params) for _ in range(18)), return_exceptions=True)
            said = Counter(str(error).partition(":")[0] for error in refused)
            assert said["the grammar was not compiled within 0.3 s"] == 1
            assert sum(count for text, count in said.items() if "the grammars of other requests" in text) == 15
            assert sum(count for text, count in said.items() if "serving.max_queue is 16" in text) == 2
            assert await tokens(client, [0]) == [1, 2, 3]
            grammars.gate.set()

    with service(tmp_path / "socket", grammars=grammars):
        asyncio.run(work())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_forward_that_fails_takes_no_tokens_along(tmp_path: Path) -> None:
    """On a device what a round has emitted is streamed behind the next launch, also if there is none."""
    with service(tmp_path / "socket", limit=10) as running:
        target = running._verifier.target
        assert isinstance(target, EngineTarget)
        target.asynchronous = True
        forward, left = target._engine.forward, iter(range(2))

        def fails(batch: ForwardBatch) -> ForwardOutput:
            if next(left, None) is None:
                raise EngineError("the device is lost")
            return forward(batch)

        target._engine.forward = fails  # type: ignore[method-assign]

        async def work() -> None:
            async with connect(tmp_path / "socket") as client:
                stream = client.stream([0], ENDLESS)
                assert [(await anext(stream)).tokens for _ in range(2)] == [[1], [2]]

        asyncio.run(work())


@in_loop
async def test_a_service_that_does_not_answer_is_said(tmp_path: Path) -> None:
    async with connect(tmp_path / "nobody") as client:
        with pytest.raises(LinkError, match="did not answer within 0.2 s"):
            await client.status(timeout=0.2)
        with pytest.raises(LinkError, match="did not answer within 0.2 s"):
            await client.metrics(timeout=0.2)


@in_loop
async def test_a_service_that_falls_silent_ends_every_stream(tmp_path: Path) -> None:
    client = Client(tmp_path / "nobody", patience=0.3)
    with pytest.raises(LinkError):
        await tokens(client, [0])
    with pytest.raises(LinkError):  # and those that come later
        await tokens(client, [0])
    await client.close()


@in_loop
async def test_a_draining_service_finishes_what_it_has_and_takes_nothing_new(socket: Path) -> None:
    async with connect(socket) as client:
        alone = await tokens(client, [0], ENDLESS)
        stream = client.stream([0], ENDLESS)
        first = await anext(stream)
        await client.drain()
        with pytest.raises(DrainingError, match="shutting down"):
            await tokens(client, [1])
        assert first.tokens + [token async for event in stream for token in event.tokens] == alone


def test_draining_at_once_ends_what_runs_with_the_reason(tmp_path: Path) -> None:
    async def drain() -> None:
        async with connect(tmp_path / "slow") as client:
            streams = [client.stream([0], ENDLESS) for _ in range(3)]  # two run, one waits
            waiting = [asyncio.create_task(_all(stream)) for stream in streams]
            while (await client.status()).running != 2:
                await asyncio.sleep(0.01)
            await client.drain(end=True)
            for ended in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(ended, DrainingError)
                assert "shutting down" in str(ended)
            status = await client.status()
            assert (status.running, status.waiting, status.free_target_blocks) == (0, 0, status.target_blocks)

    with service(tmp_path / "slow") as slow:
        step = slow._round

        def slowly(batch: list[Sequence]) -> None:
            time.sleep(0.02)
            step(batch)

        slow._round = slowly  # type: ignore[method-assign]
        asyncio.run(drain())


async def _all(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]
