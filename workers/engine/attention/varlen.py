"""torch's own variable-length attention over the paged cache, for devices without flash-attn.

torch 2.13's varlen_attn takes block tables (with seqused_k) and num_splits, of which 1 turns split-KV off; it has no soft cap.
Releases without these arguments are told apart by the signature.
"""

import inspect

import torch

from workers.engine.attention.paged import Heads, flash_lacks
from workers.engine.attention.protocol import CacheShape
from workers.engine.attention.step_tensors import StepTensors

_NEEDED = {"block_table", "seqused_k", "num_splits", "window_size", "enable_gqa", "scale"}


def lacks(shape: CacheShape, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot be used for these sizes; None: it can."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"torch {torch.__version__} has no varlen_attn ({error})"
    missing = _NEEDED - set(inspect.signature(varlen_attn).parameters)
    if missing:
        return f"varlen_attn of torch {torch.__version__} does not take {', '.join(sorted(missing))}"
    if shape.soft_cap is not None:
        return "varlen_attn has no soft cap"
    return flash_lacks("varlen_attn", shape, dtype)


class VarlenKernel:
    """See paged.Kernel. exact: split-KV is off."""

    name = "torch varlen_attn"

    def __init__(self, exact: bool) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self.exact = exact
        self.reason = (
            "varlen_attn without split-KV sums a row's keys in one order"
            if exact
            else "varlen_attn splits a sequence's keys by how many sequences share the step"
        )
        self._attend = varlen_attn

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepTensors, heads: Heads
    ) -> torch.Tensor:
        """See paged.Kernel."""
        assert heads.soft_cap is None, "varlen_attn has no soft cap"
        result = self._attend(
            queries,
            keys,
            values,
            cu_seq_q=step.cu_queries,
            cu_seq_k=step.cu_keys,
            max_q=max(2, step.queries_max) if self.exact else step.queries_max,
            max_k=step.keys_max,
            scale=1.0,
            window_size=(-1, 0) if heads.window is None else (heads.window - 1, 0),
            enable_gqa=True,
            seqused_k=step.key_counts,
            block_table=step.tables,
            num_splits=1 if self.exact else None,
        )
        assert isinstance(result, torch.Tensor), "no auxiliary output was asked for"
        return result
