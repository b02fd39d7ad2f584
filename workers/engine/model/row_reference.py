"""The rows' operations in plain torch: the oracle of the kernels, and what runs where numba does not."""

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer
from workers.engine.model.config import ModelConfig
from workers.engine.model.rotary import rotary_tables


class ReferenceRowOperations:
    """See row_operations.RowOperations. head is [vocabulary_size, hidden_size]."""

    exact = False
    head_bytes = 0

    def __init__(self, config: ModelConfig, head: torch.Tensor) -> None:
        self._config = config
        self._head = head
        self._cosine, self._sine = (torch.from_numpy(table).to(head.device) for table in rotary_tables(config))

    def embed(self, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See RowOperations."""
        return table[torch.from_numpy(batch.token_ids)]

    def indices(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """See RowOperations."""
        return torch.from_numpy(rows)

    def norm(self, residual: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        value = residual.tensor[:rows]
        out.tensor[:rows] = (self._normed(value) * weight.tensor).to(out.tensor.dtype)

    def add_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        residual.tensor[:rows] += delta.tensor[:rows]
        self.norm(residual, weight, out, rows)

    def head_norm(self, qkv: Buffer, query_weight: Buffer, key_weight: Buffer, rows: int) -> None:
        """See RowOperations."""
        config, begin = self._config, 0
        for heads, weight in ((config.heads, query_weight), (config.kv_heads, key_weight)):
            end = begin + heads * config.head_size
            value = qkv.tensor[:rows, begin:end].float().reshape(rows * heads, config.head_size)
            qkv.tensor[:rows, begin:end] = (self._normed(value) * weight.tensor).view(rows, -1).to(qkv.tensor.dtype)
            begin = end

    def rotate(self, qkv: Buffer, positions: npt.NDArray[np.int64], queries: Buffer, keys: Buffer, rows: int) -> None:
        """See RowOperations."""
        config = self._config
        turned = config.query_size + config.kv_size
        heads = qkv.tensor[:rows, :turned].float().view(rows, config.heads + config.kv_heads, config.head_size)
        first, second = heads.chunk(2, -1)
        at = self._places(positions)
        cosine, sine = self._cosine[at, None, :], self._sine[at, None, :]
        both = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).view(rows, turned)
        queries.tensor[:rows] = both[:, : config.query_size] * config.head_size**-0.5
        keys.tensor[:rows] = both[:, config.query_size :].to(keys.tensor.dtype)

    def gate(self, gate_up: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        gate, up = gate_up.tensor[:rows].float().chunk(2, -1)
        out.tensor[:rows] = (torch.nn.functional.silu(gate) * up).to(out.tensor.dtype)

    def logits(self, normed: Buffer, rows: int) -> npt.NDArray[np.float32]:
        """See RowOperations."""
        logits: npt.NDArray[np.float32] = torch.nn.functional.linear(normed.tensor[:rows], self._head.float()).numpy()
        return logits

    def _normed(self, value: torch.Tensor) -> torch.Tensor:
        """Rows divided by the root of their mean square."""
        return value * torch.rsqrt(self._mean_square(value) + self._config.norm_epsilon)

    def _mean_square(self, value: torch.Tensor) -> torch.Tensor:
        return value.square().mean(-1, keepdim=True)

    def _places(self, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """The rows' positions, to look up in the rotary tables."""
        return torch.from_numpy(positions)
