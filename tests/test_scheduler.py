import pytest

from saguaro.errors import CapacityError, ConfigError
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable
from saguaro.orchestrator.scheduler import Scheduler
from saguaro.orchestrator.sequence import Sequence
from saguaro.orchestrator.types import RequestSampling, SamplingParams

POOL = BlockPool(10, 4)


def sequence(number: int, prompt: int, max_tokens: int) -> Sequence:
    request = RequestSampling(SamplingParams(max_tokens=max_tokens), 0, prompt)
    return Sequence(number, request, [0] * prompt, "ar", 1, BlockTable(POOL), BlockTable(POOL))


def scheduler(max_sequences: int = 8, max_model_len: int = 100) -> Scheduler:
    return Scheduler(BlockPool(10, 4), max_sequences=max_sequences, max_model_len=max_model_len)


def test_first_come_first_served_up_to_the_limit() -> None:
    s = scheduler(max_sequences=2)
    a, b, c = (sequence(i, 2, 2) for i in range(3))
    for one in (a, b, c):
        s.add(one)
    assert s.schedule() == [a, b]
    assert s.waiting == 1
    s.remove(a)
    assert s.schedule() == [b, c]


def test_a_sequence_is_admitted_only_when_its_whole_length_fits() -> None:
    s = scheduler()
    big, small, other = sequence(0, 10, 18), sequence(1, 4, 8), sequence(2, 1, 1)  # 7, 3 and 1 of 10 blocks
    for one in (big, small, other):
        s.add(one)
    assert s.schedule() == [big, small]
    assert s.schedule() == [big, small]  # `other` waits its turn, although nothing has been taken from the pool yet
    s.remove(small)
    assert s.schedule() == [big, other]


def test_a_waiting_sequence_can_be_removed() -> None:
    s = scheduler(max_sequences=1)
    a, b = sequence(0, 1, 1), sequence(1, 1, 1)
    s.add(a)
    s.add(b)
    s.schedule()
    s.remove(b)
    s.remove(a)
    assert s.schedule() == []


def test_what_can_never_run_is_refused_at_once() -> None:
    with pytest.raises(CapacityError, match="need 11 KV blocks and the pool has 10: lower max_tokens"):
        scheduler().add(sequence(0, 21, 20))
    with pytest.raises(ConfigError, match="the prompt has 8 tokens and the context holds 8"):
        scheduler(max_model_len=8).add(sequence(0, 8, 1))
    scheduler(max_model_len=8).add(sequence(0, 7, 1000))  # ends with the context, whatever max_tokens says
