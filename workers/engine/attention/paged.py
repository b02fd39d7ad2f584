"""Attention on a torch device: a paged cache in the layout that flash-style kernels read, and the kernel that was chosen.

The kernel is a function of queries, one layer's cache and the step's tensors; flash.py, varlen.py and gather.py each make one.
Cache: [layer, block, offset, kv head, value], with one block more than the scheduler knows, where padding rows write.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.attention.protocol import CacheShape
from workers.engine.attention.step_tensors import StepTensors, upload
from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer

_FLASH_PAGE_TOKENS = 256  # flash-attn 2 reads pages of whole multiples of this
_FLASH_HEAD_SIZE_MAX = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer attends. window: the last so many positions are seen, None for all; soft_cap: c * tanh(score / c)."""

    window: int | None = None
    soft_cap: float | None = None


class Kernel(Protocol):
    """Causal attention over a paged cache."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a row's sums have one order whatever the other rows are."""
        ...

    @property
    def reason(self) -> str:
        """Why it is exact, or why not."""
        ...

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepTensors, heads: Heads
    ) -> torch.Tensor:
        """[rows, heads, head_size] for queries of that shape, already scaled; keys, values: [block, offset, kv head, value]."""
        ...


def flash_lacks(name: str, shape: CacheShape, dtype: torch.dtype) -> str | None:
    """Why flash-attn's kernels, which torch's varlen_attn calls too, cannot take these sizes; None: they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} does not compute in {dtype}"
    if shape.head_size % 8 or shape.head_size > _FLASH_HEAD_SIZE_MAX:
        return f"head size {shape.head_size} is no multiple of 8 up to {_FLASH_HEAD_SIZE_MAX}"
    if shape.block_tokens % _FLASH_PAGE_TOKENS:
        return f"blocks of {shape.block_tokens} tokens are not a multiple of {_FLASH_PAGE_TOKENS}"
    return None


class PagedAttention:
    """See protocol.AttentionBackend."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device, kernel: Kernel) -> None:
        self._shape = shape
        self._kernel = kernel
        self._device = device
        self._layers = tuple(Heads(shape.window_of(layer), shape.soft_cap) for layer in range(shape.layers))
        sizes = (shape.layers, shape.blocks + 1, shape.block_tokens, shape.kv_heads, shape.head_size)
        self._keys = torch.zeros(sizes, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._step: StepTensors | None = None

    @property
    def exact(self) -> bool:
        """As the kernel."""
        return self._kernel.exact

    @property
    def reason(self) -> str:
        """As the kernel."""
        return self._kernel.reason

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def scratch_block(self) -> int:
        """The block that belongs to no sequence."""
        return self._shape.blocks

    @property
    def step(self) -> StepTensors:
        """The step's numbers on the device."""
        assert self._step is not None, "a step begins with begin() or take()"
        return self._step

    def begin(self, batch: Batch) -> None:
        """Uploads the step's numbers."""
        self._step = upload(batch, self._device)

    def take(self, step: StepTensors) -> None:
        """Takes numbers that are on the device already."""
        self._step = step

    def write(self, layer: int, keys: Buffer, qkv: Buffer) -> None:
        """Stores the rows' keys and values at the rows' slots."""
        shape, slots = self._shape, self.step.slots
        flat = (-1, shape.kv_heads, shape.head_size)
        values = qkv.tensor[: len(slots), -shape.kv_heads * shape.head_size :]
        self._keys[layer].view(flat).index_copy_(0, slots, keys.tensor[: len(slots)].view(flat))
        self._values[layer].view(flat).index_copy_(0, slots, values.reshape(flat))

    def attend(self, layer: int, queries: Buffer, out: Buffer) -> None:
        """The kernel, in the cache's precision."""
        rows = len(self.step.slots)
        heads = (rows, self._shape.heads, self._shape.head_size)
        asked = queries.tensor[:rows].view(heads).to(self._keys.dtype)
        result = self._kernel(asked, self._keys[layer], self._values[layer], self.step, self._layers[layer])
        out.tensor[:rows] = result.reshape(rows, -1)
