"""The closed forms of the paper (arXiv 2603.03251) and of Leviathan et al. (2023). Pure arithmetic, exact limits.

Words: p is a hit rate, E the mean number of tokens a round emits for a sequence (bonus included) after a hit or a miss,
T_p and T_b the time to draft beforehand and after a miss, in units of one verification; a is the probability that a
draft token is accepted, K the lookahead, F_k the guesses for acceptance length k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BISECTIONS = 100


# Rounds


def tokens_per_round(acceptance: float, lookahead: int) -> float:
    """E: 1 + a + … + a^K, the tokens of one verification, bonus included (Leviathan et al., equation 1)."""
    return math.fsum(acceptance**k for k in range(lookahead + 1))


def sd_speed_up(acceptance: float, lookahead: int, draft_cost: float) -> float:
    """Speculative decoding over plain decoding; `draft_cost` is one draft step in verifications (Theorem 3.8 there)."""
    return tokens_per_round(acceptance, lookahead) / (1 + lookahead * draft_cost)


def overall_hit_rate(after_hit: float, after_miss: float) -> float:
    """The share of rounds that hit, from the hit rates after a hit and after a miss (Theorem 7).

    The stationary law of a chain of two states. A chain that leaves neither state stays where a run starts: at a hit.
    """
    leaving = 1 + after_miss - after_hit
    return 1.0 if leaving == 0 else after_miss / leaving


def ssd_speed_up(
    p_hit: float, e_hit: float, e_miss: float, t_p: float, t_b: float, batch: int = 1, *, interrupt: bool = True
) -> float:
    """SSD over plain decoding (Theorem 7). A batch waits for the backup unless all its rows hit (Corollary 16).

    The theorem has a primary that is slower than the verification leave its branches unfinished when they turn out to
    be useless. Without `interrupt` it finishes them before the backup starts, as this package's speculator does.
    """
    all_hit = p_hit**batch
    busy = max(1.0, t_p)
    after_miss = (1.0 if interrupt else busy) + t_b
    return (p_hit * e_hit + (1 - p_hit) * e_miss) / (all_hit * busy + (1 - all_hit) * after_miss)


def defer_speed_up(p_hit: float, e_hit: float, e_miss: float, t_p: float, t_b: float, batch: int) -> float:
    """SSD over plain decoding when a row that missed sits a round out instead of keeping the batch waiting.

    Ours, for hits that are independent of each other. How many rows sit out is a Markov chain: of those that did not
    the last time, as many as miss; if that is the whole batch, nobody does, and all wait for the backup (`t_b`). With a
    batch of 1 it is `ssd_speed_up` without interruption.
    """
    chain = np.zeros((batch + 1, batch + 1))  # from and to the number that sits out
    misses = np.ones(1)
    for looked_up in range(batch + 1):
        chain[batch - looked_up, : looked_up + 1] = misses
        misses = np.convolve(misses, (p_hit, 1 - p_hit))
    all_miss = float(chain[0, batch])
    chain[0, 0], chain[0, batch] = chain[0, 0] + all_miss, 0.0
    # Where it is in the long run from a batch in which nobody sits out; half of the steps stay, so that it settles.
    shares = np.linalg.matrix_power((chain + np.eye(batch + 1)) / 2, 2**12)[0]
    verified = 1 - float(shares @ np.arange(batch + 1)) / batch
    return verified * (p_hit * e_hit + (1 - p_hit) * e_miss) / (max(1.0, t_p) + float(shares[0]) * all_miss * t_b)


def ssd_over_same_draft(p_hit: float, t_sd: float) -> float:
    """SSD whose primary and backup are SD's own draft, over SD: at least 1 (Corollary 8).

    `t_sd` is the time to draft. Presumes that the draft has hardware of its own in both.
    """
    return (1 + t_sd) / (p_hit * max(1.0, t_sd) + (1 - p_hit) * (1 + t_sd))


def ssd_over_sd_bounds(p_hit: float, e_hit: float, e_sd: float, t_sd: float) -> tuple[float, float]:
    """Bounds of SSD over SD (Corollary 9); hold for T_p < 1, T_b = 0 and E_hit >= E_miss."""
    limit = (1 + t_sd) * e_hit / e_sd
    return limit * p_hit, limit


def critical_batch(p_hit: float, e_hit: float, e_miss: float, t_p: float) -> float:
    """b*: below this batch size drafting again after a miss is best, above it a backup that costs nothing (Theorem 17).

    `e_miss` is what a round yields on the fast backup. Infinite when the slow backup is best for every batch, or when
    there is no miss to be answered; 0 when the fast one always is.
    """
    if p_hit >= 1:
        return math.inf
    if e_hit <= e_miss:
        return 0.0
    mean = p_hit * e_hit + (1 - p_hit) * e_miss
    # p^b* of the batch at which both are equally fast, times T_p.
    share = 1 + t_p - e_hit / mean
    if share <= 0 or t_p == 0:
        return math.inf
    if p_hit <= 0:
        return 0.0
    return max(0.0, math.log(share / t_p) / math.log(p_hit))


# Fan-out


def outcome_weights(acceptance: Sequence[float]) -> tuple[float, ...]:
    """P(k draft tokens accepted) for k = 0 … K, from the acceptance of each of the K positions, given the ones before.

    With equal acceptances: a^k (1 - a), and a^K for the last.
    """
    weights: list[float] = []
    reached = 1.0
    for accepted in acceptance:
        weights.append(reached * (1 - accepted))
        reached *= accepted
    return (*weights, reached)


def geometric_fan_out(budget: float, lookahead: int, acceptance: float, exponent: float) -> tuple[float, ...]:
    """The best real-valued F_0 … F_K when a guess list of F misses with probability c F^-r (Theorem 12).

    F_k is proportional to P(k accepted)^(1/(1+r)): geometric, the last one boosted by (1-a)^(-1/(1+r)). Written so, the
    limits need no division: a = 0 gives (B, 0, …), a = 1 gives (…, 0, B).
    """
    shares = [weight ** (1 / (1 + exponent)) for weight in outcome_weights([acceptance] * lookahead)]
    total = math.fsum(shares)
    return tuple(budget * share / total for share in shares)


def optimal_fan_out(budget: float, weights: Sequence[float], slope: Callable[[float], float]) -> tuple[float, ...]:
    """The best real-valued F_0 … F_K for any concave hit curve (Theorem 18).

    `slope(F)` for F > 0 is its derivative: what a little more fan-out gains. At the optimum weight * slope is one price
    for every row that has guesses, and at most that price where it has none; the price is found by bisection.
    """

    def bought(weight: float, price: float) -> float:
        low, high = 0.0, float(budget)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if middle > 0 and weight * slope(middle) > price else (low, middle)
        return low

    least = max(weights) * slope(float(budget))  # at this price one row alone would take everything
    most = max(weights) * slope(budget / (2 * len(weights)))
    low, high = math.log(max(least, 1e-300)) - 1, math.log(max(most, 1e-300)) + 1
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        spent = math.fsum(bought(weight, math.exp(middle)) for weight in weights)
        low, high = (middle, high) if spent > budget else (low, middle)
    shares = [bought(weight, math.exp(high)) for weight in weights]
    total = math.fsum(shares)
    return tuple(budget * share / total for share in shares)


# Cache-aware sampling


def residual_hit_rate(target: NDArray[Any], draft: NDArray[Any], fan_out: int, *, exclude_rejected: bool = True) -> Any:
    """P(the bonus token is guessed, given that a token of `draft` was rejected), under the rule `ratio`.

    The guesses are the `fan_out` likeliest draft tokens, without the rejected one as the speculator makes them; with
    `exclude_rejected` false they are one fixed set, as in Theorem 15. [V] probabilities, floats or fractions in object
    arrays. 1 when nothing is ever rejected.
    """
    rejected = np.maximum(draft - target, 0)
    total = rejected.sum()
    if not total > 0:
        return 1
    residual = np.maximum(target - draft, 0) / total
    ranked = np.argsort(-draft, kind="stable")
    if not exclude_rejected:
        return residual[ranked[:fan_out]].sum()
    return sum(rejected[x] / total * residual[ranked[ranked != x][:fan_out]].sum() for x in np.flatnonzero(rejected))
