"""What the model does to rows between its linear layers.

`rows` says how many rows of a buffer count; the rest is padding and stays as it is.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer


class RowOperations(Protocol):
    """Row-wise steps. Buffers are [at least rows, size]; residual, queries, norm weights and logits are float32."""

    @property
    def exact(self) -> bool:
        """Whether a row's result has the same bits whatever the other rows are."""
        ...

    @property
    def head_bytes(self) -> int:
        """Memory of the output head's weights, where they are kept apart from the embedding."""
        ...

    def embed(self, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The rows of the embedding table, [vocabulary_size, hidden_size], that are the step's tokens."""
        ...

    def indices(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Numbers of rows as what indexes the model's tensors."""
        ...

    def norm(self, residual: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """out = RMS norm of residual, times weight."""
        ...

    def add_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """residual += delta, then norm()."""
        ...

    def head_norm(self, qkv: Buffer, query_weight: Buffer, key_weight: Buffer, rows: int) -> None:
        """Each query and key head in place: its RMS norm, times the weight of its kind, [head_size]."""
        ...

    def rotate(self, qkv: Buffer, positions: npt.NDArray[np.int64], queries: Buffer, keys: Buffer, rows: int) -> None:
        """queries and keys turned by their positions; queries divided by the root of the head size."""
        ...

    def gate(self, gate_up: Buffer, out: Buffer, rows: int) -> None:
        """out = silu(gate) * up."""
        ...

    def logits(self, normed: Buffer, rows: int) -> npt.NDArray[np.float32]:
        """float32 [rows, vocabulary_size] from float32 rows of hidden_size."""
        ...
