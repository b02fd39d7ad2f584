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
    """The size of the cache: layers, blocks of block_tokens positions, kv heads of head_size values.

    windows: for each layer, how many positions a query sees, its own and those before it; None: all. Empty: all, in all
    layers. soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they stay.
    """

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    kv_heads: int
    head_size: int
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        assert len(self.windows) in (0, self.layers), f"{len(self.windows)} windows for {self.layers} layers"
        assert all(window is None or window > 0 for window in self.windows), f"windows {self.windows}"

    def window_of(self, layer: int) -> int | None:
        """Positions that a query of this layer sees; None: all."""
        return self.windows[layer] if self.windows else None

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
        """out[row] = attention of the row's queries over positions [0, position] of its sequence, the layer's window of them.

        queries: float32 [at least rows, heads * head_size], already multiplied by the model's attention scale. out: the same
        shape, in the model's precision.
        """
        ...
