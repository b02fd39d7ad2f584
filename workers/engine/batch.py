"""A step plan as flat arrays: every chunk's tokens one after another, one row a token, no padding. Pure numpy, no torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.plan import Chunk, StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows [row_starts[i], row_starts[i + 1]) are chunk i's, in order of position.

    token_ids, positions, slots, row_sequences: [rows]; slot = block * block_tokens + offset of the row's position;
    row_sequences: the row's chunk. block_tables: int32 [chunks, longest table], padded with 0. sampled_rows: the rows whose
    logits draw a token, in order of chunks.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    row_sequences: Ints
    row_starts: Ints
    block_tables: npt.NDArray[np.int32]
    sampled_rows: Ints

    @property
    def rows(self) -> int:
        """Rows in all."""
        return len(self.token_ids)

    @property
    def keys(self) -> int:
        """Keys that the rows see, summed over rows: the cost of attention."""
        return int(self.positions.sum()) + self.rows


def make_batch(plan: StepPlan, block_tokens: int) -> Batch:
    """The arrays of a plan that holds at least one chunk, each with at least one token."""
    chunks = plan.chunks
    assert chunks, "a step has chunks"
    assert all(chunk.token_ids for chunk in chunks), "a chunk has tokens"
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    row_starts = np.concatenate(([0], np.cumsum(lengths)))
    row_sequences = np.repeat(np.arange(len(chunks), dtype=np.int64), lengths)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    positions = np.arange(row_starts[-1]) - row_starts[row_sequences] + starts[row_sequences]
    tables = _block_tables(chunks, block_tokens)
    blocks = tables[row_sequences, positions // block_tokens].astype(np.int64)
    return Batch(
        token_ids=np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks]),
        positions=positions,
        slots=blocks * block_tokens + positions % block_tokens,
        row_sequences=row_sequences,
        row_starts=row_starts,
        block_tables=tables,
        sampled_rows=row_starts[1:][[chunk.samples for chunk in chunks]] - 1,
    )


def _block_tables(chunks: tuple[Chunk, ...], block_tokens: int) -> npt.NDArray[np.int32]:
    tables = np.zeros((len(chunks), max(len(chunk.block_table) for chunk in chunks)), dtype=np.int32)
    for number, chunk in enumerate(chunks):
        needed = -(-chunk.end // block_tokens)
        assert len(chunk.block_table) >= needed, f"{chunk.request}: {len(chunk.block_table)} blocks, {needed} needed"
        tables[number, : len(chunk.block_table)] = chunk.block_table
    return tables
