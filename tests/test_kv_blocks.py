import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from saguaro.errors import CapacityError
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable

SIZE = 3
BLOCKS = 14


class Tables(RuleBasedStateMachine):
    """Four tables on one pool, beside a model of what every slot holds: (position, the tokens up to there).

    Tokens come from two ids, so that prefixes meet often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tables = [BlockTable(self.pool) for _ in range(4)]
        self.tokens: list[list[int]] = [[] for _ in range(4)]
        self.valid = [0] * 4
        self.content: dict[int, tuple[int, ...]] = {}  # slot -> the context whose KV it holds

    def write(self, which: int, first: int, last: int) -> None:
        table = self.tables[which]
        for column in range(first, last):
            block = table.blocks[column // SIZE]
            assert self.holders(block) == 1  # one writer, and nobody else reads it
            self.content[block * SIZE + column % SIZE] = tuple(self.tokens[which][: column + 1])

    def holders(self, block: int) -> int:
        return sum(table.blocks.count(block) for table in self.tables)

    @rule(which=st.integers(0, 3), prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, which: int, prompt: list[int]) -> None:
        self.tables[which].truncate(0)
        self.tokens[which] = prompt
        self.valid[which] = self.tables[which].adopt(prompt)
        assert self.valid[which] < len(prompt)

    @rule(which=st.integers(0, 3), draft=st.lists(st.integers(0, 1), max_size=9), share=st.floats(0, 1))
    def round(self, which: int, draft: list[int], share: float) -> None:
        """Forward what is not valid yet and a speculation; accept a part; publish; free the tail."""
        table, tokens = self.tables[which], self.tokens[which]
        if not tokens:
            return
        before, free = list(table.blocks), self.pool.free_blocks
        end = len(tokens) + len(draft)
        if not table.can_grow(end):
            with pytest.raises(CapacityError):
                table.grow(end)
            assert (table.blocks, self.pool.free_blocks) == (before, free)
            return
        table.grow(end)
        assert table.blocks[: len(before)] == before
        tokens.extend(draft)
        self.write(which, self.valid[which], end)
        del tokens[end - len(draft) + int(share * len(draft)) :]
        self.valid[which] = len(tokens)
        tokens.append(1)  # the bonus token: committed, not forwarded
        table.publish(tokens, self.valid[which])
        table.truncate(self.valid[which])
        assert len(table.blocks) == self.pool.blocks_for(self.valid[which])

    @rule(which=st.integers(0, 3), more=st.integers(0, 30))
    def stretch_and_truncate(self, which: int, more: int) -> None:
        """Truncation undoes growth; stretching takes what there is."""
        table = self.tables[which]
        table.truncate(self.valid[which])
        before, free, cached = list(table.blocks), self.pool.free_blocks, self.pool.cached_blocks
        room = table.stretch(self.valid[which] + more)
        assert room <= self.valid[which] + more
        assert room == self.valid[which] + more or self.pool.free_blocks == 0
        table.truncate(self.valid[which])
        assert (table.blocks, self.pool.free_blocks) == (before, free)
        assert self.pool.cached_blocks <= cached

    @precondition(lambda self: not any(self.valid))
    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.cached_blocks == 0

    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        self.tables[which].truncate(0)
        self.tokens[which], self.valid[which] = [], 0

    @invariant()
    def counts_are_exact(self) -> None:
        held = {block for table in self.tables for block in table.blocks}
        assert all(self.pool._holders[block] == self.holders(block) for block in range(BLOCKS))
        assert len(held) + self.pool.free_blocks == BLOCKS
        free = [*self.pool._blank, *self.pool._idle]
        assert len(free) == len(set(free))
        assert not held & set(free)
        assert set(self.pool._idle) == set(self.pool._digest) - held
        assert {block: digest for digest, block in self.pool._published.items()} == self.pool._digest

    @invariant()
    def every_table_reads_its_own_context(self) -> None:
        for table, tokens, valid in zip(self.tables, self.tokens, self.valid, strict=True):
            for column in range(valid):
                slot = table.blocks[column // SIZE] * SIZE + column % SIZE
                assert self.content[slot] == tuple(tokens[: column + 1])

    def teardown(self) -> None:
        for table in self.tables:
            table.truncate(0)
        assert self.pool.free_blocks == BLOCKS  # cached blocks are free
        assert sorted(self.pool.take(BLOCKS)) == list(range(BLOCKS))
        assert self.pool.cached_blocks == 0


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_ten_thousand_rounds_leave_nothing_behind() -> None:
    """Random acceptance over block edges, K=20 on blocks of 4; sequences come, share prefixes, and go."""
    draw = random.Random(0)
    pool = BlockPool(200, 4)
    tables = [BlockTable(pool) for _ in range(4)]
    tokens: list[list[int]] = [[] for _ in tables]
    for _ in range(10_000):
        which = draw.randrange(len(tables))
        table = tables[which]
        if not tokens[which] or len(tokens[which]) > 120:
            table.truncate(0)
            tokens[which] = [draw.randrange(2) for _ in range(draw.randint(1, 30))]
            table.adopt(tokens[which])
        start = len(tokens[which])
        table.grow(start + 20)
        tokens[which].extend(draw.randrange(2) for _ in range(draw.randint(1, 21)))
        table.publish(tokens[which], len(tokens[which]) - 1)
        table.truncate(len(tokens[which]))
        owned = [block for t in tables for block in t.blocks]
        assert len(set(owned)) + pool.free_blocks == pool.num_blocks
    for table in tables:
        table.truncate(0)
    assert pool.free_blocks == 200
    assert sorted(pool.take(200)) == list(range(200))


def filled(pool: BlockPool, tokens: list[int]) -> BlockTable:
    table = BlockTable(pool)
    table.adopt(tokens)
    table.grow(len(tokens))
    table.publish(tokens, len(tokens))
    return table


def test_blocks_that_fill_in_one_round_are_found_by_their_own_tokens() -> None:
    """A round over two block edges must not register one block under the other's tokens (erratum E-16)."""
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2, 3, 4, 5, 6])
    again, other = BlockTable(pool), BlockTable(pool)
    assert again.adopt([1, 2, 3, 4, 5, 6, 7]) == 6
    assert again.blocks == table.blocks
    assert other.adopt([3, 4, 5, 6, 7]) == 0  # the same tokens elsewhere have other KV
    assert other.adopt([1, 2, 5, 6, 7]) == 2


