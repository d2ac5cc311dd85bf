"""The fan-out and its mask: the golden case, and a tree of parent pointers that knows no formula."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from masks import mask_of
from saguaro.engines.base import FanOutSteps
from saguaro.errors import EngineError
from saguaro.plugins.fan_out import FanOut


@dataclass
class Tree:
    """One sequence's columns as nodes that point to the token before them, numbered as they are written."""

    parents: list[int | None] = field(default_factory=list)
    tips: list[int] = field(default_factory=list)  # newest node of each branch, which is a row

    def add(self, parent: int | None) -> int:
        self.parents.append(parent)
        return len(self.parents) - 1

    def ancestors(self, node: int | None) -> set[int]:
        seen = set()
        while node is not None:
            seen.add(node)
            node = self.parents[node]
        return seen


def grow_tree(counts: tuple[int, ...], prefix: int, depth: int) -> Tree:
    tree = Tree()
    node: int | None = None
    for _ in range(prefix):
        node = tree.add(node)
    trunk = []
    for _ in counts:
        node = tree.add(node)
        trunk.append(node)
    tree.tips = [trunk[k] for k, count in enumerate(counts) for _ in range(count)]
    for _ in range(depth + 1):
        tree.tips = [tree.add(tip) for tip in tree.tips]
    return tree


COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)
CASES = st.lists(st.tuples(COUNTS, st.integers(0, 9)), min_size=1, max_size=4)


@settings(deadline=None)
@given(CASES, st.integers(0, 4))
def test_mask_is_the_ancestor_closure(cases: list[tuple[tuple[int, ...], int]], depth: int) -> None:
    mask = mask_of([counts for counts, _ in cases], [prefix for _, prefix in cases], depth)
    row = 0
    for counts, prefix in cases:
        tree = grow_tree(counts, prefix, depth)
        for tip in tree.tips:
            visible = mask.visible(torch.tensor(row), torch.arange(len(tree.parents)))
            assert set(visible.nonzero().flatten().tolist()) == tree.ancestors(tip)
            assert int(mask.own_columns(depth)[row]) == tip
            assert int(mask.positions[row]) == len(tree.ancestors(tip)) - 1
            row += 1
    assert row == len(mask.fork)


def test_golden_case_of_figure_8() -> None:
    prefix = 10
    mask = mask_of([(4, 4, 4, 4)], [prefix], depth=2)
    rows, columns = torch.arange(16)[:, None], torch.arange(prefix + 4 + 3 * 16)
    visible = mask.visible(rows, columns)
    assert visible.shape == (16, 62)
    for row in range(16):
        fork = row // 4
        own = {prefix + 4 + depth * 16 + row for depth in range(3)}
        assert set(visible[row].nonzero().flatten().tolist()) == set(range(prefix + fork + 1)) | own
        assert int(visible[row].sum()) == prefix + (fork + 1) + 3


@settings(deadline=None)
@given(CASES, st.integers(0, 4))
def test_the_mask_can_be_written_out_and_packed(cases: list[tuple[tuple[int, ...], int]], depth: int) -> None:
    mask = mask_of([counts for counts, _ in cases], [prefix for _, prefix in cases], depth)
    dense = mask.dense(70)
    assert dense.shape == (len(mask.fork), 70)
    assert all(torch.equal(dense[row], mask.visible(torch.tensor(row), torch.arange(70))) for row in range(len(dense)))
    packed = mask.packed(70)
    assert packed.dtype == torch.int32
    assert packed.shape == (len(dense), 3)
    for row in range(len(dense)):
        bits = sum((word % 2**32) << 32 * place for place, word in enumerate(packed[row].tolist()))
        assert bits == sum(1 << column for column in dense[row].nonzero().flatten().tolist())


def test_a_window_hides_what_lies_behind_it() -> None:
    """A row at position p sees positions above p - window: its newest own tokens, then trunk, then prefix."""
    mask = mask_of([(1, 0, 1)], [5], depth=1)
    assert [mask.dense(12, window)[1].nonzero().flatten().tolist() for window in (1, 2, 4)] == [
        [11],
        [9, 11],
        [6, 7, 9, 11],
    ]
    assert torch.equal(mask.dense(12, 99), mask.dense(12))


def test_a_path_is_the_own_columns_of_every_depth() -> None:
    mask = mask_of([(2, 0, 1), (0, 3)], [5, 2], depth=3)
    assert torch.equal(mask.path, torch.stack([mask.own_columns(depth) for depth in range(4)], dim=1))


@settings(deadline=None)
@given(COUNTS)
def test_branches_are_numbered_by_fork(counts: tuple[int, ...]) -> None:
    fan_out = FanOut(counts)
    assert fan_out.lookahead == len(counts) - 1
    assert fan_out.branches == sum(counts)
    assert list(fan_out.forks) == sorted(fan_out.forks)
    assert tuple(fan_out.forks.count(k) for k in range(len(counts))) == counts


@pytest.mark.parametrize("counts", [(), (2, -1)])
def test_impossible_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        FanOut(counts)


@settings(deadline=None)
@given(st.data(), CASES)
def test_kept_rows_are_what_they_were(data: st.DataObject, cases: list[tuple[tuple[int, ...], int]]) -> None:
    fan_outs, prefixes = [FanOut(counts) for counts, _ in cases], [prefix for _, prefix in cases]
    rows = sum(fan_out.branches for fan_out in fan_outs)
    kept = [row for row in range(rows) if data.draw(st.booleans())]
    steps = FanOutSteps(fan_outs, prefixes, [range(100) for _ in cases], 1, range(1, 4))
    fewer, tokens = steps.keep(kept), torch.arange(rows)
    for depth in (3, 1):
        every, some = steps.batch(tokens, depth), fewer.batch(tokens[kept], depth)
        for name in ("token_ids", "positions", "slots"):
            assert torch.equal(getattr(some, name), getattr(every, name)[kept])
        assert some.fan_out is not None
        assert every.fan_out is not None
        assert torch.equal(some.fan_out.dense(100), every.fan_out.dense(100)[kept])
        assert some.rows == tuple(some.fan_out.rows.tolist())
        assert some.logit_rows.tolist() == list(range(len(kept)))


def test_a_block_table_without_room_for_the_branches_is_refused() -> None:
    """Two sequences: the first one's rows must not reach into the second one's blocks."""
    fan_outs, prefixes = [FanOut((1, 2)), FanOut((1,))], [5, 3]  # 13 columns, and 6
    enough = [[0, 1, 2, 3], [4, 5]]
    steps = FanOutSteps(fan_outs, prefixes, enough, 4, range(2))
    assert steps.batch(torch.zeros(4, dtype=torch.int64), 1).slots.tolist() == [10, 11, 12, 21]
    with pytest.raises(EngineError, match="a block table is too short for 13 columns"):
        FanOutSteps(fan_outs, prefixes, [[0, 1, 2], [4, 5]], 4, range(2))
