"""Torch tensors and numpy arrays over the same memory: torch multiplies in it, kernels read and write it."""

import numpy as np
import numpy.typing as npt
import torch


def flat_of(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """A contiguous tensor's memory in one dimension: float32, or uint16 holding bfloat16 bits, which numpy lacks."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy().reshape(-1)


_ELSEWHERE = np.empty(0, np.float32)


class Buffer:
    """A contiguous tensor, and its memory as kernels take it. Made once where it can be: the view takes microseconds.

    flat is empty for a tensor on a device, which no kernel of ours reads.
    """

    __slots__ = ("flat", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.flat = flat_of(tensor) if tensor.device.type == "cpu" else _ELSEWHERE