def test_the_last_token_of_a_fully_cached_prompt_is_left_to_compute() -> None:
    pool = BlockPool(8, 4)
    first = filled(pool, [7] * 8)
    same = BlockTable(pool)
    assert same.adopt([7] * 8) == 4
    same.grow(8)
    assert same.blocks[0] == first.blocks[0]
    assert same.blocks[1] != first.blocks[1]
    assert BlockTable(pool).adopt([7] * 9) == 8
    assert BlockTable(pool).adopt([7]) == 0


def test_the_least_recently_used_block_goes_first_and_the_tail_before_its_parent() -> None:
    pool = BlockPool(5, 2)
    old, new = filled(pool, [1, 1, 1, 1]), filled(pool, [2, 2, 2, 2])
    old.truncate(0)
    new.truncate(0)
    again = BlockTable(pool)
    assert again.adopt([1, 1, 1, 1, 0]) == 4  # used once more: now `new` is the older one
    again.truncate(0)
    assert pool.free_blocks == 5
    pool.take(2)  # the one never published, and one evicted
    assert BlockTable(pool).adopt([1, 1, 1, 1, 0]) == 4
    assert BlockTable(pool).adopt([2, 2, 2, 2, 0]) == 2


def test_a_partly_filled_block_is_not_published_and_a_published_one_not_cut() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.grow(8)
    table.publish([1, 2, 3, 4, 5, 6, 7], 7)
    assert pool.cached_blocks == 1
    with pytest.raises(ValueError, match="block 0 of the table is published"):
        table.truncate(3)
    table.truncate(4)
    assert len(table.blocks) == 1


def test_a_sequence_gets_consecutive_blocks_from_a_fresh_pool() -> None:
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.grow(5)
    table.grow(13)
    assert table.blocks == [0, 1, 2, 3]


def test_the_error_names_numbers_and_remedy() -> None:
    with pytest.raises(CapacityError, match=r"2 of 2 blocks free and 3 are needed.*kv_tokens"):
        BlockTable(BlockPool(2, 4)).grow(9)
