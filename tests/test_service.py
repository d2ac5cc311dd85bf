"""The leader's loop over its real socket, in a thread, on exact tables and without a speculator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.errors import ConfigError, LinkError
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
        serving=ServingConfig(max_sequences=2),
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
        ([0], GREEDY, {"lookahead": 5}, ConfigError, "lookahead must be between 1 and this deployment's 4, got 5"),
        ([0], SamplingParams(logit_bias={7: 1.0}), {}, ConfigError, "logit_bias names token id 7"),
        ([0], SamplingParams(n=2), {}, ConfigError, "a request has one answer"),
        ([0], SamplingParams(regex="a"), {}, ConfigError, "need a tokenizer"),
        ([0], SamplingParams(stop=("x",)), {}, ConfigError, "need a tokenizer"),
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
