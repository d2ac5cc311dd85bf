"""What the fan-out policy `ranked` would have done on given texts, round by round: see `replay`.

Its guesses depend on what the draft thinks behind a token that was rejected, of which the text tells nothing: so the
draft drafts once from every position of the text. Then everything that becomes of a text is known: which speculation
is verified, what is guessed, by the drafter's own `likeliest`, whether that hits, and how long the next speculation is.
Only how far branches grow that are not needed is not known; they are taken to grow like those that start in the text.

Where the draft draws its tokens (`ratio` at temperature > 0) `ranked` follows lists, and there is nothing to replay.
"""

from __future__ import annotations

import numpy as np
import torch

from saguaro.bench.replay import Array, Played, Rollouts, Scored, Text
from saguaro.engines.base import Engine, FanOutSteps
from saguaro.orchestrator import sampling
from saguaro.orchestrator.drafters.model import likeliest
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Situation
from saguaro.orchestrator.types import Outcome
from saguaro.plugins.fan_out import FanOut

AT_ONCE = 64  # positions that are drafted from together


def roll_out(engine: Engine, text: Text, said: torch.Tensor, lookahead: int, width: int) -> Rollouts:
    """Of all positions from which the context has room for so many tokens. `said` are the `answer_logits` that the
    engine has just given of this text, whose KV still lies in the pool; behind it are `AT_ONCE` * K columns free.
    """
    prefix, rows = len(text.prompt) - 1, len(text.answer)  # columns before the trunk, and those of the trunk
    count = max(0, min(rows, engine.max_model_len - len(text.prompt) - lookahead + 1))
    shape = count, lookahead + 1, min(width, said.shape[1])
    ids, weights = np.empty(shape, np.int64), np.empty(shape)
    for start in range(0, count, AT_ONCE):
        forks = range(start, min(start + AT_ONCE, count))
        fan_out = FanOut(tuple(int(k in forks) for k in range(rows)))
        table = tuple(range(engine.num_blocks))
        steps = FanOutSteps([fan_out], [prefix], [table], engine.block_size, range(lookahead))
        tails = [[*text.answer[:k]] for k in forks]
        logits = said[forks.start : forks.stop]
        for depth in range(lookahead + 1):
            query = sampling.Query(text.request, text.prompt, tails, width)
            (candidates,) = sampling.propose(logits, [query], "coupled", weights=True)
            ids[forks.start : forks.stop, depth] = candidates.ids
            weights[forks.start : forks.stop, depth] = candidates.weights
            for tail, token in zip(tails, candidates.ids[:, 0].tolist(), strict=True):
                tail.append(token)
            if depth < lookahead:
                logits = engine.forward(steps.batch(torch.tensor([tail[-1] for tail in tails]), depth)).logits
    return Rollouts(ids, weights)


class RankedReplay:
    """One setting of a deployment with this policy, played over texts; the draft model is the backup."""

    def __init__(self, policy: FanOutPolicy, *, lookahead: int, budget: int, least_probability: float) -> None:
        self._policy = policy  # how many outcomes are guessed
        self._lookahead = lookahead
        self._budget = budget
        self._least = least_probability

    def play(self, scored: Scored) -> list[Played]:
        """The rounds after the prefill, as far as each could have all its K+1 tokens.

        They are those of a speculator that finishes its branches. One that is waited for leaves them at what they have.
        Raises ValueError for a text without rollouts.
        """
        if scored.rollouts is None:
            raise ValueError("rounds of `ranked` are replayed from rollouts, which this text has none of")
        answer, ids, weights = scored.text.answer, scored.rollouts.ids, scored.rollouts.weights
        growth = np.sort(np.cumprod(weights[:, :, 0], 1), 0)  # of every position; by depth
        at, hit, reach = 0, True, 1.0
        rounds: list[Played] = []
        while at < min(len(ids), len(answer) - self._lookahead):
            # The prefill verifies nothing.
            drafted = self._grown(reach, weights[at, :, 0]) if at else 0
            tokens = ids[at, :drafted, 0].tolist()
            accepted = next((k for k, token in enumerate(tokens) if token != answer[at + k]), drafted)
            situation = Situation(hit, scored.text.request.params.temperature)
            count = self._policy(self._budget, drafted, situation).branches
            candidates = sampling.Candidates(ids[at, : drafted + 1], None, None, weights[at, : drafted + 1])
            guesses = likeliest(tokens, count, candidates, self._least)
            if at:
                rows = self._rows(np.array([guess.probability for guess in guesses]), growth)
                rounds.append(Played(hit, drafted, accepted, None, rows))
            outcome = Outcome(accepted, answer[at + accepted])
            prepared = next((guess for guess in guesses if guess.outcome == outcome), None)
            hit, reach = prepared is not None, prepared.probability if prepared else 1.0
            at += accepted + 1
        return rounds

    def _grown(self, reach: float, weights: Array) -> int:
        """How many tokens a branch gets that is needed with this probability, if its tokens have these weights."""
        reached = np.cumprod([reach, *weights[: self._lookahead - 1]])
        return 1 + int((reached[1:] >= self._least).sum())

    def _rows(self, reach: Array, growth: Array) -> tuple[float, ...]:
        """Of each draft step, for branches that are needed with these probabilities."""
        short = [0.0] + [
            np.searchsorted(growth[:, depth], self._least / reach).sum() / len(growth)
            for depth in range(self._lookahead - 1)
        ]
        return tuple(len(reach) - ended for ended in short)
