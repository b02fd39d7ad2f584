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
    """use_threads sets the number of threads of the kernels that follow."""

    operations: RowOperations
    attention: AttentionBackend
    use_threads: Callable[[int], None]


def choose_backends(config: ModelConfig, shape: CacheShape, head: torch.Tensor, threads: int) -> Backends:
    """The kernels; the reference, with a line in the log that says why, when numba is missing or sizes do not fit."""
    try:
        return _kernels(config, shape, head, threads)
    except _Unfit as error:
        reason = str(error)
    except ImportError as error:
        reason = f"numba cannot be imported ({error})"
    log.warning("attention_fallback", reason=reason, backend="reference", exact=False)
    return Backends(ReferenceRowOperations(config, head), ReferenceAttention(shape, head.dtype), lambda count: None)


class _Unfit(Exception):
    """The kernels cannot take these sizes."""


def _kernels(config: ModelConfig, shape: CacheShape, head: torch.Tensor, threads: int) -> Backends:
    import numba

    from workers.engine.attention import cpu
    from workers.engine.model import kernel_operations

    lacks = kernel_operations.lacks(config) or cpu.lacks(shape)
    if lacks is not None:
        raise _Unfit(lacks)
    threads_max = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    operations = kernel_operations.KernelRowOperations(config, head, min(threads, threads_max))
    attention = cpu.CpuAttention(shape, head.dtype)
    return Backends(operations, attention, lambda count: numba.set_num_threads(min(count, threads_max)))
