"""The pool of cache blocks keeps its conservation law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.blocks import BlockPool


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_free_and_owned_are_all_blocks_after_any_calls(calls: list[tuple[bool, int]]) -> None:
    pool, tables = BlockPool(12), list[tuple[int, ...]]()
    for allocates, number in calls:
        if allocates and number <= pool.free:
            tables.append(pool.allocate(number))
        elif not allocates and number < len(tables):
            pool.release(tables.pop(number))
        pool.check(tables)
        assert pool.free + pool.owned == 12


def test_a_block_released_twice_or_too_many_taken_is_our_bug() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


def test_the_check_sees_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError, match="two tables"):
        pool.check([table, table])
