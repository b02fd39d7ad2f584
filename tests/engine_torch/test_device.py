"""The path for torch devices, run on the processor: attention over the paged cache, the model, and graphs for decode."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine_torch.driver import generate, place
from tests.engine_torch.small_model import tensors, write
from tests.engine_torch.test_attention import SHAPES, WHOLE, attend, plan_of
from workers.engine.attention.gather import GatherKernel
from workers.engine.attention.metadata import build, pad_decode
from workers.engine.attention.paged import PagedAttention
from workers.engine.attention.reference import ReferenceAttention
from workers.engine.batch import make_batch
from workers.engine.graphs import DecodeGraphs
from workers.engine.model.llama import Rows
from workers.engine.runner import ModelRunner

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [30, 20, 10]]


@pytest.mark.parametrize("name", SHAPES)
def test_attention_over_the_paged_cache_agrees_with_the_reference(name: str) -> None:
    """A prefill of six sequences, then a chunk, a token and a prefill in one step over the same cache.

    At head size 256 the reference itself is 2.2e-5 from a float64 result, and plain torch here 4.1e-5; at 64, 0.8 and 1.0e-5.
    """
    shape, dtype = SHAPES[name], torch.float32
    paged, reference = PagedAttention(shape, dtype, CPU, GatherKernel()), ReferenceAttention(shape, dtype)
    tolerance = 2e-5 * max(1.0, shape.head_size / 64)
    for pieces in (WHOLE, [(5, 60, 99), (4, 39, 40), (3, 0, 17)]):
        difference = attend(paged, shape, dtype, pieces) - attend(reference, shape, dtype, pieces)
        assert float(difference.abs().max()) <= tolerance


def test_metadata_of_a_mixed_step() -> None:
    """A chunk of 3 rows up to position 40 and a single row at position 16: literal values."""
    shape = SHAPES["smollm2"]
    metadata = build(make_batch(plan_of(shape, [(5, 38, 41), (3, 16, 17)]), shape.block_tokens))
    assert metadata.cu_queries.tolist() == [0, 3, 4]
    assert metadata.cu_keys.tolist() == [0, 41, 58]
    assert metadata.key_counts.tolist() == [41, 17]
    assert (metadata.queries_max, metadata.keys_max, metadata.decode) == (3, 41, False)


def test_padding_rows_touch_the_scratch_block_alone() -> None:
    """Two decode rows padded to four: theirs are as before, the others' slots and tables are the scratch block's."""
    shape = SHAPES["smollm2"]
    batch = make_batch(plan_of(shape, [(5, 40, 41), (3, 16, 17)]), shape.block_tokens)
    padded = pad_decode(batch, 4, shape.blocks, 8, shape.block_tokens)
    assert padded.slots.tolist() == [*batch.slots.tolist(), 640, 640]
    assert (padded.block_tables[2:] == shape.blocks).all()
    assert padded.sampled_rows.tolist() == [0, 1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_device_path_gives_the_text_of_the_kernels(tmp_path: Path, deterministic: bool) -> None:
    """Greedy tokens are equal and logits agree within numerics."""
    path = write(tmp_path / "m.gguf", tensors())
    kernels = ModelRunner(path, "fp32", cache_blocks=8)
    device = ModelRunner(path, "fp32", cache_blocks=8, device=CPU, deterministic=deterministic)
    fast, slow = place(PROMPTS, 5, 8), place(PROMPTS, 5, 8)
    assert generate(kernels, fast, 5, chunk_tokens=4) == generate(device, slow, 5, chunk_tokens=4)
    assert max(float(np.abs(a.logits[-1] - b.logits[-1]).max()) for a, b in zip(fast, slow, strict=True)) < 1e-5
    assert not device.exact
    assert "plain torch" in device.describe().exact_reason


def recorded(work: Callable[[], Rows]) -> tuple[Rows, Callable[[], None]]:
    """A stand-in for a captured graph: runs the work again, and leaves its result in the first run's tensors."""
    rows = Rows(*(tensor.clone() for tensor in (lambda made: (made.residual, made.delta))(work())))

    def replay() -> None:
        made = work()
        rows.residual.copy_(made.residual)
        rows.delta.copy_(made.delta)

    return rows, replay


def test_decode_through_graphs_gives_the_same_logits(tmp_path: Path) -> None:
    """Two sequences decoded through a graph for four rows, among whose rows two are padding."""
    path = write(tmp_path / "m.gguf", tensors())
    plain, graphed = (ModelRunner(path, "fp32", cache_blocks=8, device=CPU) for _ in range(2))
    attention = graphed._backends.attention
    assert isinstance(attention, PagedAttention)
    graphs = DecodeGraphs(graphed._model, attention, 8, 16, CPU, recorded, (1, 4))
    with torch.inference_mode():
        graphs.capture_all()
    eager, replayed = place(PROMPTS, 5, 8), place(PROMPTS, 5, 8)
    expected = generate(plain, eager, 5)
    graphed._model = graphs  # type: ignore[assignment]
    assert generate(graphed, replayed, 5) == expected
    for one, other in zip(eager, replayed, strict=True):
        assert float(np.abs(one.logits[-1] - other.logits[-1]).max()) < 1e-5
