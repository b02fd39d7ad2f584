"""The rows' operations in plain torch: the oracle of the kernels, and what runs where numba does not."""

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.model.config import ModelConfig
from workers.engine.model.rotary import rotary_tables


class ReferenceRowOperations:
    """See row_operations.RowOperations. head is [vocabulary_size, hidden_size]."""

    exact = False
    head_bytes = 0

    def __init__(self, config: ModelConfig, head: torch.Tensor) -> None:
        self._config = config
        self._head = head
        self._cosine, self._sine = (torch.from_numpy(table) for table in rotary_tables(config))

    def norm(self, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """See RowOperations."""
        value = residual[:rows]
        scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + self._config.norm_epsilon)
        out[:rows] = (value * scale * weight).to(out.dtype)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """See RowOperations."""
        residual[:rows] += delta[:rows]
        self.norm(residual, weight, out, rows)

    def rotate(
        self, qkv: torch.Tensor, positions: npt.NDArray[np.int64], queries: torch.Tensor, keys: torch.Tensor, rows: int
    ) -> None:
        """See RowOperations."""
        config = self._config
        turned = config.query_size + config.kv_size
        heads = qkv[:rows, :turned].float().view(rows, config.heads + config.kv_heads, config.head_size)
        first, second = heads.chunk(2, -1)
        at = torch.from_numpy(positions)
        cosine, sine = self._cosine[at, None, :], self._sine[at, None, :]
        both = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).view(rows, turned)
        queries[:rows] = both[:, : config.query_size] * config.head_size**-0.5
        keys[:rows] = both[:, config.query_size :].to(keys.dtype)

    def gate(self, gate_up: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """See RowOperations."""
        gate, up = gate_up[:rows].float().chunk(2, -1)
        out[:rows] = (torch.nn.functional.silu(gate) * up).to(out.dtype)

    def logits(self, normed: torch.Tensor) -> npt.NDArray[np.float32]:
        """See RowOperations."""
        logits: npt.NDArray[np.float32] = torch.nn.functional.linear(normed, self._head.float()).numpy()
        return logits
