import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from saguaro.orchestrator import randomness
from saguaro.orchestrator.randomness import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    Purpose,
    bits_reaching,
    gumbel,
    gumbel_of,
    noise_bits,
    philox,
    uniform,
    uniforms,
)

ALL_ONES = 0xFFFFFFFF
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # others may use the machine
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**63)


def words(counter, seed):
    return philox(np.array(counter, dtype=np.uint64)[:, None], seed)[:, 0].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ALL_ONES] * 4, (ALL_ONES, ALL_ONES), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, expected):
    assert words(counter, key[0] | key[1] << 32) == expected


def philox_in_integers(counter, seed):
    """The definition, with Python's integers and without vectors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & ALL_ONES, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & ALL_ONES, p0 >> 32 ^ c3 ^ k1, p0 & ALL_ONES
        k0, k1 = k0 + 0x9E3779B9 & ALL_ONES, k1 + 0xBB67AE85 & ALL_ONES
    return [c0, c1, c2, c3]


@untimed
@given(SEEDS, st.lists(st.integers(0, ALL_ONES), min_size=4, max_size=4))
def test_philox_is_its_definition(seed, counter):
    assert words(counter, seed) == philox_in_integers(counter, seed)


@pytest.mark.parametrize("count", [0, 1, randomness._FEW, randomness._FEW + 1, 50])
def test_philox_of_many_counters_is_that_of_each(count):
    chance = np.random.default_rng(count)
    counters = chance.integers(0, 2**32, (4, count), dtype=np.uint64)
    seeds = chance.integers(0, 2**64, count, dtype=np.uint64)
    each = [philox_in_integers(counters[:, i].tolist(), int(seeds[i])) for i in range(count)]
    assert philox(counters, seeds).T.tolist() == each
    if count:
        assert philox(counters, 11)[:, -1].tolist() == philox_in_integers(counters[:, -1].tolist(), 11)


def test_philox_is_the_same_across_its_chunks():
    count = randomness._CHUNK + 5
    counters = np.zeros((4, count), dtype=np.uint64)
    counters[0] = np.arange(count)
    whole = philox(counters, 11)
    for index in (0, randomness._CHUNK - 1, randomness._CHUNK, count - 1):
        assert whole[:, index].tolist() == philox_in_integers([index, 0, 0, 0], 11)


@untimed
@given(SEEDS, POSITIONS, st.integers(0, 2**24))
def test_noise_is_the_lane_of_the_tokens_block(seed, position, token):
    word = philox_in_integers([token // 4, position & ALL_ONES, position >> 32, Purpose.GUMBEL], seed)[token % 4]
    u = ((word >> 8) + 0.5) / 2**24
    assert noise_bits(seed, position, token) == word >> 8
    assert gumbel(seed, position, token) == pytest.approx(-np.log(-np.log(u)), rel=1e-12)


@untimed
@given(SEEDS, POSITIONS, st.sampled_from(Purpose))
def test_a_uniform_takes_53_bits_of_two_words(seed, position, purpose):
    high, low, _, _ = philox_in_integers([0, position & ALL_ONES, position >> 32, purpose], seed)
    assert uniform(seed, position, purpose) == ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    assert 0 <= uniform(seed, position, purpose) < 1


def test_golden_values_keep_seeded_outputs_reproducible_between_releases():
    assert noise_bits(0, 0, [0, 1, 2, 3, 4]).tolist() == [6694888, 14772677, 12343212, 10158299, 16311500]
    assert noise_bits(2**64 - 1, 2**40 + 7, [0, 151664]).tolist() == [3014507, 15644636]
    assert gumbel(42, 17, [5, 6]).tolist() == pytest.approx([-0.9104025891501417, 0.1437931699011898], rel=1e-12)
    drawn = [uniform(42, 17, purpose) for purpose in (Purpose.ACCEPT, Purpose.BONUS, Purpose.DRAFT)]
    assert drawn == [0.3799580898500716, 0.8309222397088148, 0.6994913568779231]


@untimed
@given(SEEDS, POSITIONS, st.lists(st.integers(0, 5000), min_size=1, max_size=60))
def test_noise_depends_on_nothing_but_seed_position_and_token(seed, position, tokens):
    together = noise_bits(seed, position, tokens)
    alone = [int(noise_bits(seed, position, token)) for token in tokens]
    rows = noise_bits(seed, np.array([[position], [position + 1]], dtype=np.uint64), np.array([tokens, tokens]))
    assert together.tolist() == alone
    assert rows[0].tolist() == alone
    assert rows[1].tolist() == noise_bits(seed, position + 1, tokens).tolist()


def test_seeds_broadcast_like_positions_and_tokens():
    seeds = np.array([0, 5, 2**64 - 1, 5], dtype=np.uint64)
    rows = noise_bits(seeds[:, None], np.array([[3], [3], [9], [2**40]], dtype=np.uint64), np.arange(10))
    for row, seed, position in zip(rows, seeds.tolist(), (3, 3, 9, 2**40), strict=True):
        assert row.tolist() == noise_bits(seed, position, np.arange(10)).tolist()


def test_the_whole_vocabulary_costs_a_quarter_as_many_blocks(monkeypatch):
    evaluated = []

    def counting(counters, seed):
        evaluated.append(counters.shape[1])
        return philox(counters, seed)

    monkeypatch.setattr(randomness, "philox", counting)
    dense = noise_bits(3, 9, np.arange(1001))
    assert evaluated == [251]
    assert dense[::-1].tolist() == noise_bits(3, 9, np.arange(1001)[::-1]).tolist()


def test_seed_position_and_purpose_all_matter_to_their_last_bit():
    streams = [
        (seed, position, purpose)
        for seed in (0, 1, 2**32, 2**63)
        for position in (0, 1, 2**32, 2**63)
        for purpose in Purpose
    ]
    assert len({uniform(*stream) for stream in streams}) == len(streams)
    assert len({tuple(noise_bits(seed, position, range(4))) for seed, position, _ in streams}) == 16


def test_noise_is_bounded_and_increasing():
    edges = gumbel_of(np.array([0, 1, 2**23, 2**24 - 2, 2**24 - 1]))
    assert (np.diff(edges) > 0).all()
    assert edges[0] == pytest.approx(GUMBEL_MIN, abs=1e-13)
    assert edges[-1] == pytest.approx(GUMBEL_MAX, abs=1e-13)


@untimed
@given(st.floats(-5, 20))
def test_bits_reaching_a_level_is_a_bound_and_a_close_one(level):
    least = int(bits_reaching(np.array(level)))
    assert 0 <= least < 2**24
    if least > 0:
        assert gumbel_of(np.array([least - 1]))[0] < level
    if level < GUMBEL_MAX:
        assert gumbel_of(np.array([min(least + 3, 2**24 - 1)]))[0] >= level


def test_uniforms_are_uniform_and_purposes_independent():
    count, cells = 200_000, 20
    drawn = {purpose: uniforms(1234, np.arange(count), purpose) for purpose in Purpose}
    binned = {purpose: (values * cells).astype(int) for purpose, values in drawn.items()}
    for values in binned.values():
        assert chisquare(np.bincount(values, minlength=cells)).pvalue > 1e-4
    for one, other in (
        (Purpose.ACCEPT, Purpose.BONUS),
        (Purpose.DRAFT, Purpose.ACCEPT),
        (Purpose.BONUS, Purpose.DRAFT),
    ):
        table = np.bincount(binned[one] * cells + binned[other], minlength=cells**2).reshape(cells, cells)
        assert chi2_contingency(table).pvalue > 1e-4


def test_neighbouring_tokens_positions_and_seeds_are_independent():
    bits = noise_bits(77, np.arange(200_000)[:, None], np.arange(5)) >> 20  # 16 cells
    shifted = noise_bits(78, np.arange(200_000), 0) >> 20
    pairs = [(bits[:, 0], bits[:, 1]), (bits[:, 3], bits[:, 4]), (bits[1:, 0], bits[:-1, 0]), (bits[:, 0], shifted)]
    for one, other in pairs:
        assert chi2_contingency(np.bincount(one * 16 + other, minlength=256).reshape(16, 16)).pvalue > 1e-4


def test_no_global_generator_is_used():
    generators = {
        "random",
        "default_rng",
        "rand",
        "randn",
        "randint",
        "multinomial",
        "manual_seed",
        "Generator",
        "RandomState",
    }
    for name in ("randomness", "sampling", "scores"):
        tree = ast.parse((Path(randomness.__file__).parent / f"{name}.py").read_text())
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        assert not used & generators, name
        assert "random" not in imported, name
