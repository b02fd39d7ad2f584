"""The rows' kernels against plain torch, row by row against themselves, and linear layers that are made to be exact."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from workers.engine.model.arrays import Buffer
from workers.engine.model.config import ModelConfig
from workers.engine.model.kernel_operations import KernelRowOperations
from workers.engine.model.linear import Linear, Scheme, choose_scheme
from workers.engine.model.row_operations import RowOperations
from workers.engine.model.row_reference import ReferenceRowOperations

CONFIG = ModelConfig("llama", 1000, 1, 96, 160, 6, 2, 64, 10_000.0, 1e-5, 512)
ROWS = 37
HEAD = torch.randn(1000, 96, generator=torch.Generator().manual_seed(1)) / 8
POSITIONS = (np.arange(ROWS) * 13 % 512).astype(np.int64)

Operation = Callable[[RowOperations, torch.dtype, slice], torch.Tensor]


def random(columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(seed))).to(dtype)


def norm(operations: RowOperations, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    residual, delta = random(96, 1)[rows].clone(), random(96, 2, dtype)[rows]
    out = torch.empty(residual.shape, dtype=dtype)
    buffers = (Buffer(residual), Buffer(delta), Buffer(random(96, 3)[0].contiguous()), Buffer(out))
    operations.add_norm(*buffers, len(residual))
    return torch.cat([residual, out.float()], 1)


def rotate(operations: RowOperations, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    qkv = random(10 * 64, 4, dtype)[rows].contiguous()
    queries, keys = torch.empty(len(qkv), 6 * 64), torch.empty(len(qkv), 2 * 64, dtype=dtype)
    operations.rotate(Buffer(qkv), np.ascontiguousarray(POSITIONS[rows]), Buffer(queries), Buffer(keys), len(qkv))
    return torch.cat([queries, keys.float()], 1)


def gate(operations: RowOperations, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    gate_up = (10 * random(320, 5)).to(dtype)[rows].contiguous()
    out = torch.empty(len(gate_up), 160, dtype=dtype)
    operations.gate(Buffer(gate_up), Buffer(out), len(gate_up))
    return out.float()


def logits(operations: RowOperations, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    normed = random(96, 6)[rows].contiguous()
    return torch.from_numpy(operations.logits(Buffer(normed), len(normed)).copy())


OPERATIONS: list[Operation] = [norm, rotate, gate, logits]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_agree_with_torch(operation: Operation, dtype: torch.dtype) -> None:
    """Within a few units in the last place."""
    fast = operation(KernelRowOperations(CONFIG, HEAD.to(dtype)), dtype, slice(None))
    slow = operation(ReferenceRowOperations(CONFIG, HEAD.to(dtype)), dtype, slice(None))
    worst = float(((fast - slow).abs() / (1 + slow.abs())).max())
    print(f"{operation.__name__} {dtype}: largest relative difference {worst:.2e}")
    assert worst < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_rows(operation: Operation, dtype: torch.dtype) -> None:
    """All rows at once against spans of 1, 3, 8 and 13 rows."""
    operations = KernelRowOperations(CONFIG, HEAD.to(dtype))
    whole = operation(operations, dtype, slice(None))
    for begin, end in ((0, 1), (5, 8), (9, 17), (20, 33), (36, 37)):
        assert torch.equal(operation(operations, dtype, slice(begin, end)), whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers_are_exact_at_every_number_of_rows(dtype: torch.dtype) -> None:
    """On inputs whose products cancel, where any other order of sums shows: 1 to 300 rows give a row the same bits."""
    scheme = choose_scheme({(576, 1536, False), (960, 576, True)}, dtype, (1, 2))
    assert scheme.exact
    generator = torch.Generator().manual_seed(9)
    half = torch.randn(576, 768, generator=generator)
    part = torch.randn(300, 768, generator=generator)
    layer = Linear(torch.cat([half, half], 1).to(dtype), scheme)
    rows = torch.zeros(scheme.padded(300), 1536, dtype=dtype)
    rows[:300] = torch.cat([part, -part], 1).to(dtype)
    whole = layer(rows)[:300]
    for count in (1, 2, 3, 5, 17, 31, 32, 33, 64, 65, 127, 128, 129, 150, 256, 257):
        assert torch.equal(layer(rows[: scheme.padded(count)])[:count], whole[:count]), f"{count} rows"


def test_the_probe_sees_another_order_of_sums() -> None:
    """float32 through plain torch changes order with the number of rows; if the probe passed it, it would be blind."""
    from workers.engine.model import linear

    plain = Scheme(packed=False, packed_for=None, sizes=(1, 32))
    assert not linear.is_exact(plain, (576, 1536, False), torch.float32, (1,))


@pytest.mark.parametrize(("rows", "padded"), [(1, 2), (3, 8), (8, 8), (9, 10), (20, 24)])
def test_rows_are_padded_to_the_scheme(rows: int, padded: int) -> None:
    """Sizes 2 and 8: whole calls of 8, then the rest."""
    assert Scheme(packed=False, packed_for=None, sizes=(2, 8)).padded(rows) == padded
