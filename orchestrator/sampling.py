"""How scores become tokens: the two acceptance rules, what the draft proposes, and the verification of a round.

- `coupled`: the token at a position is argmax(score + Gumbel noise), the noise a function of (seed, position, token).
  Draft and target share it; a draft token is accepted iff the target chooses it too (Daliri et al., 2024).
- `ratio`: accept x with probability min(1, p(x)/q(x)), else draw from the residual (Leviathan et al., 2023).

Both emit exactly the target's distribution, whatever was drafted. At temperature 0 they coincide. Nothing here knows of
engines, channels or caches, and no state is kept: a draw is a function of seed and position. Both sides stand in this
one file because they must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saguaro.errors import ConfigError, ProtocolError
from saguaro.orchestrator.randomness import (
    GUMBEL_MAX,
    LANES,
    Purpose,
    bits_reaching,
    block_bits,
    gumbel,
    gumbel_of,
    uniform,
    uniforms,
)
from saguaro.orchestrator.scores import (
    Scores,
    adjusted,
    changes_logits,
    check_numbers,
    check_vocabulary,
    filtered,
    log_total,
    needs_history,
    or_zero,
    scaled,
    survivors,
    top,
)
from saguaro.orchestrator.types import Outcome, RequestSampling, Rule, SparseProbs, Speculation
from saguaro.plugins.transfers import to_host

__all__ = [
    "Candidates",
    "Purpose",
    "Query",
    "Trial",
    "Trials",
    "accept_coupled",
    "accept_ratio",
    "acceptance",
    "cache_aware",
    "check_speculation",
    "check_vocabulary",
    "choose",
    "coupled_acceptance",
    "draw",
    "draw_draft",
    "needs_history",
    "propose",
    "residual",
    "uniform",
    "verify",
]

# Probabilities: float64, or fractions in an object array, with which the tests prove the `ratio` rule exact.
Probs = NDArray[Any]

# Tokens further below the best than this are looked at only with noise that can make up for it.
_NEAR = 4.0
# A draft token this far below the best has p < 5e-5: it is not proposed. Out of reach of any noise:
_FAR, _HOPELESS = 10.0, 1e3
_IN_CACHE = 1 << 17  # scores that are looked at together
_AT_ONCE = 1 << 18  # scores among which it is not worth while to look at a row only when the one before it is accepted
_SUM_TOLERANCE = 1e-6


# The rule `coupled`


def choose(
    scores: NDArray[Any],
    rows: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    ids: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """[n] argmax(score + Gumbel noise) of n rows, each with a seed and a position; the lowest id on a tie.

    `scores` are [R, V], or lists [R, m] whose tokens `ids` names. A row without any finite score gives some token.
    Over the vocabulary the noise is evaluated only where it can win; it is bounded, so the result is that of all V.
    Noise of 24 bits draws from softmax(row) to within some 1e-7; a token 20.2 below the best (p < 2e-9) is never drawn.
    """
    count = len(rows)
    if ids is not None:
        index, columns = np.nonzero(scores[rows] > -np.inf)
        tokens = ids[rows[index], columns]
        totals = scores[rows[index], columns] + gumbel(seeds[index], positions[index], tokens)
        return _best(index, tokens, totals, count)
    leaders = np.concatenate([part.argmax(1) for part in _parts(scores, rows)])
    best = scores[rows, leaders].astype(np.float64)
    possible = np.isfinite(best)
    best = np.where(possible, best, 0)
    block, lane = np.divmod(leaders, LANES)
    leader = best + gumbel_of(block_bits(seeds, positions, block)[np.arange(count), lane])
    # Below leader - GUMBEL_MAX no noise wins, and below `near` only noise above leader - near, which few tokens have.
    near = best - _NEAR
    least = leader - 1e-12 * (1 + np.abs(leader))  # by more than the sums are rounded by
    limits = np.where(possible, [least - GUMBEL_MAX, near], np.inf)
    index, tokens, totals = _contenders(scores, rows, limits, bits_reaching(least - near), seeds, positions)
    return _best(index, tokens, totals, count)


def _contenders(
    scores: NDArray[Any],
    rows: NDArray[np.int64],
    limits: NDArray[np.float64],
    least_bits: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """The scores [R, V] of `rows` [n] that are near, or reach their row's bound with noise that reaches its
    `least_bits`: place of the row in `rows`, token, score + noise. `limits` [2, n] are the bounds, and what is near."""
    columns = scores.shape[1]
    blocks_of_row = -(-columns // LANES)
    limits = limits.astype(scores.dtype)  # rounding is monotonic: none passes a score it was below
    places, reaching, start = [], [], 0
    for part in _parts(scores, rows):
        flags = np.zeros((2, len(part), blocks_of_row * LANES), dtype=bool)
        np.greater_equal(part, limits[:, start : start + len(part), None], out=flags[:, :, :columns])
        flags_of_block = flags.view(np.uint32).reshape(2, -1)
        place = np.flatnonzero(flags_of_block[0])
        places.append(start * blocks_of_row + place)
        reaching.append(flags_of_block.take(place, 1))
        start += len(part)
    index, block = np.divmod(np.concatenate(places), blocks_of_row)
    bits = block_bits(seeds[index], positions[index], block)
    reached, close = np.concatenate(reaching, 1).view(np.bool_).reshape(2, -1, LANES)
    able = reached & (close | (bits >= least_bits[index, None]))
    found, lane = np.divmod(np.flatnonzero(able), LANES)
    index, tokens = index[found], block[found] * LANES + lane
    return index, tokens, scores[rows[index], tokens] + gumbel_of(bits[found, lane])


def _parts(scores: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    """Those rows of the scores, as many at a time as fit the cache. One by one they are not copied."""
    step = max(1, _IN_CACHE // scores.shape[1])
    for start in range(0, len(rows), step):
        yield scores[rows[start : start + step]] if step > 1 else scores[rows[start]][None]


def _best(
    rows: NDArray[np.intp], tokens: NDArray[np.int64], totals: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """[count] the token with the greatest total in each row, the lowest of several; 0 where there is none."""
    order = np.lexsort((tokens, -totals, rows))
    first = np.searchsorted(rows[order], np.arange(count))
    winners = tokens[order[np.minimum(first, len(order) - 1)]] if len(order) else np.zeros(count, np.int64)
    return np.asarray(np.where(np.bincount(rows, minlength=count) > 0, winners, 0), np.int64)


def accept_coupled(choices: Iterable[int], tokens: Sequence[int]) -> Outcome:
    """Accept draft tokens while they are the target's own choices, of which there are K+1. Later ones are not read."""
    for accepted, choice in enumerate(choices):
        if accepted == len(tokens) or choice != tokens[accepted]:
            return Outcome(accepted, choice)
    raise ValueError(f"{len(tokens)} draft tokens need {len(tokens) + 1} choices of the target")


