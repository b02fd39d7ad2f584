"""The default row operations: numba kernels over the tensors' own memory. See row_operations for what each does."""

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.batch import Batch
from workers.engine.model import kernel_threads, row_kernels
from workers.engine.model.arrays import Buffer, flat_of
from workers.engine.model.config import ModelConfig
from workers.engine.model.lanes import WIDTH
from workers.engine.model.rotary import rotary_tables

_ROWS_ALONE_MAX = 31  # for so few rows, waking a second thread takes longer than it saves


def lacks(config: ModelConfig) -> str | None:
    """Why the kernels cannot take this model's sizes; None: they can."""
    half = config.head_size // 2
    for name, size in (
        ("hidden size", config.hidden_size),
        ("feed-forward size", config.feed_forward_size),
        ("half a head", half),
    ):
        if size % WIDTH:
            return f"{name} {size} is not a multiple of {WIDTH}"
    return None


class KernelRowOperations:
    """The default: kernels of row_kernels. head is [vocabulary_size, hidden_size] in the model's precision."""

    exact = True

    def __init__(self, config: ModelConfig, head: torch.Tensor) -> None:
        assert lacks(config) is None, lacks(config)
        self._config = config
        self._epsilon = np.float32(config.norm_epsilon)
        self._cosine, self._sine = (table.reshape(-1) for table in rotary_tables(config))
        self._head = row_kernels.make_head(config.hidden_size, head.dtype == torch.bfloat16)
        self._head_tiles = flat_of(_tiles(head))

    @property
    def head_bytes(self) -> int:
        """Memory of the output head's weights."""
        return int(self._head_tiles.nbytes)

    def embed(self, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See RowOperations."""
        return table[torch.from_numpy(batch.token_ids)]

    def indices(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """See RowOperations."""
        return torch.from_numpy(rows)

    def norm(self, residual: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        size = self._config.hidden_size
        kernel_threads.use(alone=rows <= _ROWS_ALONE_MAX)
        row_kernels.norm_rows(residual.flat, weight.flat, out.flat, rows, size, self._epsilon)

    def add_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        size = self._config.hidden_size
        arrays = (residual.flat, delta.flat, weight.flat, out.flat)
        kernel_threads.use(alone=rows <= _ROWS_ALONE_MAX)
        row_kernels.add_norm_rows(*arrays, rows, size, self._epsilon)

    def head_norm(self, qkv: Buffer, query_weight: Buffer, key_weight: Buffer, rows: int) -> None:
        """See RowOperations."""
        config = self._config
        sizes = (rows, config.heads, config.kv_heads, config.head_size, self._epsilon)
        kernel_threads.use(alone=rows <= _ROWS_ALONE_MAX)
        row_kernels.head_norm_rows(qkv.flat, query_weight.flat, key_weight.flat, *sizes)

    def rotate(self, qkv: Buffer, positions: npt.NDArray[np.int64], queries: Buffer, keys: Buffer, rows: int) -> None:
        """See RowOperations."""
        config = self._config
        tables = (self._cosine, self._sine, positions)
        sizes = (rows, config.heads, config.kv_heads, config.head_size)
        kernel_threads.use(alone=rows <= _ROWS_ALONE_MAX)
        row_kernels.rotate_rows(qkv.flat, *tables, queries.flat, keys.flat, *sizes)

    def gate(self, gate_up: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        kernel_threads.use(alone=rows <= _ROWS_ALONE_MAX)
        row_kernels.gate_rows(gate_up.flat, out.flat, rows, self._config.feed_forward_size)

    def logits(self, normed: Buffer, rows: int) -> npt.NDArray[np.float32]:
        """See RowOperations. Always on all threads: it is the step's largest product."""
        width = len(self._head_tiles) // self._config.hidden_size
        logits = np.empty((rows, width), np.float32)
        kernel_threads.use(alone=False)
        self._head(normed.flat, self._head_tiles, logits.reshape(-1), rows, width)
        return logits[:, : self._config.vocabulary_size]


def _tiles(head: torch.Tensor) -> torch.Tensor:
    """[tokens / 16, hidden, 16], with rows of zeros after the last token."""
    tokens, hidden = head.shape
    missing = -tokens % WIDTH
    whole = torch.cat([head, head.new_zeros(missing, hidden)]) if missing else head
    return whole.view(-1, WIDTH, hidden).transpose(1, 2).contiguous()
