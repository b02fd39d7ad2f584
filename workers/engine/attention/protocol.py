"""What the model asks of attention: keep keys and values in a paged cache, and attend each query over its own sequence.

A backend owns the cache of all layers and its layout. One step: begin() once, then write() and attend() once a layer. Slots
are block * block_tokens + offset.
"""

from dataclasses import dataclass
from typing import Protocol

from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of the cache: layers, blocks of block_tokens positions, kv heads of head_size values."""

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def values(self) -> int:
        """Keys and values in all, counted singly."""
        return 2 * self.layers * self.blocks * self.block_tokens * self.kv_heads * self.head_size


class AttentionBackend(Protocol):
    """Causal attention over a paged cache."""

    @property
    def exact(self) -> bool:
        """Whether a row's result has the same bits whatever rows share the step and however its prompt was cut."""
        ...

    @property
    def reason(self) -> str:
        """Why it is exact, or why not, in one sentence."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        ...

    def begin(self, batch: Batch) -> None:
        """Takes the step's positions, slots and block tables."""
        ...

    def write(self, layer: int, keys: Buffer, qkv: Buffer) -> None:
        """Stores the rows' keys and values at the rows' slots.

        keys: [at least rows, kv_heads * head_size]. qkv: rows of queries, keys and values, of which the values are taken.
        """
        ...

    def attend(self, layer: int, queries: Buffer, out: Buffer) -> None:
        """out[row] = attention of the row's queries over positions [0, position] of its sequence.

        queries: float32 [at least rows, heads * head_size], already divided by the root of head_size. out: the same shape,
        in the model's precision.
        """
        ...
