"""Drafting with a draft model: all branches of all sequences advance together, one forward per draft token."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from saguaro.engines.base import Engine, FanOutSteps, causal_batch
from saguaro.errors import ConfigError
from saguaro.orchestrator import sampling
from saguaro.orchestrator.drafters.base import Guess, Trunk, never
from saguaro.orchestrator.drafters.token_memory import TokenMemory
from saguaro.orchestrator.fan_out_policy import FanOutPolicy, Situation
from saguaro.orchestrator.grammar import Grammars
from saguaro.orchestrator.metrics import Timeline
from saguaro.orchestrator.protocol import DraftRow
from saguaro.orchestrator.types import Outcome, Rule, SparseProbs, Speculation
from saguaro.plugins.fan_out import FanOut

_log = logging.getLogger(__name__)
_IMPOSSIBLE = 1e-9  # not worth a branch
_LONGEST_TRUNK = 64  # rows of a sequence; more is a prompt, whose time says nothing of a step


@dataclass(eq=False)
class _Branches:
    """The branches of one trunk while they grow: `tails[i]` is all that branch i has after column `prefix`, the trunk's
    accepted tokens, the bonus token and those drafted after it."""

    trunk: Trunk
    guesses: InitVar[Sequence[Guess]]
    outcomes: list[Outcome] = field(init=False)
    reach: list[float] = field(init=False)  # probability that a branch is needed and all it has is accepted
    tails: list[list[int]] = field(init=False)
    probs: list[list[SparseProbs]] = field(init=False)  # `ratio` at temperature > 0: what each draft token came from
    growing: list[int] = field(init=False)  # branches that get another token, in rising order

    def __post_init__(self, guesses: Sequence[Guess]) -> None:
        self.outcomes = [guess.outcome for guess in guesses]
        self.reach = [guess.probability for guess in guesses]
        self.tails = [[*self.trunk.draft_tokens[: outcome.accepted], outcome.bonus] for outcome in self.outcomes]
        self.probs = [[] for _ in self.outcomes]
        self.growing = list(range(len(self.outcomes)))

    @property
    def fan_out(self) -> FanOut:
        branches = Counter(outcome.accepted for outcome in self.outcomes)
        return FanOut(tuple(branches[k] for k in range(len(self.trunk.draft_tokens) + 1)))

    def speculations(self) -> list[Speculation]:
        return [
            Speculation(tuple(tail[outcome.accepted + 1 :]), tuple(probs) if probs else None)
            for outcome, tail, probs in zip(self.outcomes, self.tails, self.probs, strict=True)
        ]


class ModelDrafter:
    """A draft model and its KV pool. Keeps nothing of a sequence but what lies in the slots of its block table.

    With `least_probability` the ΣF_k guesses of a trunk are its likeliest outcomes by the draft's own probabilities,
    whatever their acceptance lengths. Neither an outcome nor a further token of a branch is prepared that is needed
    with a lower probability, nor anything more once somebody waits for what there is. Trunks that the draft has no
    such probabilities for get the lists they ask for.
    """

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        policy: FanOutPolicy,
        *,
        width: int = 64,
        cache_aware: float = 1.0,
        min_confidence: float = 0.0,
        least_probability: float | None = None,
        grammars: Grammars | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._engine = engine
        self._rule: Rule = rule
        self._policy = policy  # cache-aware sampling favours what will be guessed
        self._width = width  # candidates per row at temperature > 0: under `ratio` the support of q
        self._cache_aware = cache_aware  # C of σ_{F,C}
        self._min_confidence = min_confidence
        self._least_probability = least_probability
        self._grammars = grammars  # None: drafts know no grammar, which costs acceptance
        self._timeline = timeline or Timeline()  # told of every step
        self.memory = TokenMemory(engine.num_blocks, engine.block_size)

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        behind = [row for row in rows if len(row.tokens) > 1]
        if behind:
            self._feed(behind, [row.tokens[:-1] for row in behind], [0] * len(behind))

    def predict(self, trunks: Sequence[Trunk], fan_outs: Sequence[FanOut]) -> list[list[Guess]]:
        lengths = [len(trunk.draft_tokens) + 1 for trunk in trunks]
        fed = [trunk.row.tokens + trunk.draft_tokens for trunk in trunks]

        def guesses() -> list[list[Guess]]:
            logits = self._feed([trunk.row for trunk in trunks], fed, lengths)
            return self._guess(trunks, fan_outs, logits)

        if max(map(len, fed), default=0) > _LONGEST_TRUNK:
            return guesses()
        with self._timeline.step(sum(map(len, fed)), trunk=True):
            return guesses()

    def draft(
        self, trunks: Sequence[Trunk], guesses: Sequence[Sequence[Guess]], enough: Callable[[], bool] = never
    ) -> list[list[Speculation]]:
        drawn = self._rule == "ratio" and any(trunk.row.request.params.temperature > 0 for trunk in trunks)
        cut = self._least_probability is not None and not drawn  # lengths may depend on time: see `_extend`
        branches = [_Branches(trunk, guessed) for trunk, guessed in zip(trunks, guesses, strict=True)]
        active: list[_Branches] = []
        growing: list[list[int]] = []
        for depth in range(max((trunk.row.lookahead for trunk in trunks), default=0)):
            going = [b for b in branches if b.growing and depth < b.trunk.row.lookahead]
            if not going or (depth and cut and enough()):
                break
            if going != active:
                active, growing = going, [list(range(len(b.outcomes))) for b in going]
                steps = every_branch = FanOutSteps(
                    [b.fan_out for b in active],
                    [b.trunk.prefix for b in active],
                    [b.trunk.row.table for b in active],
                    self._engine.block_size,
                    range(depth, min(b.trunk.row.lookahead for b in active)),  # then one of them has all its tokens
                )
                queries = [self._query(b.trunk, b.tails, 1) for b in active]  # whose tails grow
            if growing != (now := [b.growing for b in active]):
                growing = now
                firsts = accumulate((len(b.outcomes) for b in active), initial=0)
                steps = every_branch.keep([first + i for first, b in zip(firsts, active) for i in b.growing])
                queries = [self._query(b.trunk, [b.tails[i] for i in b.growing], 1) for b in active]
            batch = steps.batch(torch.tensor([b.tails[i][-1] for b in active for i in b.growing]), depth)
            with self._timeline.step(len(batch.token_ids)):
                logits = self._engine.forward(batch).logits
                proposed = self._propose(logits, [b.trunk for b in active], queries, self._min_confidence > 0)
                for b, candidates in zip(active, proposed, strict=True):
                    self._extend(b, candidates, depth)
        return [b.speculations() for b in branches]

    def _feed(self, rows: Sequence[DraftRow], tokens: Sequence[tuple[int, ...]], wanted: Sequence[int]) -> torch.Tensor:
        """One causal forward from each row's `start` on; logits of the last `wanted` rows of each."""
        batch = causal_batch(
            tokens, [row.start for row in rows], [row.table for row in rows], wanted, self._engine.block_size
        )
        self.memory.write(batch.slots.numpy(), batch.token_ids.numpy())
        return self._engine.forward(batch).logits

    def _guess(self, trunks: Sequence[Trunk], fan_outs: Sequence[FanOut], logits: torch.Tensor) -> list[list[Guess]]:
        # One more than are guessed, since one of them may be the token under verification.
        most = max((self._most_of_a_row(fan_out) for fan_out in fan_outs), default=0)
        if most == 0:
            return [[] for _ in trunks]
        queries = [
            self._query(trunk, [trunk.draft_tokens[:k] for k in range(len(trunk.draft_tokens) + 1)], most + 1)
            for trunk in trunks
        ]
        return [
            _listed(trunk, fan_out, candidates)
            if self._least_probability is None or candidates.weights is None
            else likeliest(trunk.draft_tokens, fan_out.branches, candidates, self._least_probability)
            for trunk, fan_out, candidates in zip(trunks, fan_outs, self._propose(logits, trunks, queries), strict=True)
        ]

    def _most_of_a_row(self, fan_out: FanOut) -> int:
        return max(fan_out.counts) if self._least_probability is None else fan_out.branches

    def _extend(self, branches: _Branches, candidates: sampling.Candidates, depth: int) -> None:
        """One more token for every branch of one sequence that goes on; `candidates` has a row for each growing one.

        Whether it does is decided by the distribution of its next token, before that is drawn: by the tokens it has,
        which stay in the speculation, and by nothing else. So its length is known before each draw, and every token in
        it has the distribution recorded with it. A branch that were ended by the *drawn* token would not be exact:
        what is left of the tokens at that place would be only those that let it go on. (Where no draft can change what
        is emitted, which is where candidates have weights, it may: there `least_probability` ends branches too.)
        """
        row, places = branches.trunk.row, list(enumerate(branches.growing))
        if candidates.confidence is not None:
            sure = candidates.confidence >= self._min_confidence
            places = [(place, index) for place, index in places if sure[place]]
            branches.growing = [index for _, index in places]
        if candidates.probs is None:
            tokens = candidates.ids[:, 0].tolist()
            for place, index in places:
                branches.tails[index].append(tokens[place])
            if self._least_probability is not None and candidates.weights is not None:
                weights = candidates.weights[:, 0].tolist()
                for place, index in places:
                    branches.reach[index] *= weights[place]
                branches.growing = [i for i in branches.growing if branches.reach[i] >= self._least_probability]
            return
        situation = Situation(not branches.trunk.happened, row.request.params.temperature)
        fan_out = self._policy(row.budget, row.lookahead, situation).counts[depth]
        for place, index in places:
            position = branches.trunk.prefix + 1 + len(branches.tails[index])
            uniform = sampling.uniform(row.request.seed, position, sampling.Purpose.DRAFT, position - depth)
            token, probs = sampling.draw_draft(candidates, place, uniform, fan_out, self._cache_aware)
            branches.tails[index].append(token)
            branches.probs[index].append(probs)

    def _query(self, trunk: Trunk, tails: Sequence[Sequence[int]], needed: int) -> sampling.Query:
        """At least `needed` candidates for the token after each tail of a trunk.

        At temperature > 0 the noise (or the draw) chooses among more than the best few. The history is read only if a
        parameter depends on it.
        """
        row = trunk.row
        width = needed if row.request.params.temperature == 0 else max(needed, self._width)
        context: Sequence[int] = range(trunk.prefix + 1)  # its length is its meaning, unless read
        if self._follows(row) or sampling.needs_history(row.request.params):
            context = self.memory.read(row.table, len(context)).tolist()
        return sampling.Query(row.request, context, tails, width, first=needed == 1)

    def _propose(
        self,
        logits: torch.Tensor,
        trunks: Sequence[Trunk],
        queries: Sequence[sampling.Query],
        confidence: bool = False,
    ) -> list[sampling.Candidates]:
        """Of each trunk's query, from `logits`: its rows one trunk after the other."""
        if any(self._follows(trunk.row) for trunk in trunks):
            parts = logits.split([len(query.tails) for query in queries])
            queries = [
                replace(query, allowed=self._allowed(trunk.row, query.context, query.tails, part))
                for trunk, query, part in zip(trunks, queries, parts, strict=True)
            ]
        weights = self._least_probability is not None
        return sampling.propose(logits, queries, self._rule, confidence=confidence, weights=weights)

    def _follows(self, row: DraftRow) -> bool:
        return self._grammars is not None and row.grammar is not None

    def _allowed(
        self, row: DraftRow, context: Sequence[int], tails: Sequence[Sequence[int]], logits: torch.Tensor
    ) -> torch.Tensor | None:
        """[R, V] bool: what the request's grammar lets follow. Without it drafts are only accepted less often."""
        try:
            if self._grammars is None or row.grammar is None:
                return None
            state = self._grammars.follow(row.sequence, row.grammar, context[row.request.prompt_length :])
            return state.masks(tails, logits.shape[1]).to(logits.device) if state else None
        except ConfigError as error:  # the target will say so to the client
            _log.warning("drafting without the grammar of sequence %d: %s", row.sequence, error)
            return None


