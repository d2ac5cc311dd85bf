"""Counter-based random numbers: every draw is a pure function of (seed, position, purpose).

There is no generator and no state, so a draw does not depend on the batch, the mode, the lookahead, misses, restarts or
other requests. The function is Philox4x32-10 (Salmon et al., SC 2011): the key is the 64-bit seed, the counter is

    (token block, position low word, position high word, purpose)

and one evaluation gives four 32-bit words. Gumbel noise takes one word per token, lane `id % 4` of block `id // 4`;
a uniform takes two words of block 0. A draft's takes them of the block of the position at which its speculation starts:
the tail of a rejected speculation is drawn again for the next one, and with other numbers, so that nothing that was
decided in the meantime can depend on them.
"""

from __future__ import annotations

import math
from enum import IntEnum
from itertools import cycle

import numpy as np
from numpy.typing import ArrayLike, NDArray

LANES = 4
NOISE_BITS = 24

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_HALVES = np.array([[0], [32]], dtype=np.uint64)  # shifts, of which the low 32 bits of the result count
_FEW = 12  # counters that are evaluated one by one
_CHUNK = 16384  # counters at a time: the working set stays in the L2 cache


class Purpose(IntEnum):
    """What a draw is for. Draws of one position for different purposes are independent."""

    GUMBEL = 0
    ACCEPT = 1
    BONUS = 2
    DRAFT = 3


def philox(counters: NDArray[np.uint64], seeds: ArrayLike) -> NDArray[np.uint64]:
    """Philox4x32-10. Counters are [4, n] 32-bit words; one 64-bit seed or [n], low word first; result [4, n] words.

    Words come and go in 64-bit integers. Inside, the halves of a product are read where they lie, the low one first.
    """
    seed = np.empty(counters.shape[1], dtype=np.uint64)
    seed[:] = seeds
    if len(seed) <= _FEW:
        each = [_philox(*one) for one in zip(*counters.tolist(), seed.tolist(), strict=True)]
        return np.array(each, dtype=np.uint64).reshape(-1, LANES).T
    words = np.empty_like(counters)
    for start in range(0, counters.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        even, odd = counters[0::2, part].astype(np.uint32), counters[1::2, part].astype(np.uint32)
        own = seed[part]
        if (own == own[0]).all():
            own = own[:1]  # many counters of one seed are the rule: one key serves them all
        keys = ((own >> _HALVES) + _KEY_STEPS).astype(np.uint32)  # [2, 1 or n] each
        products = [np.empty(even.shape, dtype=np.uint64) for _ in range(2)]  # this round's, and the last one's
        halves = [product.view(np.uint32).reshape(2, -1, 2)[::-1] for product in products]
        places = [(product, half[..., 0], half[..., 1]) for product, half in zip(products, halves, strict=True)]
        for key, (product, low, high) in zip(keys, cycle(places)):
            np.multiply(_MULTIPLIERS, even, product)
            np.bitwise_xor(high, odd, even)
            even ^= key
            odd = low
        words[0::2, part], words[1::2, part] = even, odd
    return words


def _philox(a: int, b: int, c: int, d: int, seed: int) -> tuple[int, int, int, int]:
    """The same for one counter, which takes a few microseconds; any number of them in numpy takes fifty at least."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (right >> 32) ^ b ^ low, right & 0xFFFFFFFF
        c, d = (left >> 32) ^ d ^ high, left & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def _words(seeds: ArrayLike, blocks: ArrayLike, positions: ArrayLike, purpose: Purpose) -> NDArray[np.uint64]:
    """[4, n] words of each (block, position); the two broadcast against each other. One seed, or [n]."""
    at = np.asarray(positions, dtype=np.uint64)
    block = np.asarray(blocks, dtype=np.uint64)
    counters = np.empty((LANES, np.broadcast(block, at).size), dtype=np.uint64)
    counters[0], counters[1], counters[2], counters[3] = block, at & _WORD, at >> _HALF, purpose
    return philox(counters, seeds)


def uniforms(seed: int, positions: ArrayLike, purpose: Purpose, block: int = 0) -> NDArray[np.float64]:
    """One number in [0, 1) for each of the n positions, with all 53 bits of a double; [n]."""
    high, low, _, _ = _words(seed, block, np.atleast_1d(np.asarray(positions, dtype=np.uint64)), purpose)
    drawn: NDArray[np.float64] = ((high >> 5) * 2.0**26 + (low >> 6)) * 2.0**-53
    return drawn


def uniform(seed: int, position: int, purpose: Purpose, block: int = 0) -> float:
    """One number in [0, 1)."""
    return float(uniforms(seed, position, purpose, block)[0])


def block_bits(seeds: ArrayLike, positions: ArrayLike, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The 24-bit noise of whole blocks, [n, 4]: entry [i, lane] belongs to token `4 * blocks[i] + lane`."""
    return (_words(seeds, blocks, positions, Purpose.GUMBEL).T >> (32 - NOISE_BITS)).view(np.int64)


def noise_bits(seeds: ArrayLike, positions: ArrayLike, token_ids: ArrayLike) -> NDArray[np.int64]:
    """The 24-bit noise of each token; seeds, positions and ids broadcast, the result has their common shape.

    Neighbouring ids of one block share its evaluation: the whole vocabulary in order costs V/4 blocks.
    """
    tokens, at, seed = np.broadcast_arrays(
        np.asarray(token_ids, dtype=np.int64),
        np.asarray(positions, dtype=np.uint64),
        np.asarray(seeds, dtype=np.uint64),
    )
    shape, tokens, at, seed = tokens.shape, tokens.ravel(), at.ravel(), seed.ravel()
    blocks = tokens // LANES
    fresh = np.ones(tokens.size, dtype=bool)
    fresh[1:] = (blocks[1:] != blocks[:-1]) | (at[1:] != at[:-1]) | (seed[1:] != seed[:-1])
    bits: NDArray[np.int64] = block_bits(seed[fresh], at[fresh], blocks[fresh])[np.cumsum(fresh) - 1, tokens % LANES]
    return bits.reshape(shape)


def gumbel_of(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    """The Gumbel variate of 24-bit noise i: the quantile at u = (i + 0.5) / 2^24. Increasing in i, hence bounded."""
    noise: NDArray[np.float64] = -np.log(-np.log((bits + 0.5) * 2.0**-NOISE_BITS))
    return noise


def gumbel(seeds: ArrayLike, positions: ArrayLike, token_ids: ArrayLike) -> NDArray[np.float64]:
    """Gumbel noise of each token at its position, within [GUMBEL_MIN, GUMBEL_MAX]; the three broadcast."""
    return gumbel_of(noise_bits(seeds, positions, token_ids))


def bits_reaching(noise: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bounds for pruning: no 24-bit value below them has Gumbel noise of `noise` or more."""
    exact = np.exp(-np.exp(-np.maximum(noise, GUMBEL_MIN))) * 2.0**NOISE_BITS - 0.5
    bound: NDArray[np.int64] = np.maximum(0, np.floor(exact) - 1).astype(np.int64)
    return bound  # a step lower than exact, whatever `exp` rounds to


GUMBEL_MIN = -math.log(-math.log(0.5 * 2.0**-NOISE_BITS))
GUMBEL_MAX = -math.log(-math.log1p(-0.5 * 2.0**-NOISE_BITS))
