"""A step's numbers on the device: uploaded afresh, or copied into tensors that stay where they are for a captured graph."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.attention.metadata import AttentionMetadata, build
from workers.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Batch and AttentionMetadata as tensors: int32 where the kernels want it, int64 where torch indexes with it."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    key_counts: torch.Tensor
    tables: torch.Tensor
    queries_max: int
    keys_max: int

    @property
    def decode(self) -> bool:
        """Whether every sequence has one row."""
        return self.queries_max == 1


def upload(batch: Batch, device: torch.device) -> StepTensors:
    """The batch's numbers in new tensors."""
    metadata = build(batch)
    return _made(batch, metadata, device)


def steady(batch: Batch, keys_max: int, device: torch.device) -> StepTensors:
    """The same for a graph: keys_max bounds the sequences of every step that it will see."""
    return _made(batch, build(batch, keys_max), device)


def refill(tensors: StepTensors, batch: Batch) -> None:
    """Puts another batch of the same sizes into the tensors, where they lie."""
    metadata = build(batch, tensors.keys_max)
    assert metadata.queries_max == tensors.queries_max, f"{metadata.queries_max} rows a sequence, not {tensors.queries_max}"
    for name, array in _arrays(batch, metadata).items():
        held: torch.Tensor = getattr(tensors, name)
        assert held.shape == array.shape, f"{name}: {array.shape} into {tuple(held.shape)}"
        held.copy_(torch.from_numpy(array))


def _made(batch: Batch, metadata: AttentionMetadata, device: torch.device) -> StepTensors:
    placed = {name: torch.from_numpy(array).to(device, copy=True) for name, array in _arrays(batch, metadata).items()}
    return StepTensors(**placed, queries_max=metadata.queries_max, keys_max=metadata.keys_max)


def _arrays(batch: Batch, metadata: AttentionMetadata) -> dict[str, npt.NDArray[np.signedinteger]]:
    return {
        "tokens": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.slots,
        "cu_queries": metadata.cu_queries,
        "cu_keys": metadata.cu_keys,
        "key_counts": metadata.key_counts,
        "tables": metadata.tables,
    }