# The rule `ratio`


def accept_ratio(
    target_probs: Iterable[Probs],
    speculation: Speculation,
    accept_uniforms: Sequence[Any] | NDArray[Any],
    bonus_uniform: Any,
) -> Outcome:
    """Rejection sampling over K+1 rows of target probabilities [V], driven by K+1 given numbers in [0, 1).

    Deterministic and generic: floats, or fractions in object arrays. Rows after a rejection are not read. A token
    without `draft_probs` was not drawn, so its distribution is a point mass. Raises ValueError for a token that its own
    distribution gives no probability: such a speculation cannot be honoured.
    """
    rows = iter(target_probs)
    for k, (token, target) in enumerate(zip(speculation.tokens, rows)):
        draft = SparseProbs((token,), (1,)) if speculation.draft_probs is None else speculation.draft_probs[k]
        probability = dict(zip(draft.ids, draft.probs)).get(token, 0)
        if not probability > 0:
            raise ValueError(f"draft token {token} at index {k} has no probability in the distribution it came with")
        # u < p/q, strictly: a token the target excludes is rejected even at u = 0.
        if not accept_uniforms[k] * probability < target[token]:
            return Outcome(k, draw(residual(target, draft), bonus_uniform))
    return Outcome(len(speculation.tokens), draw(next(rows), bonus_uniform))


def residual(target: Probs, draft: SparseProbs) -> Probs:
    """max(p - q, 0) / Z over [V], from which a rejected token is replaced; p itself if nothing is left (Z = 0)."""
    rest = target.copy()
    rest[list(draft.ids)] -= np.array(draft.probs, dtype=target.dtype)
    np.maximum(rest, 0, out=rest)
    total = rest.sum()
    return np.asarray(rest / total) if total > 0 else target


def draw(probs: Probs, u: Any) -> int:
    """Inverse-CDF draw from [n] probabilities (any positive total) with u in [0, 1); never a token of probability 0."""
    cumulated = np.cumsum(probs)
    if not cumulated[-1] > 0:
        raise ValueError("cannot draw from a distribution without mass")
    # The first sum above u * total, which stays below the total for every double u < 1: a sum that has just grown.
    return int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))


