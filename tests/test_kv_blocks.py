import pytest
from hypothesis import given
from hypothesis import strategies as st

from saguaro.errors import CapacityError
from saguaro.orchestrator.kv_blocks import BlockPool, BlockTable


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=60), st.integers(1, 5))
def test_no_block_is_owned_twice_and_none_is_lost(moves: list[tuple[int, int]], block_size: int) -> None:
    pool = BlockPool(24, block_size)
    tables = [BlockTable(pool) for _ in range(4)]
    for index, columns in moves:
        table = tables[index]
        before = list(table.blocks)
        if columns > len(table.blocks) * block_size:
            if table.can_grow(columns):
                table.grow(columns)
                assert table.blocks[: len(before)] == before
                assert len(table.blocks) * block_size >= columns
            else:
                with pytest.raises(CapacityError):
                    table.grow(columns)
                assert table.blocks == before
        else:
            table.truncate(columns)
            assert table.blocks == before[: pool.blocks_for(columns)]
        owned = [block for t in tables for block in t.blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + pool.free_blocks == pool.num_blocks
    for table in tables:
        table.truncate(0)
    assert pool.free_blocks == pool.num_blocks
    # The heap gives the lowest numbers first again: nothing was lost or doubled on the way.
    assert pool.take(24) == list(range(24))


def test_a_sequence_gets_consecutive_blocks_from_a_fresh_pool() -> None:
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.grow(5)
    table.grow(13)
    assert table.blocks == [0, 1, 2, 3]


def test_the_error_names_numbers_and_remedy() -> None:
    with pytest.raises(CapacityError, match=r"2 of 2 blocks free and 3 are needed.*kv_tokens"):
        BlockTable(BlockPool(2, 4)).grow(9)
