"""Stored tensors to float32. The forms of the default model have a path of their own; gguf knows the rest.

Q4_1: blocks of 32 values, 20 bytes: scale and minimum (float16), then 16 bytes; low halves are values 0-15, high halves 16-31.
Q8_0: blocks of 32 values, 34 bytes: scale (float16), then 32 signed bytes. (ggml-common.h, block_q4_1 and block_q8_0.)
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from workers.engine.weights.errors import UnsupportedQuantisation
from workers.engine.weights.gguf_layout import StoredTensor

Floats = npt.NDArray[np.float32]

_FORM = gguf.GGMLQuantizationType


def dequantise(path: Path, tensor: StoredTensor) -> Floats:
    """float32 of tensor.shape. UnsupportedQuantisation when the form is not read."""
    own = _OWN.get(tensor.form)
    if own is not None:
        return own(tensor.data).reshape(tensor.shape)
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.form)
    except NotImplementedError as error:
        raise UnsupportedQuantisation(path, tensor.name, tensor.form.name) from error
    return np.ascontiguousarray(values.reshape(tensor.shape), dtype=np.float32)


def _q4_1(data: npt.NDArray[np.uint8]) -> Floats:
    blocks = data.reshape(-1, 20)
    scale, minimum = _halves(blocks[:, 0:2]), _halves(blocks[:, 2:4])
    packed = blocks[:, 4:]
    values = np.empty((len(blocks), 2, 16), np.float32)
    np.multiply(packed & 15, scale, out=values[:, 0], dtype=np.float32)
    np.multiply(packed >> 4, scale, out=values[:, 1], dtype=np.float32)
    values += minimum[:, :, None]
    return values


def _q8_0(data: npt.NDArray[np.uint8]) -> Floats:
    blocks = data.reshape(-1, 34)
    return np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks[:, 0:2]), dtype=np.float32)


def _float32(data: npt.NDArray[np.uint8]) -> Floats:
    return np.ascontiguousarray(data).view(np.float32).copy()


def _halves(columns: npt.NDArray[np.uint8]) -> Floats:
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


_OWN: dict[gguf.GGMLQuantizationType, Callable[[npt.NDArray[np.uint8]], Floats]] = {
    _FORM.Q4_1: _q4_1,
    _FORM.Q8_0: _q8_0,
    _FORM.F32: _float32,
}
