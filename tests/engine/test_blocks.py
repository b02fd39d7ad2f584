"""The pool of cache blocks keeps its conservation law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.blocks import BlockPool
from workers.engine.prefixes import Prefix, follow, root

BLOCK = (1, 2)


def _computed(pool: BlockPool, blocks: int, tenant: str = "t") -> tuple[tuple[int, ...], list[Prefix]]:
    """A table of computed blocks of equal contents, and what they hold."""
    table, prefixes = pool.allocate(blocks), list[Prefix]()
    for block in table:
        prefixes.append(follow(prefixes[-1].digest if prefixes else root(tenant), BLOCK))
        pool.register(block, prefixes[-1])
    return table, prefixes


@given(st.lists(st.tuples(st.sampled_from(["allocate", "compute", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_free_cached_and_owned_are_all_blocks_after_any_calls(calls: list[tuple[str, int]]) -> None:
    pool, tables = BlockPool(12), list[tuple[int, ...]]()
    for call, number in calls:
        if call == "allocate" and number <= pool.available:
            tables.append(pool.allocate(number))
        elif call == "compute" and number <= pool.available:
            tables.append(_computed(pool, number, f"tenant {number}")[0])
        elif call == "share" and pool.lookup(follow(root(f"tenant {number}"), BLOCK)) is not None:
            block = pool.lookup(follow(root(f"tenant {number}"), BLOCK))
            assert block is not None
            pool.share((block,))
            tables.append((block,))
        elif call == "release" and number < len(tables):
            pool.release(tables.pop(number))
        pool.check(tables)
        assert pool.free + pool.cached + pool.owned == 12


def test_computed_blocks_stay_until_their_memory_is_needed_and_a_chain_loses_its_tail_first() -> None:
    pool = BlockPool(4)
    table, prefixes = _computed(pool, 3)
    pool.release(table)
    assert (pool.free, pool.cached, pool.owned) == (1, 3, 0)
    pool.allocate(2)
    assert [pool.lookup(prefix) for prefix in prefixes] == [table[0], table[1], None]


def test_what_was_released_longest_ago_is_forgotten_first_and_use_renews() -> None:
    pool = BlockPool(2)
    (old,), (old_prefix,) = _computed(pool, 1, "old")
    (new,), (new_prefix,) = _computed(pool, 1, "new")
    pool.release((old,))
    pool.release((new,))
    pool.share((old,))
    pool.release((old,))
    assert pool.allocate(1) == (new,)
    assert (pool.lookup(old_prefix), pool.lookup(new_prefix)) == (old, None)


def test_an_owned_block_is_never_given_away() -> None:
    pool = BlockPool(2)
    table, prefixes = _computed(pool, 1)
    pool.share(table)
    pool.release(table)  # one owner is left
    assert pool.available == 1
    assert pool.lookup(prefixes[0]) == table[0]
    assert table[0] not in pool.allocate(1)
    pool.release(table)


def test_a_block_is_found_only_by_the_same_tokens_after_the_same_tokens_of_the_same_tenant() -> None:
    pool = BlockPool(4)
    table, prefixes = _computed(pool, 2)
    assert [pool.lookup(prefix) for prefix in prefixes] == list(table)
    assert pool.lookup(follow(root("other"), BLOCK)) is None
    assert pool.lookup(follow(root("t"), (2, 1))) is None
    assert pool.lookup(follow(follow(root("t"), (2, 1)).digest, BLOCK)) is None
    collision = Prefix(prefixes[0].digest, prefixes[0].parent, (2, 1))
    assert pool.lookup(collision) is None


def test_the_same_contents_computed_twice_are_kept_once() -> None:
    pool = BlockPool(4)
    (first,), (prefix,) = _computed(pool, 1)
    (second,), _ = _computed(pool, 1)
    assert pool.lookup(prefix) == first
    pool.release((second,))
    assert (pool.free, pool.cached) == (3, 0)


def test_a_block_released_twice_or_too_many_taken_is_our_bug() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)


def test_the_check_sees_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError, match="in 2 tables, counted 1"):
        pool.check([table, table])


def test_a_pool_that_forgets_gives_back_what_it_cached_and_finds_nothing_any_more() -> None:
    pool = BlockPool(4)
    kept, dropped = pool.allocate(1), pool.allocate(1)
    first, second = follow(root("t"), (1, 2)), follow(root("t"), (3, 4))
    pool.register(kept[0], first)
    pool.register(dropped[0], second)
    pool.release(dropped)
    pool.forget()
    assert (pool.lookup(first), pool.lookup(second)) == (None, None)
    assert (pool.free, pool.cached, pool.owned) == (3, 0, 1)
    pool.check([kept])
