"""The leader's loop over its real socket, in a thread, on exact tables and without a speculator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import CapacityError, ConfigError, LinkError
from saguaro.orchestrator.client import Client
from saguaro.orchestrator.config import DeploymentConfig, ModelConfig, ServingConfig, SpeculationConfig
from saguaro.orchestrator.kv_blocks import BlockPool
from saguaro.orchestrator.service import Service
from saguaro.orchestrator.target import EngineTarget
from saguaro.orchestrator.types import SamplingParams

CHAIN = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]  # 0 1 2 3 0 …
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[], Client]]:
    """A running service; call the fixture for one more client."""
    config = DeploymentConfig(
        "test",
        ModelConfig("none"),
        speculation=SpeculationConfig(mode="ar"),
        serving=ServingConfig(max_sequences=2, max_batch_tokens=8, max_queue=16),
    )
    engine = ScriptedEngine(markov_table(CHAIN), 4, 64, 4, 20)
    service = Service(config, EngineTarget(engine, "coupled"), BlockPool(4, 4), (3,), tmp_path / "socket", lambda: None)
    thread = threading.Thread(target=service.run)
    thread.start()
    clients: list[Client] = []

    def client() -> Client:
        clients.append(Client(tmp_path / "socket", lambda: None))
        return clients[-1]

    yield client
    client().shutdown()
    thread.join(20)
    for one in clients:
        one.close()
    assert not thread.is_alive()


def tokens(client: Client, request: int) -> list[int]:
    return [token for event in client.stream(request) for token in event.tokens]


def test_many_requests_from_two_clients_stream_in_any_order(connect: Callable[[], Client]) -> None:
    one, two = connect(), connect()
    mine = [one.submit([start], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)) for start in (0, 1, 2)]
    other = two.submit([3], GREEDY)
    assert tokens(one, mine[2]) == [3, 0, 1, 2, 3]
    assert tokens(two, other) == [0, 1, 2, 3]  # ends at the stop id
    assert tokens(one, mine[0]) == [1, 2, 3, 0, 1]
    assert tokens(one, mine[1]) == [2, 3, 0, 1, 2]
    status = one.status()
    assert (status.running, status.waiting, status.free_target_blocks) == (0, 0, 20)


def test_more_requests_than_may_run_wait_their_turn(connect: Callable[[], Client]) -> None:
    client = connect()
    requests = [client.submit([0], GREEDY) for _ in range(9)]
    assert [tokens(client, request) for request in requests] == [[1, 2, 3]] * 9


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error", "message"),
    [
        ([], GREEDY, {}, ConfigError, "the prompt has no tokens"),
        ([4], GREEDY, {}, ConfigError, "token ids outside 0 to 3"),
        ([0] * 64, GREEDY, {}, ConfigError, "the context holds 64"),
        ([0], GREEDY, {"mode": "ssd"}, ConfigError, "mode 'ssd' is more than this deployment's 'ar'"),
        ([0], GREEDY, {"timeout_s": 0.0}, ConfigError, "timeout_s must be above 0, or left out for no limit, got 0.0"),
        ([0], GREEDY, {"timeout_s": float("nan")}, ConfigError, "timeout_s must be above 0"),
        ([0], GREEDY, {"lookahead": 5}, ConfigError, "lookahead must be between 1 and this deployment's 4, got 5"),
        ([0], SamplingParams(logit_bias={7: 1.0}), {}, ConfigError, "logit_bias names token id 7"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(
    connect: Callable[[], Client],
    prompt: list[int],
    params: SamplingParams,
    options: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    client = connect()
    before, bad, after = (
        client.submit([0], GREEDY),
        client.submit(prompt, params, **options),
        client.submit([1], GREEDY),
    )  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        tokens(client, bad)
    assert tokens(client, before) == [1, 2, 3]
    assert tokens(client, after) == [2, 3]


def test_cancel_ends_a_stream_and_frees_it(connect: Callable[[], Client]) -> None:
    client = connect()
    request = client.submit([0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    stream = client.stream(request)
    next(stream)
    client.cancel(request)
    events = list(stream)
    assert events[-1].finish_reason == "cancelled"
    assert client.status().free_target_blocks == 20
    client.cancel(request)  # once more does no harm
    assert tokens(client, client.submit([0], GREEDY)) == [1, 2, 3]


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def test_a_request_ends_at_its_deadline_waiting_or_running(connect: Callable[[], Client]) -> None:
    client = connect()
    running = [client.submit([0], LONG) for _ in range(2)]
    overdue = client.submit([0], LONG, timeout_s=1e-9)
    events = list(client.stream(overdue))
    assert [(event.tokens, event.finish_reason) for event in events] == [([], "timeout")]
    assert events[-1].stats is not None
    in_time = client.submit([0], GREEDY, timeout_s=1e9)
    assert [len(tokens(client, request)) for request in running] == [60, 60]
    assert tokens(client, in_time) == [1, 2, 3]
    assert client.status().free_target_blocks == 20


def test_a_running_request_keeps_what_it_has_at_its_deadline(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    request = client.submit([0], LONG, timeout_s=1e6)
    stream = client.stream(request)
    assert next(stream).tokens == [1]
    clock = time.monotonic
    monkeypatch.setattr("saguaro.orchestrator.service.time.monotonic", lambda: clock() + 1e7)
    rest = list(stream)
    monkeypatch.undo()
    assert rest[-1].finish_reason == "timeout"
    got = [1, *(token for event in rest for token in event.tokens)]
    assert len(got) < 60
    assert got == [(i + 1) % 4 for i in range(len(got))]
    assert tokens(client, client.submit([0], GREEDY)) == [1, 2, 3]


def test_a_full_queue_refuses_and_serves_the_others(connect: Callable[[], Client]) -> None:
    client = connect()
    requests = [client.submit([0], LONG) for _ in range(40)]
    served = 0
    refusals = []
    for request in requests:
        try:
            assert len(tokens(client, request)) == 60
            served += 1
        except CapacityError as error:
            refusals.append(str(error))
    assert served >= 18
    assert refusals
    assert all("serving.max_queue is 16" in refusal for refusal in refusals)


def test_a_context_is_usable_to_its_last_token_and_its_prefix_is_cached(connect: Callable[[], Client]) -> None:
    """I-16: a prompt one short of the context, in chunks of 8, without a limit of its own."""
    client = connect()
    for _ in range(2):
        events = list(client.stream(client.submit([0] * 63, SamplingParams(temperature=0, ignore_eos=True))))
        assert [(event.tokens, event.finish_reason) for event in events] == [([1], "length")]
    assert tokens(client, client.submit([0], GREEDY)) == [1, 2, 3]
    status = client.status()
    assert (status.cached_target_blocks, status.free_target_blocks, status.preemptions) == (15, 20, 0)


def test_requests_that_outgrow_the_pool_take_turns(connect: Callable[[], Client]) -> None:
    client = connect()
    requests = [client.submit([start], LONG) for start in (0, 1)]  # 16 blocks each of 20
    for start, request in enumerate(requests):
        assert tokens(client, request) == [(start + 1 + i) % 4 for i in range(60)]
    status = client.status()
    assert status.preemptions >= 1
    assert (status.running, status.free_target_blocks) == (0, 20)


def test_garbage_from_a_client_disturbs_nobody(connect: Callable[[], Client], tmp_path: Path) -> None:
    client = connect()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{tmp_path / 'socket'}")
    for data in (b"", b"\x80", b"\x93\x01\x02\x03", b"x" * 1000):
        stranger.send(data)
    stranger.send_multipart([b"two", b"frames"])
    assert tokens(client, client.submit([0], GREEDY)) == [1, 2, 3]
    context.destroy(linger=0)


def test_a_service_that_does_not_answer_is_said(tmp_path: Path) -> None:
    client = Client(tmp_path / "nobody", lambda: None)
    with pytest.raises(LinkError, match="did not answer within 0 s"):
        client.status(timeout=0.2)
    client.close()