def cache_aware(probs: Probs, fan_out: int, scale: Any) -> Probs:
    """The paper's sampling scheme for the draft (its section 4.2.1): the top-F probabilities times C, renormalised.

    Residual mass then falls on the tokens a fan-out of F guesses. C = 1 returns `probs` itself. Equal probabilities are
    ranked by index. Where the scaled ones are all there is, C cancels out.
    """
    if scale == 1 or fan_out == 0:
        return probs
    ranked = np.argsort(-probs, kind="stable")
    if not probs[ranked[fan_out:]].sum() > 0:
        return probs
    mixed = probs.copy()
    mixed[ranked[:fan_out]] *= scale
    return np.asarray(mixed / mixed.sum())


# The draft


@dataclass(frozen=True)
class Candidates:
    """The draft's best tokens at each of R rows, in order of preference. In the host's memory."""

    ids: NDArray[np.int64]  # [R, width], or [R, 1]
    probs: NDArray[np.float64] | None  # [R, width] each row sums to 1: to be drawn from. None: take the first id
    confidence: NDArray[Any] | None = None  # [R] the draft's probability of its likeliest token; None: not asked for
    weights: NDArray[Any] | None = None  # as `ids`: see `propose`; None: not asked for, or not known

    def guesses(self, row: int, count: int, excluded: int | None = None) -> tuple[int, ...]:
        """The `count` best tokens of a row but `excluded`: after a rejection the bonus is not the rejected token."""
        ranked = self.ids[row, : count + 1].tolist()
        return tuple(token for token in ranked if token != excluded)[:count]

    def split(self, counts: Sequence[int]) -> Iterator[Candidates]:
        """The first `counts[0]` rows, the next `counts[1]`, and so on."""
        ends = list(accumulate(counts))
        for part in map(slice, [0, *ends], ends):
            rest = (None if all is None else all[part] for all in (self.probs, self.confidence, self.weights))
            yield Candidates(self.ids[part], *rest)


@dataclass(frozen=True)
class Query:
    """Rows of one sequence for which the draft is asked: row r follows context + tails[r]."""

    request: RequestSampling
    context: Sequence[int]
    tails: Sequence[Sequence[int]]
    width: int  # candidates that each row is looked at for
    allowed: Tensor | None = None  # [R, V] bool: the grammar mask
    first: bool = False  # under `coupled` the best one is all that is wanted

    @cached_property
    def filters(self) -> tuple[float, ...]:
        params = self.request.params
        return params.temperature, params.top_k, params.top_p, params.min_p, self.width, self.first

    @cached_property
    def adjusts(self) -> bool:
        return self.allowed is not None or changes_logits(self.request.params)

    def adjusted(self, logits: Tensor) -> Tensor:
        if not self.adjusts:
            return logits
        return adjusted(logits, self.request, self.context, self.tails, self.allowed)


