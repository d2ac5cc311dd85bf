"""How scores become tokens: the two acceptance rules, what the draft proposes, and the verification of one sequence.

- `coupled`: the token at a position is argmax(score + Gumbel noise), the noise a function of (seed, position, token).
  Draft and target share it; a draft token is accepted iff the target chooses it too (Daliri et al., 2024).
- `ratio`: accept x with probability min(1, p(x)/q(x)), else draw from the residual (Leviathan et al., 2023).

Both emit exactly the target's distribution, whatever was drafted. At temperature 0 they coincide. Nothing here knows of
engines, channels or caches, and no state is kept: a draw is a function of seed and position. Both sides stand in this
one file because they must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saguaro.errors import ProtocolError
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
    adjusted,
    check_vocabulary,
    checked_best,
    needs_history,
    scaled,
    survivors,
    target_scores,
    top,
)
from saguaro.orchestrator.types import Outcome, RequestSampling, Rule, SparseProbs, Speculation

__all__ = [
    "Candidates",
    "Purpose",
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

# Tokens this close to the best are tried first: their total bounds the noise that tokens further below would need.
_NEAR = 4.0
_SUM_TOLERANCE = 1e-6


# The rule `coupled`


def choose(row: Tensor, seed: int, position: int, ids: Tensor | None = None) -> int:
    """argmax(score + Gumbel noise), the lowest id on a tie. `row` is [V], or a list whose tokens `ids` names.

    Over the vocabulary the noise is evaluated only where it can win; it is bounded, so the result is that of all V.
    Noise of 24 bits draws from softmax(row) to within some 1e-7; a token 20.2 below the best (p < 2e-9) is never drawn.
    """
    values = row.cpu().numpy()
    if ids is not None:
        listed = np.flatnonzero(values > -np.inf)
        tokens = ids.cpu().numpy()[listed]
        totals = values[listed] + gumbel(seed, position, tokens)
        return int(tokens[totals == totals.max()].min())
    near = float(values.max()) - _NEAR
    tokens, totals = _contenders(values, near, 0, seed, position)
    leader = float(totals.max())
    # Below `near` only noise above leader - near wins, which few tokens have; below leader - GUMBEL_MAX none does.
    slack = 1e-12 * (1 + abs(leader))  # more than the sums are rounded by
    least_bits = bits_reaching(leader - near - slack)
    further, their_totals = _contenders(values, leader - GUMBEL_MAX - slack, least_bits, seed, position)
    tokens, totals = np.concatenate([tokens, further]), np.concatenate([totals, their_totals])
    return int(tokens[totals == totals.max()].min())


def _contenders(
    values: NDArray[Any], bound: float, least_bits: int, seed: int, position: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens of [V] scores that reach `bound` and whose noise reaches `least_bits`; score + noise of each."""
    flags = np.zeros(-(-len(values) // LANES) * LANES, dtype=bool)
    # In the type of the values; rounding is monotonic, so the bound does not pass a value it was below.
    np.greater_equal(values, values.dtype.type(bound), out=flags[: len(values)])
    flags_of_block = flags.view(np.uint32)
    blocks = np.flatnonzero(flags_of_block)
    reached = flags_of_block[blocks].view(np.bool_).reshape(-1, LANES)
    bits = block_bits(seed, position, blocks)
    able = np.flatnonzero(reached & (bits >= least_bits))
    index, lane = able // LANES, able % LANES
    tokens = blocks[index] * LANES + lane
    return tokens, values[tokens] + gumbel_of(bits[index, lane])


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
    """The draft's best tokens at each of R rows, in order of preference."""

    ids: Tensor  # [R, width] int64
    probs: Tensor | None  # [R, width] float64, each row sums to 1: to be drawn from. None: take the first id

    def guesses(self, row: int, count: int, excluded: int | None = None) -> tuple[int, ...]:
        """The `count` best tokens of a row but `excluded`: after a rejection the bonus is not the rejected token."""
        ranked = self.ids[row, : count + 1].tolist()
        return tuple(token for token in ranked if token != excluded)[:count]


def propose(
    logits: Tensor,
    request: RequestSampling,
    rule: Rule,
    context: Sequence[int],
    tails: Sequence[Sequence[int]],
    width: int,
    allowed: Tensor | None = None,
) -> Candidates:
    """The draft's `width` best tokens for [R, V] logits; rows, histories and `allowed` as in `target_scores`.

    The chain is the target's, with the filters on the best `width` alone. Ranked by score (temperature 0), by score
    and the noise the target will use (`coupled`), or by probability (`ratio`); tokens a filter drops come last. Raises
    EngineError if the model returned no numbers.
    """
    params = request.params
    values, ids = top(adjusted(logits, request, context, tails, allowed), min(width, logits.shape[-1]))
    best = checked_best(values[:, :1])
    if params.temperature == 0:
        return Candidates(ids, None)
    values = scaled(values, best, params.temperature)
    # Where nothing may follow the row is hopeless anyway, and every listed token as good as the next.
    values = values.masked_fill(values[:, :1] == -math.inf, 0)
    keep = survivors(values, params)
    if rule == "ratio":
        kept = values.masked_fill(~keep, -math.inf)
        return Candidates(ids, torch.softmax(kept, -1, dtype=torch.float64))
    tokens = ids.cpu().numpy()
    positions = np.array([[len(context) + len(tail)] for tail in tails])
    totals = values.cpu().numpy() + gumbel(request.seed, positions, tokens)
    order = np.lexsort((-totals, ~keep.cpu().numpy()))
    return Candidates(torch.from_numpy(np.take_along_axis(tokens, order, -1)).to(ids.device), None)


def draw_draft(
    candidates: Candidates, row: int, u: float, fan_out: int = 0, scale: float = 1.0
) -> tuple[int, SparseProbs]:
    """Draw a draft token for the rule `ratio` with u = uniform(seed, position, Purpose.DRAFT).

    Returns it with the distribution it was really drawn from: after filters and cache-aware scaling (F = `fan_out`,
    C = `scale`). Raises ValueError for candidates that are not to be drawn from.
    """
    if candidates.probs is None:
        raise ValueError("these candidates carry no probabilities: take the first id")
    probs = cache_aware(candidates.probs[row].cpu().numpy(), fan_out, scale)
    support = np.flatnonzero(probs)
    ids, probs = candidates.ids[row].cpu().numpy()[support].tolist(), probs[support]
    return ids[draw(probs, u)], SparseProbs(tuple(ids), tuple(probs.tolist()))


# The target


def verify(
    logits: Tensor,
    request: RequestSampling,
    rule: Rule,
    context: Sequence[int],
    speculation: Speculation,
    allowed: Tensor | None = None,
) -> Outcome:
    """Decide one sequence's round: [K+1, V] target logits over the trunk, `context` all committed tokens.

    An empty speculation is plain decoding. `allowed` [K+1, V] is the grammar mask. Under `ratio` the bonus uniform
    belongs to the round's first position, so that it is known before the outcome. Raises ConfigError if a row that is
    reached excludes every token, EngineError if the model returned no numbers, ProtocolError for an impossible draft.
    """
    tokens, count = speculation.tokens, len(speculation.tokens) + 1
    if len(logits) != count:
        raise ValueError(f"{count - 1} draft tokens need {count} rows of logits, got {len(logits)}")
    vocab_size = logits.shape[-1]
    check_speculation(speculation, vocab_size)
    table = target_scores(logits, request, context, [tokens[:k] for k in range(count)], allowed)
    rows = (table.row(k) for k in range(count))
    seed, first = request.seed, len(context)
    if request.params.temperature == 0:
        return accept_coupled((int(values.cpu().numpy().argmax()) for values, _ in rows), tokens)
    if rule == "coupled":
        return accept_coupled((choose(values, seed, first + k, ids) for k, (values, ids) in enumerate(rows)), tokens)
    return accept_ratio(
        (_probs(values, ids, vocab_size) for values, ids in rows),
        speculation,
        uniforms(seed, range(first, first + count - 1), Purpose.ACCEPT),
        uniform(seed, first, Purpose.BONUS),
    )


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


def _probs(values: Tensor, ids: Tensor | None, vocab_size: int) -> NDArray[np.float64]:
    """[V] probabilities of a row of scores. In float64: a tail of 100,000 tokens would be lost in a float32 sum."""
    listed: NDArray[np.float64] = torch.softmax(values, -1, dtype=torch.float64).cpu().numpy()
    if ids is None:
        return listed
    probs = np.zeros(vocab_size)
    probs[ids.cpu().numpy()] = listed
    return probs


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
