"""The rows' operations on a torch device. Positions and tokens are read from the step's tensors, which are there already.

In the fixed way every reduction along a row runs over tensors of one number of rows, so that the device picks one kernel for
all steps; the rest is element by element.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.attention.paged import PagedAttention
from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer
from workers.engine.model.config import ModelConfig
from workers.engine.model.rotary import rotary_tables


class DeviceRowOperations:
    """See row_operations.RowOperations. rows_fixed: rows of every reduction and head product; None: as many as there are."""

    head_bytes = 0

    def __init__(
        self, config: ModelConfig, head: torch.Tensor, attention: PagedAttention, rows_fixed: int | None = None
    ) -> None:
        self._config = config
        self._head = head
        self._attention = attention
        self._rows_fixed = rows_fixed
        self._cosine, self._sine = (torch.from_numpy(table).to(head.device) for table in rotary_tables(config))

    @property
    def exact(self) -> bool:
        """Whether rows are taken in fixed numbers."""
        return self._rows_fixed is not None

    def embed(self, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See RowOperations."""
        return table[self._attention.step.tokens]

    def indices(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """See RowOperations."""
        return torch.from_numpy(rows).to(self._head.device)

    def norm(self, residual: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        value = residual.tensor[:rows]
        scale = torch.rsqrt(self._by_rows(_mean_square, value) + self._config.norm_epsilon)
        out.tensor[:rows] = (value * scale * weight.tensor).to(out.tensor.dtype)

    def add_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        residual.tensor[:rows] += delta.tensor[:rows]
        self.norm(residual, weight, out, rows)

    def head_norm(self, qkv: Buffer, query_weight: Buffer, key_weight: Buffer, rows: int) -> None:
        """See RowOperations. Every head is a row of its own."""
        config, begin = self._config, 0
        for heads, weight in ((config.heads, query_weight), (config.kv_heads, key_weight)):
            end = begin + heads * config.head_size
            value = qkv.tensor[:rows, begin:end].float().reshape(rows * heads, config.head_size)
            scale = torch.rsqrt(self._by_rows(_mean_square, value) + config.norm_epsilon)
            qkv.tensor[:rows, begin:end] = (value * scale * weight.tensor).view(rows, -1).to(qkv.tensor.dtype)
            begin = end

    def rotate(self, qkv: Buffer, positions: npt.NDArray[np.int64], queries: Buffer, keys: Buffer, rows: int) -> None:
        """See RowOperations."""
        config, at = self._config, self._attention.step.positions
        turned = config.query_size + config.kv_size
        heads = qkv.tensor[:rows, :turned].float().view(rows, config.heads + config.kv_heads, config.head_size)
        first, second = heads.chunk(2, -1)
        cosine, sine = self._cosine[at, None, :], self._sine[at, None, :]
        both = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).view(rows, turned)
        queries.tensor[:rows] = both[:, : config.query_size] * config.head_size**-0.5
        keys.tensor[:rows] = both[:, config.query_size :].to(keys.tensor.dtype)

    def gate(self, gate_up: Buffer, out: Buffer, rows: int) -> None:
        """See RowOperations."""
        gate, up = gate_up.tensor[:rows].float().chunk(2, -1)
        out.tensor[:rows] = (torch.nn.functional.silu(gate) * up).to(out.tensor.dtype)

    def logits(self, normed: Buffer, rows: int) -> npt.NDArray[np.float32]:
        """See RowOperations. The product is made in the head's precision, with sums in float32."""
        product = self._by_rows(self._head_product, normed.tensor[:rows].to(self._head.dtype))
        logits: npt.NDArray[np.float32] = product.float().cpu().numpy()
        return logits

    def _head_product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self._head)

    def _by_rows(self, reduce: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """reduce over the rows, in calls of the fixed number where there is one."""
        fixed = self._rows_fixed
        if fixed is None:
            return reduce(rows)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % fixed))
        return torch.cat([reduce(part) for part in torch.split(padded, fixed)])[: len(rows)]


def _mean_square(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean(-1, keepdim=True)