def _listed(trunk: Trunk, fan_out: FanOut, candidates: sampling.Candidates) -> list[Guess]:
    """F_k guesses for every acceptance length k."""
    sent = [*trunk.draft_tokens, None]
    return [
        Guess(Outcome(k, token))
        for k, count in enumerate(fan_out.counts)
        for token in candidates.guesses(k, count, sent[k])
    ]


def likeliest(draft_tokens: Sequence[int], count: int, candidates: sampling.Candidates, least: float) -> list[Guess]:
    """The `count` likeliest outcomes of at least this probability, by the weights of all candidates for the places of
    the K draft tokens and the one behind them: that of (k, t*) is the product of the weights of the first k draft
    tokens and of t*.
    """
    weights = candidates.weights
    assert weights is not None
    sent = candidates.ids == np.array([*draft_tokens, -1])[:, None]
    reached = np.cumprod(np.append(1.0, np.where(sent, weights, 0).sum(1)[:-1]))
    probabilities = np.where(sent, 0, reached[:, None] * weights)
    best = np.argsort(-probabilities, axis=None, kind="stable")[:count]
    best = best[probabilities.flat[best] >= max(least, _IMPOSSIBLE)]
    best = best[np.argsort(best // weights.shape[1], kind="stable")]
    return [
        Guess(Outcome(place // weights.shape[1], int(candidates.ids.flat[place])), float(probabilities.flat[place]))
        for place in best.tolist()
    ]
