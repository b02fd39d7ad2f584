"""Torch tensors as numpy arrays over the same memory; bfloat16, which numpy lacks, as its bits in uint16."""

import numpy as np
import numpy.typing as npt
import torch


def array_of(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory, of its shape: float32, or uint16 for bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
