"""Exact laws of small models, by enumeration with fractions: the proof that an acceptance rule is lossless.

Models are Markov tables: row t is the distribution (or the scores) of the token after t. A drafter is a function from
the last token to every speculation it may come up with, and its probability. The rules under test are arguments, so
that wrong ones can be shown to fail. Laws are compared with `==`; there is no tolerance anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from saguaro.orchestrator.types import Outcome, SparseProbs, Speculation

Row = tuple[Fraction, ...]
Table = tuple[Row, ...]
Law = dict[tuple[int, ...], Fraction]
Drafter = Callable[[int], Iterable[tuple[Fraction, Speculation]]]
AcceptRatio = Callable[[Any, Speculation, Any, Any], Outcome]
AcceptCoupled = Callable[[Iterable[int], Sequence[int]], Outcome]

ONE = Fraction(1)


# Drafters


def sparse(row: Sequence[Fraction]) -> SparseProbs:
    """The non-zero entries of a distribution."""
    support = [token for token, probability in enumerate(row) if probability > 0]
    return SparseProbs(tuple(support), tuple(row[token] for token in support))


def drawn(table: Table, lookahead: int, recorded: Table | None = None) -> Drafter:
    """Tokens drawn one after another from the table. `recorded`: the distributions they come with, if others."""
    said = table if recorded is None else recorded

    def drafter(last: int) -> Iterator[tuple[Fraction, Speculation]]:
        for tokens in itertools.product(range(len(table)), repeat=lookahead):
            before = (last, *tokens[:-1]) if tokens else ()
            weight = math.prod((table[b][t] for b, t in zip(before, tokens)), start=ONE)
            if weight > 0:
                yield weight, Speculation(tokens, tuple(sparse(said[b]) for b in before))

    return drafter


def pointed(table: Table, lookahead: int) -> Drafter:
    """The likeliest tokens, as a greedy draft or an n-gram would propose: point masses."""

    def drafter(last: int) -> Iterator[tuple[Fraction, Speculation]]:
        tokens = [last]
        for _ in range(lookahead):
            row = table[tokens[-1]]
            tokens.append(row.index(max(row)))
        yield ONE, Speculation(tuple(tokens[1:]))

    return drafter


def pruned(table: Table, lookahead: int, least: Fraction, *, by_drawn: bool = False) -> Drafter:
    """Tokens drawn from the table as long as its best one has at least this probability.

    `by_drawn` is the mistake: the speculation ends at a token that itself has less.
    """

    def drafter(last: int) -> Iterator[tuple[Fraction, Speculation]]:
        whole: dict[Speculation, Fraction] = defaultdict(Fraction)
        for weight, speculation in drawn(table, lookahead)(last):
            before = (last, *speculation.tokens[:-1])
            sure = [table[b][t] if by_drawn else max(table[b]) for b, t in zip(before, speculation.tokens)]
            length = next((k for k, probability in enumerate(sure) if probability < least), lookahead)
            whole[speculation.first(length)] += weight
        yield from ((weight, speculation) for speculation, weight in whole.items())

    return drafter


def random_tokens(vocab_size: int, lookahead: int) -> Drafter:
    """Uniform tokens without a recorded distribution: point masses, whichever they are."""

    def drafter(_last: int) -> Iterator[tuple[Fraction, Speculation]]:
        for tokens in itertools.product(range(vocab_size), repeat=lookahead):
            yield Fraction(1, vocab_size**lookahead), Speculation(tokens)

    return drafter


def nothing(_last: int) -> Iterator[tuple[Fraction, Speculation]]:
    """The backup `none`: the row decodes one token."""
    yield ONE, Speculation()


# The rule `ratio`


class _UnreadError(Exception):
    """The rule asked for a uniform that the enumeration has not fixed yet."""


class _Uniforms:
    """The uniforms fixed so far; reading a further one asks the enumeration to branch."""

    def __init__(self, values: tuple[Fraction, ...]) -> None:
        self._values = values

    def __getitem__(self, index: int) -> Fraction:
        if index >= len(self._values):
            raise _UnreadError
        return self._values[index]


def _cells(cuts: Iterable[Fraction], every: bool) -> list[tuple[Fraction, Fraction]]:
    """Points i/M of a uniform and the mass each stands for. All cuts lie on the grid, so that P(u < cut) is exact.

    A rule decides monotonically in its uniform; so it is enough to look at the first and at the last point of each cell
    between cuts, the first one weighing a single grid step: that is where `<=` differs from `<`. With `every`, all
    points of the grid are visited.
    """
    inner = sorted({cut for cut in cuts if 0 < cut < 1})
    size = 2 * math.lcm(*(cut.denominator for cut in inner))
    step = Fraction(1, size)
    if every:
        return [(i * step, step) for i in range(size)]
    edges = [Fraction(0), *inner, ONE]
    points: list[tuple[Fraction, Fraction]] = []
    for low, high in itertools.pairwise(edges):
        points.append((low, step))
        if high - low > step:
            points.append((high - step, high - low - step))
    return points


def _q(speculation: Speculation, k: int) -> dict[int, Fraction]:
    if speculation.draft_probs is None:
        return {speculation.tokens[k]: ONE}
    return dict(zip(speculation.draft_probs[k].ids, speculation.draft_probs[k].probs))  # type: ignore[arg-type]


def _accept_cut(p: Row, speculation: Speculation, k: int) -> Fraction:
    token = speculation.tokens[k]
    q = _q(speculation, k).get(token, Fraction(0))
    return p[token] / q if q > 0 else ONE


def _bonus_cuts(p: Row, q: dict[int, Fraction]) -> list[Fraction]:
    """Cumulative probabilities of what should be drawn: the residual, or p itself for an empty q."""
    rest = [max(p_x - q.get(x, Fraction(0)), Fraction(0)) for x, p_x in enumerate(p)]
    total = sum(rest, Fraction(0))
    return list(itertools.accumulate(r / total for r in rest)) if total > 0 else list(itertools.accumulate(p))


def round_law(accept: AcceptRatio, target: Table, drafter: Drafter, last: int, every: bool = False) -> Law:
    """Law of the tokens one round emits: over every draft path, every acceptance and every draw."""
    law: Law = defaultdict(Fraction)
    for weight, speculation in drafter(last):
        rows = [target[token] for token in (last, *speculation.tokens)]
        probs = np.array(rows, dtype=object)
        open_paths: list[tuple[tuple[Fraction, ...], Fraction]] = [((), weight)]
        while open_paths:
            fixed, mass = open_paths.pop()
            try:
                accepted = accept(probs, speculation, _Uniforms(fixed), Fraction(0)).accepted
            except _UnreadError:
                cut = _accept_cut(rows[len(fixed)], speculation, len(fixed))
                open_paths.extend(((*fixed, u), mass * share) for u, share in _cells([cut], every))
                continue
            rejected = accepted < len(speculation.tokens)
            cuts = _bonus_cuts(rows[accepted], _q(speculation, accepted) if rejected else {})
            for u, share in _cells(cuts, every):
                outcome = accept(probs, speculation, _Uniforms(fixed), u)
                law[(*speculation.tokens[: outcome.accepted], outcome.bonus)] += mass * share
    return dict(law)


def target_law(target: Table, last: int, length: int) -> Law:
    """Law of `length` tokens by plain decoding, without the impossible."""
    return completed({(): ONE}, target, last, length)


def completed(law: Law, target: Table, last: int, length: int) -> Law:
    """Every emitted prefix continued by plain decoding to `length` tokens."""
    whole: Law = defaultdict(Fraction)
    stack = list(law.items())
    while stack:
        tokens, mass = stack.pop()
        if len(tokens) >= length:
            whole[tokens] += mass
            continue
        row = target[tokens[-1] if tokens else last]
        stack.extend(((*tokens, token), mass * p) for token, p in enumerate(row) if p > 0)
    return {tokens: mass for tokens, mass in whole.items() if mass != 0}


def assert_same_law(found: Law, expected: Law, what: str) -> None:
    different = sorted(key for key in found.keys() | expected.keys() if found.get(key, 0) != expected.get(key, 0))
    shown = ", ".join(f"{key}: {found.get(key, 0)} instead of {expected.get(key, 0)}" for key in different[:3])
    assert not different, f"{what}: {len(different)} sequences with a wrong probability: {shown}"


def assert_lossless(accept: AcceptRatio, target: Table, drafter: Drafter, last: int, every: bool = False) -> None:
    """One round emits the target's law."""
    law = round_law(accept, target, drafter, last, every)
    length = max(map(len, law))
    assert_same_law(completed(law, target, last, length), target_law(target, last, length), "one round")


