"""Which code computes the rows' operations and attention on this machine: kernels, or plain torch where they cannot run."""

from dataclasses import dataclass

import structlog
import torch

from workers.engine.attention.protocol import AttentionBackend, CacheShape
from workers.engine.attention.reference import ReferenceAttention
from workers.engine.model.config import ModelConfig
from workers.engine.model.row_operations import RowOperations
from workers.engine.model.row_reference import ReferenceRowOperations

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Backends:
    """Both compute in the precision that they were made for."""

    operations: RowOperations
    attention: AttentionBackend


def choose_backends(config: ModelConfig, shape: CacheShape, head: torch.Tensor, threads: int) -> Backends:
    """The kernels; the reference, with a line in the log that says why, when numba is missing or sizes do not fit."""
    try:
        return _kernels(config, shape, head, threads)
    except _Unfit as error:
        reason = str(error)
    except ImportError as error:
        reason = f"numba cannot be imported ({error})"
    log.warning("attention_fallback", reason=reason, backend="reference", exact=False)
    return Backends(ReferenceRowOperations(config, head), ReferenceAttention(shape, head.dtype))


class _Unfit(Exception):
    """The kernels cannot take these sizes."""


def _kernels(config: ModelConfig, shape: CacheShape, head: torch.Tensor, threads: int) -> Backends:
    from workers.engine.attention.cpu import CpuAttention
    from workers.engine.attention.cpu import lacks as attention_lacks
    from workers.engine.model.kernel_operations import KernelRowOperations
    from workers.engine.model.kernel_operations import lacks as operations_lack

    lacks = operations_lack(config) or attention_lacks(shape)
    if lacks is not None:
        raise _Unfit(lacks)
    operations = KernelRowOperations(config, head, threads)
    return Backends(operations, CpuAttention(shape, head.dtype, threads))
