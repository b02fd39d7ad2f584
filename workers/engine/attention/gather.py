"""Attention in plain torch on any device: each row gathers its sequence's keys through the block table. Slow, and always there.

It has no Python loop over sequences and reads no number back from the device, so that it can be captured in a graph too.
"""

import torch

from workers.engine.attention.paged import Heads
from workers.engine.attention.step_tensors import StepTensors

_ROWS_AT_ONCE = 16  # bounds the gathered keys


class GatherKernel:
    """See paged.Kernel."""

    name = "plain torch"
    exact = False
    reason = "attention runs in plain torch, whose order of sums depends on the number of rows"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepTensors, heads: Heads
    ) -> torch.Tensor:
        """See paged.Kernel."""
        every = torch.arange(len(queries), device=queries.device, dtype=step.cu_queries.dtype)
        tables = step.tables[torch.searchsorted(step.cu_queries[1:], every, right=True)].long()
        parts = zip(*(torch.split(part, _ROWS_AT_ONCE) for part in (queries, tables, step.positions)), strict=True)
        return torch.cat([_rows(asked, table, at, keys, values, heads) for asked, table, at in parts])


def _rows(
    queries: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: Heads,
) -> torch.Tensor:
    """A few rows, each with the table of its sequence."""
    known = torch.arange(tables.shape[1] * keys.shape[1], device=queries.device)
    hidden = known > positions[:, None]
    if heads.window is not None:
        hidden |= known <= positions[:, None] - heads.window
    asked = queries.float().view(len(queries), keys.shape[2], -1, queries.shape[-1])
    scores = torch.einsum("rkgd,rskd->rkgs", asked, keys[tables].flatten(1, 2).float())
    if heads.soft_cap is not None:
        scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    seen_values = values[tables].flatten(1, 2).float().masked_fill(hidden[:, :, None, None], 0.0)
    return torch.einsum("rkgs,rskd->rkgd", weights, seen_values).reshape(queries.shape).to(queries.dtype)