def assert_lossless_over_cache(
    accept: AcceptRatio,
    target: Table,
    drafter: Drafter,
    predictions: Iterable[Collection[Outcome]],
    branch: Drafter,
    backup: Drafter,
    last: int,
) -> None:
    """Two rounds emit the target's law, whichever outcomes were predicted.

    After a predicted outcome the second speculation is the branch's, after any other one it is the backup's.
    """
    first = round_law(accept, target, drafter, last)
    ends = {tokens[-1] for tokens in first}
    second = {
        hit: {end: round_law(accept, target, d, end) for end in ends} for hit, d in ((True, branch), (False, backup))
    }
    for predicted in predictions:
        law: Law = defaultdict(Fraction)
        for tokens, mass in first.items():
            hit = Outcome(len(tokens) - 1, tokens[-1]) in predicted
            for more, share in second[hit][tokens[-1]].items():
                law[tokens + more] += mass * share
        length = max(map(len, law))
        expected = target_law(target, last, length)
        assert_same_law(completed(law, target, last, length), expected, f"two rounds with {predicted} predicted")


# The rule `coupled`

Scores = Sequence[Sequence[int]]
NoisyDrafter = Callable[[int, int, Sequence[Sequence[int]]], Sequence[int]]  # (last, position, noise) -> tokens


