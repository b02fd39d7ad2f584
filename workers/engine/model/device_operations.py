"""The rows' operations on a torch device. Positions and tokens are read from the step's tensors, which are there already.

In the fixed way every reduction along a row runs over tensors of one number of rows, so that the device picks one kernel for
all steps; the rest is element by element, as the reference has it.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.attention.paged import PagedAttention
from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer
from workers.engine.model.config import ModelConfig
from workers.engine.model.row_reference import ReferenceRowOperations


class DeviceRowOperations(ReferenceRowOperations):
    """See row_operations.RowOperations. rows_fixed: rows of every reduction and head product; None: as many as there are."""

    def __init__(
        self, config: ModelConfig, head: torch.Tensor, attention: PagedAttention, rows_fixed: int | None = None
    ) -> None:
        super().__init__(config, head)
        self._attention = attention
        self._rows_fixed = rows_fixed

    def embed(self, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See RowOperations."""
        return table[self._attention.step.tokens]

    def indices(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """See RowOperations."""
        return torch.from_numpy(rows).to(self._head.device)

    def logits(self, normed: Buffer, rows: int) -> npt.NDArray[np.float32]:
        """See RowOperations. The product is made in the head's precision, with sums in float32."""
        product = self._by_rows(self._head_product, normed.tensor[:rows].to(self._head.dtype))
        logits: npt.NDArray[np.float32] = product.float().cpu().numpy()
        return logits

    def _head_product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self._head)

    def _mean_square(self, value: torch.Tensor) -> torch.Tensor:
        return self._by_rows(super()._mean_square, value)

    def _places(self, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._attention.step.positions

    def _by_rows(self, reduce: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """reduce over the rows, in calls of the fixed number where there is one."""
        fixed = self._rows_fixed
        if fixed is None:
            return reduce(rows)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % fixed))
        return torch.cat([reduce(part) for part in torch.split(padded, fixed)])[: len(rows)]
