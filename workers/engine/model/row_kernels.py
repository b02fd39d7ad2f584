"""Norm, rotation, gate and output head as numba kernels: each result depends on its own row alone, bit for bit.

Arrays are flat; rows follow one another. Model values are float32 or, in bf16, uint16 holding bfloat16 bits; the residual
stream, norms and logits are float32. Compiled when this module is first imported, then kept in numba's cache.
"""

# numba makes its types and intrinsics at run time: nothing here can be checked before that.
# mypy: ignore-errors

import math
from functools import cache

import numpy as np
from numba import njit, prange
from numba.types import float32, int64, none, uint16

from workers.engine.model.lanes import WIDTH, add, div, exp, fma, load, mul, splat, store, sub, total
from workers.engine.model.products import dot_products

_F, _H = float32[::1], uint16[::1]
_HEAD_CHAINS = 2
_HEAD_AHEAD = 128  # rows of weights to fetch before they are needed, 4 KB of bfloat16


@njit([none(_F, _F, out, int64, int64, float32) for out in (_H, _F)], parallel=True, nogil=True, cache=True)
def norm_rows(residual, weight, out, rows, size, epsilon):
    """out = residual / root of mean square * weight."""
    for row in prange(rows):
        squares = splat(np.float32(0.0))
        for at in range(row * size, (row + 1) * size, WIDTH):
            value = load(residual, at)
            squares = fma(value, value, squares)
        scale = splat(np.float32(1.0) / np.float32(math.sqrt(total(squares) / np.float32(size) + epsilon)))
        for column in range(0, size, WIDTH):
            at = row * size + column
            store(out, at, mul(mul(load(residual, at), scale), load(weight, column)))


@njit([none(_F, kind, _F, kind, int64, int64, float32) for kind in (_H, _F)], parallel=True, nogil=True, cache=True)
def add_norm_rows(residual, delta, weight, out, rows, size, epsilon):
    """residual += delta; out = residual / root of mean square * weight."""
    for row in prange(rows):
        squares = splat(np.float32(0.0))
        for at in range(row * size, (row + 1) * size, WIDTH):
            value = add(load(residual, at), load(delta, at))
            store(residual, at, value)
            squares = fma(value, value, squares)
        scale = splat(np.float32(1.0) / np.float32(math.sqrt(total(squares) / np.float32(size) + epsilon)))
        for column in range(0, size, WIDTH):
            at = row * size + column
            store(out, at, mul(mul(load(residual, at), scale), load(weight, column)))


@njit([none(kind, kind, int64, int64) for kind in (_H, _F)], parallel=True, nogil=True, cache=True)
def gate_rows(gate_up, out, rows, size):
    """out = silu(gate) * up; a row of gate_up holds the gate, then up, of size values each."""
    one, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
    for row in prange(rows):
        for column in range(0, size, WIDTH):
            gate = load(gate_up, row * 2 * size + column)
            up = load(gate_up, row * 2 * size + size + column)
            silu = div(gate, add(one, exp(sub(zero, gate))))
            store(out, row * size + column, mul(silu, up))


_HEAD_NORM = [none(kind, _F, _F, int64, int64, int64, int64, float32) for kind in (_H, _F)]


@njit(_HEAD_NORM, parallel=True, nogil=True, cache=True)
def head_norm_rows(qkv, query_weight, key_weight, rows, heads, kv_heads, size, epsilon):
    """Each query and key head of rows of queries, keys, values, in place: head / root of its mean square * weight."""
    for row in prange(rows):
        for head in range(heads + kv_heads):
            start = (row * (heads + 2 * kv_heads) + head) * size
            squares = splat(np.float32(0.0))
            for at in range(start, start + size, WIDTH):
                value = load(qkv, at)
                squares = fma(value, value, squares)
            scale = splat(np.float32(1.0) / np.float32(math.sqrt(total(squares) / np.float32(size) + epsilon)))
            for column in range(0, size, WIDTH):
                weight = load(query_weight, column) if head < heads else load(key_weight, column)
                store(qkv, start + column, mul(mul(load(qkv, start + column), scale), weight))


_ROTATE = [none(kind, _F, _F, int64[::1], _F, kind, int64, int64, int64, int64) for kind in (_H, _F)]


@njit(_ROTATE, parallel=True, nogil=True, cache=True)
def rotate_rows(qkv, cosine, sine, positions, queries, keys, rows, heads, kv_heads, size):
    """Rotary positions: queries (float32, divided by the root of size) and keys from rows of queries, keys, values.

    cosine and sine: [position, size / 2]. Rotate-half: element i of a head turns with element i + size / 2.
    """
    half = size // 2
    stride = (heads + 2 * kv_heads) * size
    scale = splat(np.float32(1.0) / np.float32(math.sqrt(np.float32(size))))
    for row in prange(rows):
        angle = positions[row] * half
        for head in range(heads + kv_heads):
            source = row * stride + head * size
            for column in range(0, half, WIDTH):
                cos, sin = load(cosine, angle + column), load(sine, angle + column)
                first, second = load(qkv, source + column), load(qkv, source + half + column)
                turned = sub(mul(first, cos), mul(second, sin))
                other = add(mul(second, cos), mul(first, sin))
                if head < heads:
                    target = (row * heads + head) * size + column
                    store(queries, target, mul(turned, scale))
                    store(queries, target + half, mul(other, scale))
                else:
                    target = (row * kv_heads + head - heads) * size + column
                    store(keys, target, turned)
                    store(keys, target + half, other)


@njit(nogil=True)
def _copy_scores(scores, logits, first, count, tile, width):
    for vector in range(count):
        store(logits, (first + vector) * width + tile * WIDTH, load(scores, vector * WIDTH))


@cache
def make_head(size: int, halves: bool):
    """The output head for rows of `size` values and weights in bfloat16 (halves) or float32.

    Its sums do not depend on how many rows there are.
    """

    signature = none(_F, _H if halves else _F, _F, int64, int64)

    @njit([signature], parallel=True, nogil=True, cache=True)
    def head_rows(rows_in, weight, logits, rows, width):
        """logits[row, token] (width columns) from tiles: weight[token // 16][d][token % 16]."""
        for tile in prange(width // WIDTH):
            scores = np.empty(8 * WIDTH, np.float32)
            at = tile * size * WIDTH
            row = 0
            while row + 8 <= rows:
                dot_products(rows_in, row * size, weight, at, WIDTH, scores, 8, size, _HEAD_CHAINS, _HEAD_AHEAD)
                _copy_scores(scores, logits, row, 8, tile, width)
                row += 8
            while row + 4 <= rows:
                dot_products(rows_in, row * size, weight, at, WIDTH, scores, 4, size, _HEAD_CHAINS, _HEAD_AHEAD)
                _copy_scores(scores, logits, row, 4, tile, width)
                row += 4
            while row < rows:
                dot_products(rows_in, row * size, weight, at, WIDTH, scores, 1, size, _HEAD_CHAINS, _HEAD_AHEAD)
                _copy_scores(scores, logits, row, 1, tile, width)
                row += 1

    return head_rows