def best(scores: Sequence[int], noise: Sequence[int]) -> int:
    """argmax(score + noise), the lowest id on a tie."""
    totals = [s + n for s, n in zip(scores, noise, strict=True)]
    return totals.index(max(totals))


def plain_tokens(target: Scores, noise: Sequence[Sequence[int]], last: int) -> list[int]:
    """Plain decoding: one token for each noise vector."""
    tokens = [last]
    for vector in noise:
        tokens.append(best(target[tokens[-1]], vector))
    return tokens[1:]


def speculated_tokens(
    accept: AcceptCoupled,
    target: Scores,
    noise: Sequence[Sequence[int]],
    last: int,
    drafters: Sequence[NoisyDrafter],
) -> list[int]:
    """Rounds whose speculations come from the drafters in turn, until every noise vector is used up."""
    tokens = [last]
    turns = itertools.cycle(drafters)
    while len(tokens) <= len(noise):
        position = len(tokens) - 1
        draft = list(next(turns)(tokens[-1], position, noise))[: len(noise) - position - 1]
        trunk = [tokens[-1], *draft]
        choices = (best(target[token], noise[position + k]) for k, token in enumerate(trunk))
        outcome = accept(choices, draft)
        tokens += [*draft[: outcome.accepted], outcome.bonus]
    return tokens[1:]


def assert_coupled(
    accept: AcceptCoupled,
    target: Scores,
    vectors: Sequence[Sequence[int]],
    length: int,
    last: int,
    drafters: Sequence[NoisyDrafter],
) -> None:
    """For every assignment of noise vectors to positions, speculation emits what plain decoding emits."""
    plain: Counter[tuple[int, ...]] = Counter()
    speculated: Counter[tuple[int, ...]] = Counter()
    for noise in itertools.product(vectors, repeat=length):
        expected, found = plain_tokens(target, noise, last), speculated_tokens(accept, target, noise, last, drafters)
        assert found == expected, f"speculation emits {found}, plain decoding {expected} under noise {noise}"
        plain[tuple(expected)] += 1
        speculated[tuple(found)] += 1
    assert plain == speculated
    assert plain.total() == len(vectors) ** length


# Drafters that read the text


TextDrafter = Callable[[tuple[int, ...]], Speculation]


def assert_lossless_over_texts(
    accept: AcceptRatio,
    target: Table,
    text: tuple[int, ...],
    predictions: Iterable[Collection[Outcome]],
    primary: TextDrafter,
    backup: TextDrafter,
    rounds: int = 3,
) -> None:
    """Rounds emit the target's law when what drafts depends on all that was said, whichever outcomes were predicted."""

    def after(so_far: tuple[int, ...], drafter: TextDrafter) -> Law:
        return round_law(accept, target, lambda _last: [(ONE, drafter(so_far))], so_far[-1])

    for predicted in predictions:
        law: Law = {(): ONE}
        hits = {(): True}  # what drafts next after these tokens
        for _ in range(rounds):
            longer: Law = defaultdict(Fraction)
            found: dict[tuple[int, ...], bool] = {}
            for tokens, mass in law.items():
                for more, share in after(text + tokens, primary if hits[tokens] else backup).items():
                    if mass * share:
                        longer[tokens + more] += mass * share
                        found[tokens + more] = Outcome(len(more) - 1, more[-1]) in predicted
            law, hits = longer, found
        length = max(map(len, law))
        expected = target_law(target, text[-1], length)
        assert_same_law(completed(dict(law), target, text[-1], length), expected, f"{rounds} rounds, {predicted}")