def propose(
    logits: Tensor, queries: Sequence[Query], rule: Rule, *, confidence: bool = False, weights: bool = False
) -> list[Candidates]:
    """The draft's best tokens for each query, from [R, V] logits: the rows of one query after the other's.

    The chain is the target's, with the filters on the best `width` alone. Ranked by score (temperature 0), by score
    and the noise the target will use (`coupled`), or by probability (`ratio`); tokens a filter drops come last. The
    confidence is that before the filters, at temperature 1 for greedy decoding.

    A weight is the probability that the target chooses this token, if its logits differ from the draft's by
    independent Gumbel noise of scale 1: softmax(logits) for greedy decoding, which is as often right as it says, and
    softmax(temperature * (score + noise)) where the noise of the sampling is known (`coupled`). Under `ratio` at
    temperature > 0 there is none.

    Raises EngineError if the model returned no numbers. Logits on a device are reduced there, and read once for each
    group of equal filters.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    counts = [len(query.tails) for query in queries]
    # As in `verify`: queries with equal filters go through the chain together.
    groups = _groups([query.filters for query in queries])
    if len(groups) == 1 and not any(query.adjusts for query in queries):
        return list(_ranked(logits, queries, rule, confidence, weights).split(counts))
    tables = [query.adjusted(part) for part, query in zip(logits.split(counts), queries, strict=True)]
    found: dict[int, Candidates] = {}
    for members in groups:
        table = torch.cat([tables[index] for index in members])
        ranked = _ranked(table, [queries[index] for index in members], rule, confidence, weights)
        found |= zip(members, ranked.split([counts[index] for index in members]), strict=True)
    return [found[index] for index in range(len(queries))]


def _ranked(table: Tensor, queries: Sequence[Query], rule: Rule, confidence: bool, weights: bool) -> Candidates:
    """For all rows of queries with equal filters, from their adjusted logits."""
    params = queries[0].request.params
    values, ids = top(table, min(queries[0].width, table.shape[-1]))
    of_all = []
    if confidence:
        of_all.append(scaled(table, or_zero(values[:, :1]), params.temperature or 1.0).softmax(-1).amax(-1))
    if weights and params.temperature == 0:
        of_all.append((values - or_zero(log_total(table))).exp())
    # All that is needed of the vocabulary: read once, where it is on a device.
    values, ids, *read = to_host(values, ids, *of_all)
    check_numbers(values[:, 0].tolist())
    tokens, sure = ids.numpy(), read[0].numpy() if confidence else None
    if params.temperature == 0:
        return Candidates(tokens, None, sure, read[-1].numpy() if weights else None)
    values = scaled(values, or_zero(values[:, :1]), params.temperature)
    # Where nothing may follow the row is hopeless anyway, and every listed token as good as the next.
    values = values.masked_fill(values[:, :1] == -math.inf, 0)
    keep = survivors(values, params)
    if rule == "ratio":
        kept = values.masked_fill(~keep, -math.inf)
        return Candidates(tokens, torch.softmax(kept, -1, dtype=torch.float64).numpy(), sure)
    # Noise for those alone that can be had: it is what takes the time.
    scores = values.numpy()
    row, column = np.nonzero(scores >= scores[:, :1] - _FAR)
    seeds = np.repeat(np.array([query.request.seed for query in queries], np.uint64), [len(q.tails) for q in queries])
    positions = np.array([len(query.context) + len(tail) for query in queries for tail in query.tails])
    totals = scores.astype(np.float64) - _HOPELESS
    totals[row, column] = scores[row, column] + gumbel(seeds[row], positions[row], tokens[row, column])
    totals = np.where(keep.numpy(), totals, totals - _HOPELESS)
    order = totals.argmax(-1, keepdims=True) if queries[0].first else np.argsort(-totals, kind="stable")
    ranked = np.take_along_axis(tokens, order, -1)
    if not weights:
        return Candidates(ranked, None, sure)
    relative = np.exp(params.temperature * (totals - totals.max(-1, keepdims=True)))
    relative /= relative.sum(-1, keepdims=True)
    return Candidates(ranked, None, sure, np.take_along_axis(relative, order, -1))


def draw_draft(
    candidates: Candidates, row: int, u: float, fan_out: int = 0, scale: float = 1.0
) -> tuple[int, SparseProbs]:
    """Draw a draft token for the rule `ratio` with u = uniform(seed, position, Purpose.DRAFT, start).

    Returns it with the distribution it was really drawn from: after filters and cache-aware scaling (F = `fan_out`,
    C = `scale`). Raises ValueError for candidates that are not to be drawn from.
    """
    if candidates.probs is None:
        raise ValueError("these candidates carry no probabilities: take the first id")
    probs = cache_aware(candidates.probs[row], fan_out, scale)
    support = np.flatnonzero(probs)
    ids, probs = candidates.ids[row][support].tolist(), probs[support]
    return ids[draw(probs, u)], SparseProbs(tuple(ids), tuple(probs.tolist()))


# The target


@dataclass(frozen=True)
class Trial:
    """One sequence's round, to be decided: its K draft tokens after `context`, all committed tokens."""

    request: RequestSampling
    context: Sequence[int]
    speculation: Speculation
    allowed: Tensor | None = None  # [K+1, V] bool: the grammar mask

    @property
    def filters(self) -> tuple[float, ...]:
        params = self.request.params
        return params.temperature, params.top_k, params.top_p, params.min_p

    @property
    def adjusts(self) -> bool:
        return self.allowed is not None or changes_logits(self.request.params)

    @property
    def rows(self) -> int:
        """K+1."""
        return len(self.speculation.tokens) + 1

    def adjusted(self, logits: Tensor) -> Tensor:
        if not self.adjusts:
            return logits
        tails = [self.speculation.tokens[:k] for k in range(self.rows)]
        return adjusted(logits, self.request, self.context, tails, self.allowed)


