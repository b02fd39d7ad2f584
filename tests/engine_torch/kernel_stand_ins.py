"""Stand-ins for the device's attention kernels, which do not run on a processor.

They take what the documentation of flash-attn 2.8 and of torch 2.13's varlen_attn says, refuse what the kernels refuse (types,
layouts, page sizes), and compute by a loop over sequences and rows.
"""

import torch

PAGE = 256


def refuse(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, *counts: torch.Tensor
) -> None:
    """What the kernels check before they start."""
    assert queries.dtype == keys.dtype == values.dtype, "one type for queries, keys and values"
    assert queries.dtype in (torch.float16, torch.bfloat16), "16 bits a value"
    assert keys.dim() == 4, "a paged cache: page, offset, head, value"
    assert keys.shape[1] % PAGE == 0, f"pages of {keys.shape[1]}"
    assert all(tensor.stride(-1) == 1 for tensor in (queries, keys, values, tables)), "the last dimension is contiguous"
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in (tables, *counts)), "int32, contiguous"


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: list[int],
    counts: list[int],
    tables: torch.Tensor,
    left: int,
    soft_cap: float,
) -> torch.Tensor:
    """Causal, aligned at the last key. left: keys seen before a row's own, -1 for all; soft_cap 0: none."""
    out = torch.empty_like(queries)
    group = queries.shape[1] // keys.shape[2]
    for number, count in enumerate(counts):
        seen_keys, seen_values = (
            cache[tables[number].long()].flatten(0, 1)[:count].float().repeat_interleave(group, 1) for cache in (keys, values)
        )
        for row in range(starts[number], starts[number + 1]):
            last = count - (starts[number + 1] - row)
            first = 0 if left < 0 else max(0, last - left)
            scores = torch.einsum("hd,shd->hs", queries[row].float(), seen_keys[first : last + 1])
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), seen_values[first : last + 1])
    return out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Rows of several sequences, packed."""
    refuse(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    assert (softmax_scale, causal) == (1.0, True)
    counts = cu_seqlens_k.diff().tolist()
    assert max(counts) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    return attend(q, k, v, cu_seqlens_q.tolist(), counts, block_table, window_size[0], softcap)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """[sequences, 1, heads, head size]."""
    refuse(q, k_cache, v_cache, block_table, cache_seqlens)
    assert (softmax_scale, causal, q.shape[1]) == (1.0, True, 1)
    starts = list(range(len(q) + 1))
    return attend(q[:, 0], k_cache, v_cache, starts, cache_seqlens.tolist(), block_table, window_size[0], softcap)[:, None]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Rows of several sequences, packed; causal when nothing to the right is seen."""
    refuse(query, key, value, block_table, cu_seq_q, seqused_k)
    assert enable_gqa or query.shape[1] == key.shape[2], "heads differ in number"
    assert (scale, window_size[1]) == (1.0, 0)
    counts = seqused_k.tolist()
    assert max(counts) <= max_k
    assert int(cu_seq_q.diff().max()) <= max_q
    assert num_splits in (1, None)
    return attend(query, key, value, cu_seq_q.tolist(), counts, block_table, window_size[0], 0.0)
