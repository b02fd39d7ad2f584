"""What paged attention kernels of a device want to know of a step, from its batch. Pure numpy: checked without a device.

A step of single tokens (decode) can be padded to one of a few sizes, so that a captured graph fits it: the padding's rows are
sequences of one token in a scratch block that belongs to nobody.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.batch import Batch

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Sequence i has the rows [cu_queries[i], cu_queries[i + 1]) and key_counts[i] keys, the last of which are its rows' own.

    cu_queries, cu_keys: int32 [sequences + 1], sums from 0. key_counts: int32 [sequences]. tables: int32 [sequences, width].
    queries_max, keys_max: bounds for one sequence.
    """

    cu_queries: Counts
    cu_keys: Counts
    key_counts: Counts
    tables: Counts
    queries_max: int
    keys_max: int

    @property
    def decode(self) -> bool:
        """Whether every sequence has one row."""
        return self.queries_max == 1


def build(batch: Batch, keys_max: int | None = None) -> AttentionMetadata:
    """The batch's metadata. keys_max: a bound to tell in place of the longest sequence, the same for every step of a graph."""
    key_counts = batch.positions[batch.row_starts[1:] - 1] + 1
    longest = int(key_counts.max())
    assert keys_max is None or longest <= keys_max, f"a sequence of {longest} keys, bound {keys_max}"
    return AttentionMetadata(
        cu_queries=batch.row_starts.astype(np.int32),
        cu_keys=np.concatenate(([0], np.cumsum(key_counts))).astype(np.int32),
        key_counts=key_counts.astype(np.int32),
        tables=np.ascontiguousarray(batch.block_tables),
        queries_max=int(np.diff(batch.row_starts).max()),
        keys_max=longest if keys_max is None else keys_max,
    )


def size_for(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None: no size does."""
    return next((size for size in sizes if size >= rows), None)


def is_decode(batch: Batch) -> bool:
    """Whether each chunk is one token that draws the next."""
    return batch.rows == len(batch.block_tables) == len(batch.sampled_rows)


def pad_decode(batch: Batch, size: int, scratch_block: int, table_width: int, block_tokens: int) -> Batch:
    """A decode batch with rows of token 0 at position 0 of the scratch block added, so that it has size rows.

    Tables are table_width wide. The added rows draw nothing: sampled_rows stays as it is.
    """
    rows, missing = batch.rows, size - batch.rows
    assert missing >= 0, f"{rows} rows do not fit in {size}"
    assert batch.block_tables.shape[1] <= table_width, f"a table of {batch.block_tables.shape[1]} blocks, width {table_width}"
    tables = np.full((size, table_width), scratch_block, np.int32)
    tables[:rows, : batch.block_tables.shape[1]] = batch.block_tables
    zeros = np.zeros(missing, np.int64)
    return Batch(
        token_ids=np.concatenate([batch.token_ids, zeros]),
        positions=np.concatenate([batch.positions, zeros]),
        slots=np.concatenate([batch.slots, zeros + scratch_block * block_tokens]),
        row_sequences=np.arange(size),
        row_starts=np.arange(size + 1),
        block_tables=tables,
        sampled_rows=batch.sampled_rows,
    )