def verify(logits: Tensor, trials: Sequence[Trial], rule: Rule) -> list[Outcome | ConfigError]:
    """Decide rounds, each by itself: [R, V] target logits over the trunks, K+1 rows of each trial after the other's.

    An empty speculation is plain decoding. Under `ratio` the bonus uniform belongs to the round's first position, so
    that it is known before the outcome. A trial that reaches a row in which every token is excluded gets the error that
    says so. Raises EngineError if the model returned no numbers, ProtocolError for an impossible draft.
    """
    (logits,) = to_host(logits)
    return Trials(trials, rule, logits.shape[1]).decide(logits)


class Trials:
    """`verify` in two steps: what can be done before there are logits, and the rest."""

    def __init__(self, trials: Sequence[Trial], rule: Rule, vocab_size: int) -> None:
        for trial in trials:
            check_speculation(trial.speculation, vocab_size)
        self._trials = trials
        self._rule = rule
        self._counts = [trial.rows for trial in trials]
        # Trials with equal filters go through the chain together: a few passes over the vocabulary for all of them.
        groups = _groups([trial.filters for trial in trials])
        self._groups = [(members, _Group([trials[index] for index in members])) for members in groups]
        self._untouched = len(groups) == 1 and not any(trial.adjusts for trial in trials)

    def decide(self, logits: Tensor) -> list[Outcome | ConfigError]:
        """From logits in the host's memory."""
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if logits.shape[0] != sum(self._counts):
            raise ValueError(f"the trials have {sum(self._counts)} rows, the logits {logits.shape[0]}")
        if self._untouched:
            ((_, group),) = self._groups
            return group.decide(logits, self._rule)
        parts = logits.split(self._counts)
        tables = [trial.adjusted(part) for trial, part in zip(self._trials, parts, strict=True)]
        outcomes: dict[int, Outcome | ConfigError] = {}
        for members, group in self._groups:
            table = torch.cat([tables[index] for index in members])
            outcomes |= zip(members, group.decide(table, self._rule), strict=True)
        return [outcomes[index] for index in range(len(self._trials))]


