"""Which code computes the rows' operations and attention on this machine: kernels, or plain torch where they cannot run."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from workers.engine.attention.gather import GatherKernel
from workers.engine.attention.paged import Kernel, PagedAttention
from workers.engine.attention.protocol import AttentionBackend, CacheShape
from workers.engine.attention.reference import ReferenceAttention
from workers.engine.model.config import ModelConfig
from workers.engine.model.device_operations import DeviceRowOperations
from workers.engine.model.row_operations import RowOperations
from workers.engine.model.row_reference import ReferenceRowOperations

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Backends:
    """limit_threads: what follows on this thread runs on at most so many threads."""

    operations: RowOperations
    attention: AttentionBackend
    limit_threads: Callable[[int], None]


def device_backends(
    config: ModelConfig, shape: CacheShape, head: torch.Tensor, exact: bool, rows_fixed: int | None
) -> Backends:
    """Plain torch on the head's device, with the fastest attention kernel that it has. exact: what is asked of the kernel."""
    kernel = _choose_kernel(shape, head, exact)
    attention = PagedAttention(shape, head.dtype, head.device, kernel)
    return Backends(DeviceRowOperations(config, head, attention, rows_fixed), attention, lambda count: None)


def _choose_kernel(shape: CacheShape, head: torch.Tensor, exact: bool) -> Kernel:
    """flash-attn, torch's varlen_attn, or plain torch: the first that is there and takes these sizes. Logs which, and why."""
    lacking: dict[str, str] = {}
    for name, make in (("flash-attn", _flash), ("torch varlen_attn", _varlen)):
        if head.device.type != "cuda":
            lacking[name] = f"{name} does not run on {head.device}"
            continue
        try:
            kernel = make(shape, head.dtype, exact)
        except (_Unfit, ImportError) as error:
            lacking[name] = str(error)
            continue
        return _told(kernel, head.device, "; ".join(lacking.values()) or "the fastest that there is")
    return _told(GatherKernel(), head.device, "; ".join(lacking.values()))


def _told(kernel: Kernel, device: torch.device, reason: str) -> Kernel:
    log.info("attention_backend", backend=kernel.name, device=str(device), reason=reason, exact=kernel.exact)
    return kernel


def _flash(shape: CacheShape, dtype: torch.dtype, exact: bool) -> Kernel:
    from workers.engine.attention.flash import FlashKernel, lacks

    if (lack := lacks(shape, dtype)) is not None:
        raise _Unfit(lack)
    return FlashKernel(exact)


def _varlen(shape: CacheShape, dtype: torch.dtype, exact: bool) -> Kernel:
    from workers.engine.attention.varlen import VarlenKernel, lacks

    if (lack := lacks(shape, dtype)) is not None:
        raise _Unfit(lack)
    return VarlenKernel(exact)


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
