"""flash-attn's kernels over the paged cache. The only file that imports flash_attn.

Split-KV sums a long sequence's keys in as many parts as keep the device busy, which depends on the other sequences. flash-attn
2.8 splits in two cases: in flash_attn_with_kvcache, by num_splits, and in flash_attn_varlen_func when max_seqlen_q is 1. So the
exact way calls flash_attn_varlen_func alone and never tells it less than 2; the fast way decodes by flash_attn_with_kvcache.
"""

from collections.abc import Callable

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from workers.engine.attention.paged import Heads, flash_lacks
from workers.engine.attention.protocol import CacheShape
from workers.engine.attention.step_tensors import StepTensors


def lacks(shape: CacheShape, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these sizes; None: they can."""
    return flash_lacks("flash-attn", shape, dtype)


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
