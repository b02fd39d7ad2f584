"""The attention kernels against the reference, and against themselves row by row."""

import numpy as np
import pytest
import torch

from schemas.envelope import Sampling
from workers.engine.attention.cpu import CpuAttention, lacks
from workers.engine.attention.protocol import AttentionBackend, CacheShape
from workers.engine.attention.reference import ReferenceAttention
from workers.engine.batch import make_batch
from workers.engine.model.arrays import Buffer
from workers.engine.plan import Chunk, StepPlan

SHAPES = {
    "smollm2": CacheShape(layers=2, blocks=40, block_tokens=16, heads=9, kv_heads=3, head_size=64),
    "one_head_each": CacheShape(layers=2, blocks=40, block_tokens=16, heads=2, kv_heads=2, head_size=32),
    "eight_share_one": CacheShape(layers=2, blocks=20, block_tokens=32, heads=8, kv_heads=1, head_size=64),
    "wide_heads": CacheShape(layers=2, blocks=40, block_tokens=16, heads=4, kv_heads=2, head_size=256),
    "window_of_20": CacheShape(
        layers=2, blocks=40, block_tokens=16, heads=4, kv_heads=2, head_size=64, windows=(None, 20), soft_cap=3.0
    ),
    "window_of_1": CacheShape(layers=2, blocks=40, block_tokens=16, heads=2, kv_heads=2, head_size=32, windows=(None, 1)),
}
LENGTHS = (1, 15, 16, 17, 40, 100)  # tokens of the sequences: around tile and block edges


def plan_of(shape: CacheShape, pieces: list[tuple[int, int, int]]) -> StepPlan:
    """Chunks (sequence, start, end) over a shuffled cache; a sequence's blocks depend on its number alone."""
    order = np.random.default_rng(3).permutation(shape.blocks)
    tables, used = [], 0
    for length in LENGTHS:
        blocks = -(-length // shape.block_tokens)
        tables.append(tuple(int(block) for block in order[used : used + blocks]))
        used += blocks
    return StepPlan(tuple(chunk(number, start, end, tables[number]) for number, start, end in pieces))


def chunk(number: int, start: int, end: int, table: tuple[int, ...]) -> Chunk:
    return Chunk(str(number), (0,) * (end - start), start, table, True, Sampling(seed=0))


def rows_of(shape: CacheShape, dtype: torch.dtype, piece: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a chunk: fixed by sequence and position."""
    number, start, end = piece
    generator = torch.Generator().manual_seed(number)
    parts = []
    for heads in (shape.heads, shape.kv_heads, shape.kv_heads):
        parts.append(2 * torch.randn(LENGTHS[number], heads * shape.head_size, generator=generator))
    return parts[0][start:end] / 8, parts[1][start:end].to(dtype), parts[2][start:end].to(dtype)


def attend(
    backend: AttentionBackend, shape: CacheShape, dtype: torch.dtype, pieces: list[tuple[int, int, int]], layer: int = 1
) -> torch.Tensor:
    """One step of these chunks; the rows' results."""
    queries, keys, values = (torch.cat(parts) for parts in zip(*(rows_of(shape, dtype, p) for p in pieces), strict=True))
    out = torch.empty(len(queries), shape.heads * shape.head_size, dtype=dtype)
    backend.begin(make_batch(plan_of(shape, pieces), shape.block_tokens))
    backend.write(layer, Buffer(keys), Buffer(torch.cat([queries.to(dtype), keys, values], 1)))
    backend.attend(layer, Buffer(queries), Buffer(out))
    return out


WHOLE = [(number, 0, length) for number, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_kernels_agree_with_the_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Six sequences of 1 to 100 tokens in shuffled blocks, prefill in one step."""
    shape = SHAPES[name]
    fast = attend(CpuAttention(shape, dtype), shape, dtype, WHOLE)
    slow = attend(ReferenceAttention(shape, dtype), shape, dtype, WHOLE)
    largest = float((fast.float() - slow.float()).abs().max())
    print(f"{name} {dtype}: largest difference {largest:.2e}")
    assert largest <= tolerance


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_step(name: str, dtype: torch.dtype) -> None:
    """The longest sequence in one piece among others, and alone: in pieces of 33, then token by token."""
    shape, last = SHAPES[name], len(LENGTHS) - 1
    among = attend(CpuAttention(shape, dtype), shape, dtype, WHOLE)[-LENGTHS[last] :]
    alone = CpuAttention(shape, dtype)
    cuts = [(last, 0, 33), (last, 33, 66), *((last, at, at + 1) for at in range(66, LENGTHS[last]))]
    pieces = torch.cat([attend(alone, shape, dtype, [piece]) for piece in cuts])
    assert torch.equal(among, pieces)


def test_stale_values_do_not_leak() -> None:
    """Not-a-number left in a block by somebody else, behind a row's own positions, does not reach the row."""
    shape = SHAPES["smollm2"]
    clean, soiled = CpuAttention(shape, torch.bfloat16), CpuAttention(shape, torch.bfloat16)
    for cache in (*soiled._key_arrays, *soiled._value_arrays):
        cache[:] = 0x7FC0
    assert torch.equal(attend(clean, shape, torch.bfloat16, WHOLE), attend(soiled, shape, torch.bfloat16, WHOLE))


@pytest.mark.parametrize("backend", [CpuAttention, ReferenceAttention])
def test_a_window_is_positions_counted_back_from_the_rows_own(backend: type[CpuAttention]) -> None:
    """With a window of one position each row sees only itself: the result is its own values; layer 0 sees all."""
    shape = SHAPES["window_of_1"]
    values = torch.cat([rows_of(shape, torch.float32, piece)[2] for piece in WHOLE])
    assert torch.allclose(attend(backend(shape, torch.float32), shape, torch.float32, WHOLE), values, atol=1e-6)
    assert not torch.allclose(attend(backend(shape, torch.float32), shape, torch.float32, WHOLE, layer=0), values, atol=0.1)


def test_layers_do_not_meet() -> None:
    """What is written in one layer is not seen in another."""
    shape = SHAPES["smollm2"]
    backend = CpuAttention(shape, torch.float32)
    first = attend(backend, shape, torch.float32, WHOLE, layer=0)
    keys, heads = torch.full((sum(LENGTHS), shape.kv_heads * shape.head_size), 9.0), shape.heads + 2 * shape.kv_heads
    backend.write(1, Buffer(keys), Buffer(torch.full((sum(LENGTHS), heads * shape.head_size), 9.0)))
    assert torch.equal(attend(backend, shape, torch.float32, WHOLE, layer=0), first)


def test_sizes_that_do_not_fit_the_kernels_are_named() -> None:
    """The runner then takes the reference."""
    assert lacks(SHAPES["smollm2"]) is None
    assert lacks(CacheShape(1, 1, 16, 1, 1, 80)) == "head size 80 is not a multiple of 32"
    assert lacks(CacheShape(1, 1, 8, 1, 1, 64)) == "blocks of 8 tokens are not a multiple of 16"
