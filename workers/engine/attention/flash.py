"""flash-attn's kernels over the paged cache. The only file that imports flash_attn.

Split-KV sums a long sequence's keys in as many parts as keep the device busy, which depends on the other sequences. flash-attn
2.8 splits in two cases: in flash_attn_with_kvcache, by num_splits, and in flash_attn_varlen_func when max_seqlen_q is 1. So the
exact way calls flash_attn_varlen_func alone and never tells it less than 2; the fast way decodes by flash_attn_with_kvcache.
"""

from collections.abc import Callable

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from workers.engine.attention.paged import Heads
from workers.engine.attention.protocol import CacheShape
from workers.engine.attention.step_tensors import StepTensors

BLOCK_TOKENS = 256  # flash-attn 2 reads pages of whole multiples of this
_HEAD_SIZE_MAX = 256


def lacks(shape: CacheShape, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these sizes; None: they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash kernels do not compute in {dtype}"
    if shape.head_size % 8 or shape.head_size > _HEAD_SIZE_MAX:
        return f"head size {shape.head_size} is no multiple of 8 up to {_HEAD_SIZE_MAX}"
    if shape.block_tokens % BLOCK_TOKENS:
        return f"blocks of {shape.block_tokens} tokens are not a multiple of {BLOCK_TOKENS}"
    return None


class FlashKernel:
    """See paged.Kernel. exact: one order of sums in every step, at some cost in decode."""

    name = "flash-attn"

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.reason = (
            "flash-attn without split-KV sums a row's keys in one order"
            if exact
            else "flash-attn splits a sequence's keys by how many sequences share the step"
        )
        self._decode: Callable[..., torch.Tensor] = flash_attn_with_kvcache
        self._varlen: Callable[..., torch.Tensor] = flash_attn_varlen_func

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepTensors, heads: Heads
    ) -> torch.Tensor:
        """See paged.Kernel."""
        options = {
            "softmax_scale": 1.0,
            "causal": True,
            "window_size": (-1, -1) if heads.window is None else (heads.window - 1, 0),
            "softcap": heads.soft_cap or 0.0,
            "block_table": step.tables,
        }
        if step.decode and not self.exact:
            return self._decode(queries[:, None], keys, values, cache_seqlens=step.key_counts, **options)[:, 0]
        return self._varlen(
            queries,
            keys,
            values,
            cu_seqlens_q=step.cu_queries,
            cu_seqlens_k=step.cu_keys,
            max_seqlen_q=max(2, step.queries_max) if self.exact else step.queries_max,
            max_seqlen_k=step.keys_max,
            **options,
        )
