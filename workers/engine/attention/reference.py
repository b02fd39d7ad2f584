"""Attention in plain torch: gathers a sequence's blocks, then a float32 softmax. The oracle of the others; slow."""

import torch

from workers.engine.attention.protocol import CacheShape
from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer


class ReferenceAttention:
    """One matrix product a sequence and layer. Cache: [layer, slot, kv head, value]."""

    exact = False
    reason = "attention runs in plain torch, whose order of sums depends on the number of rows"

    def __init__(self, shape: CacheShape, dtype: torch.dtype) -> None:
        self._shape = shape
        slots = shape.blocks * shape.block_tokens
        self._keys = torch.zeros(shape.layers, slots, shape.kv_heads, shape.head_size, dtype=dtype)
        self._values = torch.zeros_like(self._keys)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._sequences: list[_Rows] = []

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return self._keys.nbytes + self._values.nbytes

    def begin(self, batch: Batch) -> None:
        """Takes the step's positions, slots and block tables."""
        self._slots = torch.from_numpy(batch.slots)
        self._sequences = [_Rows(batch, number, self._shape.block_tokens) for number in range(len(batch.block_tables))]

    def write(self, layer: int, keys: Buffer, qkv: Buffer) -> None:
        """Stores the rows' keys and values at the rows' slots."""
        rows, heads = len(self._slots), (-1, self._shape.kv_heads, self._shape.head_size)
        values = qkv.tensor[:rows, -self._shape.kv_heads * self._shape.head_size :]
        self._keys[layer, self._slots] = keys.tensor[:rows].reshape(heads)
        self._values[layer, self._slots] = values.reshape(heads)

    def attend(self, layer: int, queries: Buffer, out: Buffer) -> None:
        """Softmax over the positions up to each row's own."""
        heads = (-1, self._shape.kv_heads, self._shape.heads // self._shape.kv_heads, self._shape.head_size)
        for rows in self._sequences:
            keys = self._keys[layer, rows.slots].float()
            values = self._values[layer, rows.slots].float()
            scores = torch.einsum("rkgd,skd->rkgs", queries.tensor[rows.begin : rows.end].view(heads), keys)
            if self._shape.soft_cap is not None:
                scores = self._shape.soft_cap * torch.tanh(scores / self._shape.soft_cap)
            hidden = rows.hidden(self._shape.window_of(layer))
            weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1)
            result = torch.einsum("rkgs,skd->rkgd", weights, values)
            out.tensor[rows.begin : rows.end] = result.reshape(rows.end - rows.begin, -1).to(out.tensor.dtype)


class _Rows:
    """Rows [begin, end) are one sequence's; the slots of all its positions so far."""

    def __init__(self, batch: Batch, number: int, block_tokens: int) -> None:
        self.begin, self.end = int(batch.row_starts[number]), int(batch.row_starts[number + 1])
        self._positions = torch.from_numpy(batch.positions[self.begin : self.end])
        self._known = known = torch.arange(int(self._positions[-1]) + 1)
        table = torch.from_numpy(batch.block_tables[number]).long()
        self.slots = table[known // block_tokens] * block_tokens + known % block_tokens

    def hidden(self, window: int | None) -> torch.Tensor:
        """Which positions each row must not see: those after its own, and those that a window has left behind."""
        after = self._known[None, :] > self._positions[:, None]
        return after if window is None else after | (self._known[None, :] <= self._positions[:, None] - window)