def _groups(keys: Sequence[tuple[float, ...]]) -> list[list[int]]:
    """Places of equal keys."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


class _Group:
    """Trials with equal filters, to be decided from their adjusted logits, the rows of one after the other's."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = trials
        counts = [trial.rows for trial in trials]
        self._firsts = list(accumulate(counts[:-1], initial=0))  # row of each trial
        self._rows = [slice(first, first + count) for first, count in zip(self._firsts, counts, strict=True)]
        if trials[0].request.params.temperature > 0:  # of every row
            self._seeds = np.repeat(np.array([trial.request.seed for trial in trials], np.uint64), counts)
            self._positions = np.array([len(trial.context) + k for trial in trials for k in range(trial.rows)])

    def decide(self, table: Tensor, rule: Rule) -> list[Outcome | ConfigError]:
        params = self._trials[0].request.params
        if params.temperature == 0:  # the rules coincide, and filters change nothing
            return self._decide_greedily(table.numpy())
        scores = filtered(table, params)
        if rule == "ratio":
            return [_reject(scores, first, trial) for first, trial in zip(self._firsts, self._trials, strict=True)]
        return self._decide_coupled(scores)

    def _decide_greedily(self, values: NDArray[Any]) -> list[Outcome | ConfigError]:
        chosen: list[int] = values.argmax(1).tolist()
        best = [values.item(place) for place in enumerate(chosen)]
        check_numbers(best)
        choices = [chosen[rows] for rows in self._rows]
        return self._outcomes(choices, [value == -math.inf for value in best], values.shape[1])

    def _decide_coupled(self, scores: Scores) -> list[Outcome | ConfigError]:
        values = scores.values.numpy()
        ids = None if scores.ids is None else scores.ids.numpy()
        choices: list[list[int]] = [[] for _ in self._trials]
        going = list(range(len(self._trials)))
        while going:  # the rows behind a rejected token need not be looked at: a few at a time, if they are long
            ahead = max(1, _AT_ONCE // (len(going) * values.shape[1]))
            looked = [range(len(choices[i]), min(len(choices[i]) + ahead, self._trials[i].rows)) for i in going]
            rows = np.array([self._firsts[i] + k for i, its in zip(going, looked, strict=True) for k in its])
            found = iter(choose(values, rows, self._seeds[rows], self._positions[rows], ids).tolist())
            for index, its in zip(going, looked, strict=True):
                choices[index] += islice(found, len(its))
            going = [index for index in going if _goes_on(choices[index], self._trials[index])]
        return self._outcomes(choices, scores.empty, scores.vocab_size)

    def _outcomes(
        self, choices: Sequence[Sequence[int]], empty: Sequence[bool], vocab_size: int
    ) -> list[Outcome | ConfigError]:
        """By what the target itself says in each trial's rows, and the rows in which no token may follow."""
        outcomes: list[Outcome | ConfigError] = []
        for trial, first, chosen in zip(self._trials, self._firsts, choices, strict=True):
            outcome = accept_coupled(chosen, trial.speculation.tokens)
            reached = empty[first : first + outcome.accepted + 1]
            if any(reached):
                outcomes.append(_nothing_follows(len(trial.context) + reached.index(True), vocab_size))
            else:
                outcomes.append(outcome)
        return outcomes


def _goes_on(choices: Sequence[int], trial: Trial) -> bool:
    """Whether all draft tokens so far are the target's own choices, and there are more rows."""
    return len(choices) < trial.rows and all(map(int.__eq__, choices, trial.speculation.tokens))


def _nothing_follows(position: int, vocab_size: int) -> ConfigError:
    return ConfigError(
        f"no token may follow at position {position}: bad_words, min_tokens (which bans the stop tokens) and the "
        f"grammar together exclude all {vocab_size} tokens; relax one of them"
    )


def _reject(scores: Scores, first: int, trial: Trial) -> Outcome | ConfigError:
    """The rule `ratio` for the rows from `first` on."""
    start = len(trial.context)

    def rows() -> Iterator[Probs]:
        for k in range(trial.rows):
            if scores.empty[first + k]:
                raise _nothing_follows(start + k, scores.vocab_size)
            yield _probs(scores, first + k)

    try:
        return accept_ratio(
            rows(),
            trial.speculation,
            uniforms(trial.request.seed, range(start, start + trial.rows - 1), Purpose.ACCEPT),
            uniform(trial.request.seed, start, Purpose.BONUS),
        )
    except ConfigError as error:
        return error


def _probs(scores: Scores, row: int) -> NDArray[np.float64]:
    """[V] probabilities of a row of scores. In float64: a tail of 100,000 tokens would be lost in a float32 sum."""
    listed: NDArray[np.float64] = torch.softmax(scores.values[row], -1, dtype=torch.float64).numpy()
    if scores.ids is None:
        return listed
    probs = np.zeros(scores.vocab_size)
    probs[scores.ids[row].numpy()] = listed
    return probs


def check_speculation(speculation: Speculation, vocab_size: int) -> None:
    """Refuse draft tokens or distributions that cannot be. Raises ProtocolError naming the token's index."""
    for k, token in enumerate(speculation.tokens):
        if not 0 <= token < vocab_size:
            raise ProtocolError(f"draft token {k} is {token}; the target's ids are 0 to {vocab_size - 1}")
        if speculation.draft_probs is None:
            continue
        draft = speculation.draft_probs[k]
        if (
            len(draft.ids) != len(draft.probs)
            or len(set(draft.ids)) != len(draft.ids)
            or not all(0 <= token < vocab_size for token in draft.ids)
            or not all(0 < probability <= 1 for probability in draft.probs)
            or abs(math.fsum(draft.probs) - 1) > _SUM_TOLERANCE
        ):
            raise ProtocolError(
                f"the distribution of draft token {k} is not one: it needs distinct ids from 0 to {vocab_size - 1}, "
                f"each with a probability above 0, that sum to 1"
            )
        if token not in draft.ids:
            raise ProtocolError(f"draft token {k} is {token}, which the distribution sent with it does not contain")


# Metrics


def acceptance(target: NDArray[np.float64], draft: NDArray[np.float64]) -> float:
    """Probability that `ratio` accepts a token drawn from `draft`: the sum of min(p, q) = 1 - TV(p, q) (Theorem 1)."""
    return float(np.minimum(target, draft).sum())


def coupled_acceptance(target: NDArray[np.float64], draft: NDArray[np.float64]) -> float:
    """Probability that `coupled` accepts: the sum over x of 1 / sum over y of max(p_y/p_x, q_y/q_x).

    In order of p/q the inner sum splits in two: the ratio of p is the greater one from x on, that of q before.
    """
    both = (target > 0) & (draft > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(target / draft)  # q = 0 is infinite; p = q = 0 is not a number and adds nothing anywhere
    p, q, both = target[order], draft[order], both[order]
    from_here, before = np.cumsum(p[::-1])[::-1], np.cumsum(q) - q
    return float((1 / (from_here[both] / p[both] + before[both] / q[both])).sum())
