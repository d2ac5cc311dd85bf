"""What any lookahead, list, rule and backup would have done on given texts, round by round, without running it.

Speculation never changes what is said (`coupled`, temperature 0), or only which sample of one law is said (`ratio`). So
one text, with what both models think at each of its positions, decides for every setting which drafts are accepted and
which outcomes are hit:

- `coupled` and temperature 0: the draft's token at a position is a function of the text before it, and it is accepted
  iff it is the text's own. The rounds are those a deployment would have had, exactly.
  (`ranked_replay` for the policy `ranked`.)
- `ratio`: given that the text is x there, a token drawn from q was accepted with probability min(1, q(x)/p(x)),
  independently at each position; a rejected one is distributed as max(q - p, 0), whatever the text says. The rounds are
  drawn from the law that a deployment's have, given its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from saguaro.engines.base import Engine, causal_batch
from saguaro.orchestrator import sampling
from saguaro.orchestrator.drafters.base import Drafter, Guess, Trunk
from saguaro.orchestrator.estimators import Estimators
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Situation
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.scores import adjusted, filtered
from saguaro.orchestrator.types import Outcome, RequestSampling, Rule
from saguaro.plugins.fan_out import FanOut

Array = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """A prompt and the answer the target gave."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    request: RequestSampling


@dataclass(frozen=True)
class Ranked:
    """The draft's `width` best tokens at each of the N positions of an answer, best first, as it ranks them there."""

    ids: Ids  # [N, width]
    place: Ids  # [N] of the answer's own token among them; `width` if it is not


@dataclass(frozen=True)
class Weighed:
    """For the rule `ratio` at temperature > 0."""

    q: Array  # [N, width] probabilities of the draft's best, in the order of `Ranked`
    p: Array  # [N, width] the target's of the same tokens
    p_token: Array  # [N] the target's of the answer's own token


@dataclass(frozen=True)
class Rollouts:
    """What the draft thinks if it goes on by itself from each of the first N positions of an answer: row d of position
    i follows i tokens of the answer and d of its own.
    """

    ids: Ids  # [N, K+1, width] best first: the first is the one it drafts
    weights: Array  # [N, K+1, width] see `sampling.propose`


@dataclass(frozen=True)
class Scored:
    """A text and what both models think of it under one rule."""

    text: Text
    ranked: Ranked
    weighed: Weighed | None = None  # None: every draft token is the first of `ranked`
    rollouts: Rollouts | None = None  # for `ranked_replay`, where it is wanted and every draft token is the first


@dataclass(frozen=True)
class Played:
    """One round of decoding."""

    hit: bool  # what was verified had been prepared
    drafted: int
    accepted: int
    rank: int | None  # of the bonus token among all guesses that could have been made; None: beyond the width
    rows: tuple[float, ...] = ()  # of the policy `ranked`: how many each draft step that prepares is expected to have


