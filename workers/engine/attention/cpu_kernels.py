"""Paged attention as numba kernels: one algorithm and one order of sums for every query row, in prefill, chunk and decode.

A row's keys are taken in tiles of sixteen at fixed positions, with a running maximum and sum (online softmax: Milakov and
Gimelshein, arXiv 1805.02867); tile by tile, key by key, in order of position. The query heads that share a kv head go together,
so that keys and values are read once. Keys lie transposed inside a block, [kv head][value][offset], so that sixteen scores
come from sixteen lanes without a sum across lanes; values lie [kv head][offset][value].
"""

# numba makes its types and intrinsics at run time: nothing here can be checked before that.
# mypy: ignore-errors

from functools import cache

import numpy as np
from numba import njit, prange
from numba.types import float32, int32, int64, none, uint16

from workers.engine.model.lanes import (
    WIDTH,
    between,
    exp,
    fma,
    greatest,
    load,
    mul,
    splat,
    store,
    sub,
    tanh,
    total,
)
from workers.engine.model.products import add_weighted, dot_products, fetch_rows

_MINUS_INFINITY = np.float32(-np.inf)
_FLAT_FLOAT = float32[::1]


def chains_for(group: int) -> int:
    """Interleaved parts of each score's sum: enough sums in flight for the machine, few enough for its registers."""
    return 4 if group <= 4 else 2 if group <= 8 else 1


@njit(nogil=True)
def _soften(scores, unseen, seen, peaks, sums, scales, group, cap):
    # scores become weights relative to the running maximum; scales say by how much older sums shrink. Lanes from unseen up to
    # seen count.
    for head in range(group):
        tile = load(scores, head * WIDTH)
        if cap > 0.0:
            tile = mul(tanh(mul(tile, splat(np.float32(1.0 / cap)))), splat(np.float32(cap)))
        if seen < WIDTH or unseen > 0:
            tile = between(tile, unseen, seen)
        peak = max(peaks[head], greatest(tile))
        weights = exp(sub(tile, splat(peak)))
        shrink = exp(splat(peaks[head] - peak))
        store(scales, head * WIDTH, shrink)
        store(scores, head * WIDTH, weights)
        store(sums, head * WIDTH, fma(load(sums, head * WIDTH), shrink, weights))
        peaks[head] = peak


@cache
def make_attend(kv_heads: int, group: int, size: int, block_tokens: int, halves: bool, cap: float):
    """The attention kernel for these sizes: group query heads a kv head, size values a head; bfloat16 (halves) or float32.

    cap: of the scores, 0 for none. The window, in positions, is an argument of each call: a row's tiles lie where they would
    without one, and those before its window are left out.
    Its constants are plain integers, so that numba finds the compiled code again in the next process.
    """
    chains = chains_for(group)
    block_values = kv_heads * size * block_tokens
    tiles_per_block = block_tokens // WIDTH

    def attend(queries, keys, values, tables, sequences, positions, out, rows, window):
        items = rows * kv_heads
        for turn in prange(items):
            # Long and short rows in turns: each thread gets a run of turns, and in a prefill later rows see more keys.
            item = turn // 2 if turn % 2 == 0 else items - 1 - turn // 2
            row, kv_head = item // kv_heads, item % kv_heads
            scores = np.empty(group * WIDTH, np.float32)
            sums = np.zeros(group * WIDTH, np.float32)
            scales = np.empty(group * WIDTH, np.float32)
            peaks = np.full(group, _MINUS_INFINITY, np.float32)
            result = np.zeros(group * size, np.float32)
            first = (row * kv_heads + kv_head) * group * size
            seen_in_all = positions[row] + 1
            tiles = (seen_in_all + WIDTH - 1) // WIDTH
            first_seen = max(0, seen_in_all - window)
            for tile in range(first_seen // WIDTH, tiles):
                block = np.int64(tables[sequences[row], tile // tiles_per_block])
                start = block * block_values + kv_head * size * block_tokens
                offset = tile % tiles_per_block * WIDTH
                if tile + 1 < tiles:
                    next_block = np.int64(tables[sequences[row], (tile + 1) // tiles_per_block])
                    next_start = next_block * block_values + kv_head * size * block_tokens
                    next_offset = (tile + 1) % tiles_per_block * WIDTH
                    fetch_rows(keys, next_start + next_offset, block_tokens, size, WIDTH)
                    fetch_rows(values, next_start + next_offset * size, size, WIDTH, size)
                seen = min(WIDTH, seen_in_all - tile * WIDTH)
                dot_products(queries, first, keys, start + offset, block_tokens, scores, group, size, chains, 0)
                _soften(scores, first_seen - tile * WIDTH, seen, peaks, sums, scales, group, cap)
                add_weighted(scores, scales, values, start + offset * size, seen, result, group, size)
            for head in range(group):
                share = splat(np.float32(1.0) / total(load(sums, head * WIDTH)))
                for column in range(head * size, (head + 1) * size, WIDTH):
                    store(out, first + column, mul(load(result, column), share))

    kind = uint16[::1] if halves else float32[::1]
    signature = none(_FLAT_FLOAT, kind, kind, int32[:, ::1], int64[::1], int64[::1], kind, int64, int64)
    return njit([signature], parallel=True, nogil=True, cache=True)(attend)


_WRITE = [none(kind, kind, int64[::1], kind, kind, int64, int64, int64, int64) for kind in (uint16[::1], float32[::1])]


@njit(_WRITE, nogil=True, cache=True)
def write_rows(new_keys, qkv, slots, keys, values, heads, kv_heads, size, block_tokens):
    """Puts row i's keys, and the values at the end of its queries, keys and values, at slots[i] of one layer's cache."""
    for row in range(len(slots)):
        block, offset = slots[row] // block_tokens, slots[row] % block_tokens
        for head in range(kv_heads):
            start = (block * kv_heads + head) * size * block_tokens
            key = (row * kv_heads + head) * size
            value = (row * (heads + 2 * kv_heads) + heads + kv_heads + head) * size
            for column in range(size):
                keys[start + column * block_tokens + offset] = new_keys[key + column]
                values[start + offset * size + column] = qkv[value + column]
