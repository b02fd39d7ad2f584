"""The default attention backend: numba kernels that read the paged cache where it lies.

Needs sizes in whole lanes (see lacks()); otherwise, or without numba, the reference takes its place.
"""

import torch

from workers.engine.attention.cpu_kernels import make_attend, write_rows
from workers.engine.attention.protocol import CacheShape
from workers.engine.batch import Batch
from workers.engine.model import kernel_threads
from workers.engine.model.arrays import Buffer, flat_of
from workers.engine.model.lanes import WIDTH

_NO_WINDOW = 1 << 62  # positions: more than any context has
_KEYS_ALONE_MAX = 1023  # for so few keys, waking a second thread takes longer than it saves


def lacks(shape: CacheShape) -> str | None:
    """Why the kernels cannot take these sizes; None: they can."""
    if shape.head_size % (2 * WIDTH):
        return f"head size {shape.head_size} is not a multiple of {2 * WIDTH}"
    if shape.block_tokens % WIDTH:
        return f"blocks of {shape.block_tokens} tokens are not a multiple of {WIDTH}"
    return None


class CpuAttention:
    """Cache: layer by layer, [block, kv head, value, offset] for keys and [block, kv head, offset, value] for values."""

    exact = True
    reason = "attention sums a row's own keys in order of position, in one way for prefill, chunk and decode"

    def __init__(self, shape: CacheShape, dtype: torch.dtype) -> None:
        assert lacks(shape) is None, lacks(shape)
        self._shape = shape
        values = shape.values // 2 // shape.layers
        self._keys = torch.zeros(shape.layers, values, dtype=dtype)
        self._values = torch.zeros(shape.layers, values, dtype=dtype)
        self._key_arrays = [flat_of(layer) for layer in self._keys]
        self._value_arrays = [flat_of(layer) for layer in self._values]
        group = shape.heads // shape.kv_heads
        halves = dtype == torch.bfloat16
        cap = 0.0 if shape.soft_cap is None else shape.soft_cap
        self._attend = make_attend(shape.kv_heads, group, shape.head_size, shape.block_tokens, halves, cap)
        self._windows = [shape.window_of(layer) or _NO_WINDOW for layer in range(shape.layers)]
        self._batch: Batch | None = None

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return self._keys.nbytes + self._values.nbytes

    def begin(self, batch: Batch) -> None:
        """Takes the step's positions, slots and block tables."""
        self._batch = batch

    def write(self, layer: int, keys: Buffer, qkv: Buffer) -> None:
        """Stores the rows' keys and values at the rows' slots."""
        assert self._batch is not None, "write() comes after begin()"
        shape = self._shape
        write_rows(
            keys.flat,
            qkv.flat,
            self._batch.slots,
            self._key_arrays[layer],
            self._value_arrays[layer],
            shape.heads,
            shape.kv_heads,
            shape.head_size,
            shape.block_tokens,
        )

    def attend(self, layer: int, queries: Buffer, out: Buffer) -> None:
        """Each row over the keys of its own sequence, up to its own position, from where its window begins."""
        assert self._batch is not None, "attend() comes after begin()"
        batch = self._batch
        kernel_threads.use(alone=batch.keys <= _KEYS_ALONE_MAX)
        self._attend(
            queries.flat,
            self._key_arrays[layer],
            self._value_arrays[layer],
            batch.block_tables,
            batch.row_sequences,
            batch.positions,
            out.flat,
            batch.rows,
            self._windows[layer],
        )
