"""What the flash and varlen backends tell their kernels, on stand-ins that check and compute what is documented."""

import dataclasses
import importlib
import sys
from types import ModuleType

import pytest
import torch

from tests.engine_torch import kernel_stand_ins
from tests.engine_torch.test_attention import SHAPES, WHOLE, attend
from workers.engine.attention import varlen
from workers.engine.attention.paged import Kernel, PagedAttention
from workers.engine.attention.reference import ReferenceAttention
from workers.engine.model.arrays import Buffer

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MIXED = [(5, 60, 99), (4, 39, 40), (3, 0, 17)]
DECODE = [(5, 99, 100), (4, 39, 40), (0, 0, 1)]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """flash.py over the stand-in for its library."""
    monkeypatch.setitem(sys.modules, "flash_attn", kernel_stand_ins)
    monkeypatch.delitem(sys.modules, "workers.engine.attention.flash", raising=False)
    return importlib.import_module("workers.engine.attention.flash")


class RoundedReference(ReferenceAttention):
    """The reference for queries of 16 bits, as the kernels take them: what is left is the rounding of results."""

    def attend(self, layer: int, queries: Buffer, out: Buffer) -> None:
        """See AttentionBackend."""
        super().attend(layer, Buffer(queries.tensor.to(BF16).float()), out)


def worst(name: str, kernel: Kernel) -> float:
    """The largest difference from the reference over a prefill, a mixed step and a decode step on one cache."""
    shape = dataclasses.replace(SHAPES[name], block_tokens=256, blocks=7)
    paged, reference = PagedAttention(shape, BF16, CPU, kernel), RoundedReference(shape, BF16)
    steps = [(attend(paged, shape, BF16, p), attend(reference, shape, BF16, p)) for p in (WHOLE, MIXED, DECODE)]
    return max(float((fast.float() - slow.float()).abs().max()) for fast, slow in steps)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("exact", [True, False])
def test_flash_attention_agrees_with_the_reference(flash: ModuleType, name: str, exact: bool) -> None:
    assert worst(name, flash.FlashKernel(exact)) <= 3e-2  # one rounding of values up to 8 to bf16 and back


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.soft_cap is None])
@pytest.mark.parametrize("exact", [True, False])
def test_varlen_attention_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch, name: str, exact: bool) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel_stand_ins.varlen_attn)
    assert worst(name, varlen.VarlenKernel(exact)) <= 3e-2  # one rounding of values up to 8 to bf16 and back


def test_the_exact_way_keeps_flash_attention_from_splitting(flash: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a decode step reaches the function that splits, or tells the other of single rows."""
    told: list[int] = []

    def varlen_func(*tensors: torch.Tensor, max_seqlen_q: int, **options: object) -> torch.Tensor:
        told.append(max_seqlen_q)
        return torch.zeros_like(tensors[0])

    monkeypatch.setattr(flash, "flash_attn_varlen_func", varlen_func)
    monkeypatch.setattr(flash, "flash_attn_with_kvcache", None)
    shape = dataclasses.replace(SHAPES["smollm2"], block_tokens=256, blocks=7)
    attend(PagedAttention(shape, BF16, CPU, flash.FlashKernel(exact=True)), shape, BF16, DECODE)
    assert told == [2]


def test_what_the_kernels_cannot_take_is_named(flash: ModuleType) -> None:
    """Sizes and types, and the soft cap that varlen_attn lacks. The installed torch's own signature passes."""
    fits = dataclasses.replace(SHAPES["smollm2"], block_tokens=256)
    for lacks in (flash.lacks, varlen.lacks):
        assert lacks(fits, BF16) is None
        assert "torch.float32" in lacks(fits, torch.float32)
        assert lacks(SHAPES["smollm2"], BF16) == "blocks of 16 tokens are not a multiple of 256"
    assert varlen.lacks(dataclasses.replace(fits, soft_cap=3.0), BF16) == "varlen_attn has no soft cap"
