"""A plan as flat arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.envelope import Sampling
from workers.engine.batch import make_batch
from workers.engine.plan import Chunk, StepPlan

ANY = Sampling(seed=0)


def chunk(name: str, ids: tuple[int, ...], start: int, table: tuple[int, ...], samples: bool = True) -> Chunk:
    return Chunk(name, ids, start, table, samples, ANY)


def test_rows_follow_chunks() -> None:
    """Two chunks, literally."""
    plan = StepPlan((chunk("a", (7, 8, 9), 3, (5, 2)), chunk("b", (4,), 0, (1,), samples=False)))
    batch = make_batch(plan, block_tokens=4)
    assert batch.token_ids.tolist() == [7, 8, 9, 4]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 1 * 4 + 0]
    assert batch.row_sequences.tolist() == [0, 0, 0, 1]
    assert batch.row_starts.tolist() == [0, 3, 4]
    assert batch.block_tables.tolist() == [[5, 2], [1, 0]]
    assert batch.sampled_rows.tolist() == [2]
    assert batch.rows == 4
    assert batch.keys == 4 + 5 + 6 + 1


def test_a_table_that_is_too_short_is_our_bug() -> None:
    """The scheduler never sends one."""
    with pytest.raises(AssertionError, match="a: 1 blocks, 2 needed"):
        make_batch(StepPlan((chunk("a", (1, 2), 3, (0,)),)), block_tokens=4)


SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40), st.booleans()), min_size=1, max_size=6)


@given(SHAPES, st.sampled_from([1, 4, 16]))
def test_every_row_has_its_place(shapes: list[tuple[int, int, bool]], block_tokens: int) -> None:
    """Each token keeps its order, its position and a slot of its own; the sampled row is its chunk's last."""
    chunks, block = [], 0
    for number, (length, start, samples) in enumerate(shapes):
        blocks = -(-(start + length) // block_tokens)
        table = tuple(range(block, block + blocks))[::-1]
        block += blocks
        chunks.append(chunk(str(number), tuple(range(100 * number, 100 * number + length)), start, table, samples))
    batch = make_batch(StepPlan(tuple(chunks)), block_tokens)
    assert len(set(batch.slots.tolist())) == batch.rows == sum(length for length, _, _ in shapes)
    for number, one in enumerate(chunks):
        rows = np.flatnonzero(batch.row_sequences == number)
        assert batch.token_ids[rows].tolist() == list(one.token_ids)
        assert batch.positions[rows].tolist() == list(range(one.start, one.end))
        for row, position in zip(rows, range(one.start, one.end), strict=True):
            block, offset = divmod(position, block_tokens)
            assert batch.slots[row] == one.block_table[block] * block_tokens + offset
    last = [int(end) - 1 for end, one in zip(batch.row_starts[1:], chunks, strict=True) if one.samples]
    assert batch.sampled_rows.tolist() == last
