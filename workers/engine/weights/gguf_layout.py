"""The bytes of a GGUF file, read in one pass: metadata values and where each tensor lies.

Follows the GGUF specification (versions 2 and 3, little endian). Why not gguf.GGUFReader: it makes an array of every string of
the vocabulary, 2.0 s of a start that takes 3 (2-core Xeon, December 2026); this takes 0.1 s. A test compares the two.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from workers.engine.weights.errors import DamagedFile, UnsupportedQuantisation

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_DIMENSIONS_MAX = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SMALLEST_VALUE = {number: struct.calcsize(form) for number, form in _SCALARS.items()} | {_STRING: 8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored: shape is rows first (numpy's order); data is bytes, one row of blocks a row."""

    name: str
    shape: tuple[int, ...]
    form: gguf.GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole file: metadata by key, tensors by name. Tensor data stays in the mapped file until it is read."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]


def read_layout(path: Path) -> Layout:
    """Maps the file and reads its header. DamagedFile or UnsupportedQuantisation name what is wrong."""
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise DamagedFile(path, str(error)) from error
    cursor = _Cursor(path, mapped)
    tensor_count, value_count = cursor.preamble()
    metadata = {cursor.string(): cursor.value() for _ in range(value_count)}
    entries = [cursor.tensor_entry() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise DamagedFile(path, f"alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {entry.name: _locate(path, mapped, start, entry) for entry in entries}
    if len(tensors) != len(entries):
        raise DamagedFile(path, "two tensors have one name")
    return Layout(path, metadata, tensors)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    form: int
    offset: int


def _locate(path: Path, mapped: npt.NDArray[np.uint8], start: int, entry: _Entry) -> StoredTensor:
    try:
        form = gguf.GGMLQuantizationType(entry.form)
    except ValueError as error:
        raise UnsupportedQuantisation(path, entry.name, f"form {entry.form}") from error
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[form]
    if entry.shape[-1] % block_values:
        raise DamagedFile(path, f"rows of {entry.name} hold {entry.shape[-1]} values, not whole blocks of {block_values}")
    row_bytes = entry.shape[-1] // block_values * block_bytes
    size = prod(entry.shape[:-1]) * row_bytes
    begin = start + entry.offset
    if begin + size > mapped.size:
        raise DamagedFile(path, f"tensor {entry.name} ends at byte {begin + size}, the file at byte {mapped.size}")
    data = mapped[begin : begin + size].reshape(*entry.shape[:-1], row_bytes)
    return StoredTensor(entry.name, entry.shape, form, data)


class _Cursor:
    """Reads values one after another; every read checks that the bytes are there."""

    def __init__(self, path: Path, mapped: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._bytes = mapped.data
        self.at = 0

    def preamble(self) -> tuple[int, int]:
        """Checks magic and version; the counts of tensors and of metadata values."""
        if bytes(self._take(4)) != _MAGIC:
            raise DamagedFile(self._path, "it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise DamagedFile(self._path, f"version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are read")
        return int(self._scalar("Q")), int(self._scalar("Q"))

    def string(self) -> str:
        """Length in 8 bytes, then UTF-8."""
        return bytes(self._take(int(self._scalar("Q")))).decode("utf-8", errors="replace")

    def value(self) -> Value:
        """A type in 4 bytes, then the value."""
        kind = int(self._scalar("I"))
        return self._array() if kind == _ARRAY else self._single(kind)

    def tensor_entry(self) -> _Entry:
        """Name, dimensions (columns first in the file), form and offset of one tensor."""
        name = self.string()
        dimensions = int(self._scalar("I"))
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise DamagedFile(self._path, f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(int(self._scalar("Q")) for _ in range(dimensions))
        return _Entry(name, shape[::-1], int(self._scalar("I")), int(self._scalar("Q")))

    def _array(self) -> list[Scalar]:
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if kind not in _SMALLEST_VALUE:
            raise DamagedFile(self._path, f"an array of values of type {kind} at byte {self.at}")
        self._check(count * _SMALLEST_VALUE[kind])
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        form = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form))))

    def _single(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise DamagedFile(self._path, f"a value of type {kind} at byte {self.at}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, form: str) -> bool | int | float:
        number: bool | int | float = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]
        return number

    def _take(self, count: int) -> memoryview:
        self._check(count)
        self.at += count
        return self._bytes[self.at - count : self.at]

    def _check(self, count: int) -> None:
        if self.at + count > len(self._bytes):
            raise DamagedFile(self._path, f"it ends at byte {len(self._bytes)}, inside the header")