def answer_logits(engine: Engine, text: Text) -> torch.Tensor:
    """[N, V] one forward over the whole text: what the model says before each token of the answer."""
    tokens = (*text.prompt, *text.answer)[:-1]
    blocks = -(-len(tokens) // engine.block_size)
    batch = causal_batch([tokens], [0], [range(blocks)], [len(text.answer)], engine.block_size)
    return engine.forward(batch).logits


def score(draft: torch.Tensor, target: torch.Tensor | None, text: Text, rule: Rule, width: int) -> Scored:
    """From both models' `answer_logits`; the target's are needed for `ratio` at temperature > 0 alone."""
    context, tails = (*text.prompt,), [text.answer[:k] for k in range(len(text.answer))]
    (candidates,) = sampling.propose(draft, [sampling.Query(text.request, context, tails, width)], rule)
    ids, tokens = candidates.ids, np.asarray(text.answer)
    found = ids == tokens[:, None]
    ranked = Ranked(ids, np.where(found.any(1), found.argmax(1), ids.shape[1]))
    if candidates.probs is None or target is None:
        return Scored(text, ranked)
    scores = filtered(adjusted(target, text.request, context, tails, None), text.request.params).dense()
    probs = torch.softmax(scores, -1, dtype=torch.float64).numpy()
    p = np.take_along_axis(probs, ids, 1)
    return Scored(text, ranked, Weighed(candidates.probs, p, probs[np.arange(len(tokens)), tokens]))


class Replay:
    """One setting of a deployment, played over texts. `estimators` learn on the way, as a speculator's do; a policy
    that never changes does without.
    """

    def __init__(
        self,
        policy: FanOutPolicy,
        estimators: Estimators | None,
        *,
        lookahead: int,
        budget: int,
        cache_aware: float = 1.0,
        backup: Drafter | None = None,  # None: the draft model
    ) -> None:
        self._policy = policy
        self._estimators = estimators
        self._lookahead = lookahead
        self._budget = budget
        self._cache_aware = cache_aware
        self._backup = backup

    def play(self, scored: Scored, number: int, draws: np.random.Generator) -> list[Played]:
        """The rounds after the prefill, as far as each could have all its K+1 tokens. `number` names the sequence."""
        length, rounds = len(scored.text.answer), list[Played]()
        uniforms = draws.random((length, 2))
        at, hit = 0, True
        drafted = 0  # the prefill verifies nothing
        while length - at > drafted:
            accepted, sent = 0, None
            if at and self._backup and not hit:
                tokens = self._backed_up(scored.text, at, number)
                drafted = len(tokens)
                while accepted < drafted and tokens[accepted] == scored.text.answer[at + accepted]:
                    accepted += 1
                sent = tokens[accepted] if accepted < drafted else None
            elif at:
                drafted = self._lookahead
                accepted, sent = self._accepted(scored, at, hit, uniforms)
            situation = Situation(hit, scored.text.request.params.temperature)
            fan_out = self._policy(self._budget, drafted, situation)
            rank = _rank(scored.ranked, at + accepted, sent)
            if at:
                rounds.append(Played(hit, drafted, accepted, rank))
            hit = self._looked_up(scored, at, accepted, drafted, fan_out, rank, situation)
            at += accepted + 1
            drafted = self._lookahead
        return rounds

    def _looked_up(
        self,
        scored: Scored,
        at: int,
        accepted: int,
        drafted: int,
        fan_out: FanOut,
        rank: int | None,
        situation: Situation,
    ) -> bool:
        hit = rank is not None and rank < fan_out.counts[accepted]
        if self._estimators:
            outcome = Outcome(accepted, scored.text.answer[at + accepted])
            self._estimators.of(situation).observe(drafted, outcome, fan_out, rank if hit else None)
        return hit

    def _accepted(self, scored: Scored, at: int, hit: bool, uniforms: Array) -> tuple[int, int | None]:
        """How many of K tokens of the draft model, and the one that was rejected."""
        situation = Situation(hit, scored.text.request.params.temperature)
        counts = self._policy(self._budget, self._lookahead, situation).counts
        for k in range(self._lookahead):
            sent = _rejected(scored, at + k, counts[k], self._cache_aware, uniforms[at + k])
            if sent is not None:
                return k, sent
        return self._lookahead, None

    def _backed_up(self, text: Text, at: int, number: int) -> tuple[int, ...]:
        if self._backup is None:
            return ()
        tokens = (*text.prompt, *text.answer[:at])
        row = DraftRow(
            sequence=number,
            start=0,
            tokens=tokens,
            outcome=None,
            prefill=False,
            lookahead=self._lookahead,
            budget=self._budget,
            table=tuple(range(len(tokens) + 1)),  # blocks of one token
            request=text.request,
            grammar=None,
        )
        self._backup.catch_up([row])
        ((speculation,),) = self._backup.draft([Trunk.decided(row)], [[Guess(Outcome(0, tokens[-1]))]])
        return speculation.tokens


def _rejected(scored: Scored, position: int, fan_out: int, scale: float, uniforms: Array) -> int | None:
    """The token the draft proposed there if it was rejected; None if it was accepted."""
    ranked, weighed = scored.ranked, scored.weighed
    place = int(ranked.place[position])
    if weighed is None:
        return None if place == 0 else int(ranked.ids[position, 0])
    q, p = sampling.cache_aware(weighed.q[position], fan_out, scale), weighed.p[position]
    drawn = q[place] if place < len(q) else 0.0
    if uniforms[0] * weighed.p_token[position] < drawn:
        return None
    excess = np.maximum(q - p, 0)
    # Rounding may leave nothing where p and q are the same: then nothing is rejected.
    return int(ranked.ids[position, sampling.draw(excess, uniforms[1])]) if excess.sum() > 0 else None


def _rank(ranked: Ranked, position: int, excluded: int | None) -> int | None:
    """Of the answer's token among the guesses, which leave `excluded` out."""
    place = int(ranked.place[position])
    if place == ranked.ids.shape[1]:
        return None
    return place - int(excluded is not None and excluded in ranked.ids[position, :place])


# Figures


@dataclass(frozen=True)
class Figures:
    """Sums over the rounds of each text, so that texts can be drawn again for confidence intervals. All [.., texts]."""

    rounds: Array
    hits: Array  # rounds that were hits
    tokens: Array
    tokens_of_hits: Array
    tried: Array  # draft tokens that were judged
    accepted: Array

    @staticmethod
    def of(texts: Sequence[Iterable[Played]]) -> Figures:
        rows = [
            [
                (1, int(r.hit), r.accepted + 1, r.hit * (r.accepted + 1), min(r.accepted + 1, r.drafted), r.accepted)
                for r in rounds
            ]
            for rounds in texts
        ]
        sums = np.array([np.sum(row or [(0,) * 6], axis=0) for row in rows], dtype=np.float64)
        return Figures(*sums.T)

    def resampled(self, weights: Array) -> Figures:
        """[samples, 1] for weights [samples, texts]: how often each text was drawn."""
        return Figures(*((weights @ getattr(self, name))[:, None] for name in self.__dataclass_fields__))

    @property
    def hit_rate(self) -> Array:
        return _ratio(self.hits, self.rounds)

    @property
    def acceptance(self) -> Array:
        return _ratio(self.accepted, self.tried)

    @property
    def tokens_per_round(self) -> Array:
        return _ratio(self.tokens, self.rounds)


def _ratio(one: Array, other: Array) -> Array:
    """Over all texts; not a number where there was nothing."""
    with np.errstate(invalid="ignore"):
        return np.asarray(one.sum(-1) / other.sum(-1))
