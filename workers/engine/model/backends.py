"""Which code computes the rows' operations and attention on this machine: kernels, or plain torch where they cannot run."""

from collections.abc import Callable
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
    """limit_threads: what follows on this thread runs on at most so many threads."""

    operations: RowOperations
    attention: AttentionBackend
    limit_threads: Callable[[int], None]


def choose_backends(config: ModelConfig, shape: CacheShape, head: torch.Tensor) -> Backends:
    """The kernels; the reference, with a line in the log that says why, when numba is missing or sizes do not fit."""
    try:
        return _kernels(config, shape, head)
    except _Unfit as error:
        reason = str(error)
    except ImportError as error:
        reason = f"numba cannot be imported ({error})"
    log.warning("attention_fallback", reason=reason, backend="reference", exact=False)
    return Backends(ReferenceRowOperations(config, head), ReferenceAttention(shape, head.dtype), lambda count: None)


class _Unfit(Exception):
    """The kernels cannot take these sizes."""


def _kernels(config: ModelConfig, shape: CacheShape, head: torch.Tensor) -> Backends:
    from workers.engine.attention.cpu import CpuAttention
    from workers.engine.attention.cpu import lacks as attention_lacks
    from workers.engine.model import kernel_threads
    from workers.engine.model.kernel_operations import KernelRowOperations
    from workers.engine.model.kernel_operations import lacks as operations_lack

    lacks = operations_lack(config) or attention_lacks(shape)
    if lacks is not None:
        raise _Unfit(lacks)
    operations = KernelRowOperations(config, head)
    return Backends(operations, CpuAttention(shape, head.dtype), kernel_threads.limit)
