"""The default row operations: numba kernels over the tensors' own memory. See row_operations for what each does."""

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.model import kernel_threads, row_kernels
from workers.engine.model.arrays import array_of
from workers.engine.model.config import ModelConfig
from workers.engine.model.lanes import WIDTH
from workers.engine.model.rotary import rotary_tables

Array = npt.NDArray[np.generic]

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

    def __init__(self, config: ModelConfig, head: torch.Tensor, threads: int) -> None:
        assert lacks(config) is None, lacks(config)
        self._config = config
        self._threads = threads
        self._epsilon = np.float32(config.norm_epsilon)
        self._cosine, self._sine = (table.reshape(-1) for table in rotary_tables(config))
        self._head = row_kernels.make_head(config.hidden_size, head.dtype == torch.bfloat16)
        self._head_tiles = _flat(_tiles(head))

    @property
    def head_bytes(self) -> int:
        """Memory of the output head's weights."""
        return int(self._head_tiles.nbytes)

    def norm(self, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """See RowOperations."""
        size = self._config.hidden_size
        self._share(rows)
        row_kernels.norm_rows(_flat(residual), _flat(weight), _flat(out), rows, size, self._epsilon)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """See RowOperations."""
        size = self._config.hidden_size
        arrays = (_flat(residual), _flat(delta), _flat(weight), _flat(out))
        self._share(rows)
        row_kernels.add_norm_rows(*arrays, rows, size, self._epsilon)

    def rotate(
        self, qkv: torch.Tensor, positions: npt.NDArray[np.int64], queries: torch.Tensor, keys: torch.Tensor, rows: int
    ) -> None:
        """See RowOperations."""
        config = self._config
        tables = (self._cosine, self._sine, positions)
        sizes = (rows, config.heads, config.kv_heads, config.head_size)
        self._share(rows)
        row_kernels.rotate_rows(_flat(qkv), *tables, _flat(queries), _flat(keys), *sizes)

    def gate(self, gate_up: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """See RowOperations."""
        self._share(rows)
        row_kernels.gate_rows(_flat(gate_up), _flat(out), rows, self._config.feed_forward_size)

    def logits(self, normed: torch.Tensor) -> npt.NDArray[np.float32]:
        """See RowOperations. Always on all threads: it is the step's largest product."""
        rows, size = normed.shape
        width = len(self._head_tiles) // size
        logits = np.empty((rows, width), np.float32)
        kernel_threads.use(self._threads)
        self._head(_flat(normed), self._head_tiles, logits.reshape(-1), rows, width)
        return logits[:, : self._config.vocabulary_size]

    def _share(self, rows: int) -> None:
        kernel_threads.use(1 if rows <= _ROWS_ALONE_MAX else self._threads)


def _tiles(head: torch.Tensor) -> torch.Tensor:
    """[tokens / 16, hidden, 16], with rows of zeros after the last token."""
    tokens, hidden = head.shape
    missing = -tokens % WIDTH
    whole = torch.cat([head, head.new_zeros(missing, hidden)]) if missing else head
    return whole.view(-1, WIDTH, hidden).transpose(1, 2).contiguous()


def _flat(tensor: torch.Tensor) -> Array:
    return array_of(tensor).reshape(-1)
