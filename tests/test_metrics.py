"""The figures of a request: what its rounds took, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest

from harness import Pair
from saguaro.engines.scripted import ScriptedEngine, markov_table
from saguaro.orchestrator.config import FanOutConfig, SpeculationConfig
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.metrics import RequestStats, RoundWork, request_stats
from saguaro.orchestrator.protocol import Span
from saguaro.orchestrator.sequence import RoundRecord
from saguaro.orchestrator.types import SamplingParams

CYCLE = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]  # 0 1 2 3 0 …


def pair(replicas: int = 1, **options: Any) -> Pair:
    target, draft, *more = (ScriptedEngine(markov_table(CYCLE), 4, 64, 4, 50) for _ in range(1 + replicas))
    return Pair(target, draft, lookahead=2, budget=4, more_drafts=more, **options)


def work(wait: float, verify: float, *prepare: float, branches: float | None = None, replica: int = 0) -> RoundWork:
    """Of a round, in milliseconds."""
    spans = [("wait", wait, 0), ("verify", verify, 0), *(("prepare", each, replica) for each in prepare)]
    return RoundWork([Span(name, 0, round(ms * 1e6), (), replica) for name, ms, replica in spans], branches)


def stats(mode: Any, rounds: list[RoundWork]) -> RequestStats:
    sequence = pair().sequence([0], SamplingParams())
    sequence.rounds = [RoundRecord(1, None)] + [RoundRecord(2, True, 2, 1, mode, 2) for _ in rounds]
    return request_stats(sequence, rounds, 0, 1, 2)


ROUNDS = [
    work(9, 10, 50, 70, branches=1),  # the first answer: the last round of another request, and the prompt
    work(1, 10, 5, branches=4),
    work(0, 10, 4, branches=2),
    RoundWork([Span("wait", 0, 2_000_000), Span("verify", 0, 10_000_000)]),  # its answer was late
    work(1, 30, 6, branches=3),  # what was prepared beside this verification nobody has asked for yet
]


def test_what_was_done_before_a_request_and_after_it_is_not_booked_to_it() -> None:
    found = stats("ssd", ROUNDS)
    assert found.verify_ms == pytest.approx(14)
    assert found.t_p == pytest.approx(5 / 14)
    assert found.idle_ms == pytest.approx(((10 + 1 - 5) + (10 - 4) + (10 + 2 + 10 + 1 - 6)) / 3)
    assert found.branches == 3


def test_sd_prepares_nothing() -> None:
    """Its speculator reads what was accepted, which takes a while."""
    assert stats("sd", ROUNDS).t_p is None


def test_of_several_speculators_the_busiest_is_idle_least() -> None:
    rounds = [work(1, 10, first) for first in (9, 5, 9)]
    rounds[1] = RoundWork([*rounds[1].spans, *work(0, 0, 8, replica=1).spans[2:]])
    assert stats("ssd", rounds).idle_ms == pytest.approx((3 + 2) / 2)


@pytest.mark.parametrize("replicas", [1, 3])
def test_branches_are_those_that_were_prepared_whatever_the_longest_list_is(replicas: int) -> None:
    """A list of [1, 1, 2] where a deployment could speculate further: its longest list would be 1, 1, 1, 1, 2."""
    speculation = SpeculationConfig(lookahead=4, fan_out=FanOutConfig(counts=(1, 1, 2)))
    rig = pair(replicas, policy=speculation.policy(Estimators()))
    sequences = [rig.sequence([0], SamplingParams(temperature=0, max_tokens=20)) for _ in range(2)]
    sequences += [rig.sequence([0], SamplingParams(temperature=0, max_tokens=20), "sd")]
    found = [rig.step(sequences).branches for _ in range(5)]
    assert found == [None, 2, 4, 4, 4]  # nothing before the first answer; after a prompt there is one bonus token
