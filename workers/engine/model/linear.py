"""Linear layers whose result for a row does not depend on how many rows there are.

oneDNN picks its kernel, and with it the order of a row's sums, by the number of rows: on an AMX machine with torch 2.13 weights
packed without a hint change order between 32 and 33 rows, packed for one row only above 128 (K = 1536) or never (K = 576). So
rows are padded to a few sizes, more rows than the largest go in several calls, and at load each size is compared with the
others on data made for it: inputs that cancel, so that a result is nothing but the rounding of its sums and another order
shows in nearly every value. A scheme that passes is exact for all the calls that it can make; the first that passes is used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Sizes that calls are padded to. Few, since oneDNN compiles a kernel for each (0.5 ms, December 2026), and all are compared.
_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)

Apply = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, int, bool]  # of a layer: outputs, inputs, whether it has a bias


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are packed (packed_for: oneDNN's hint, None for none) and the row counts that calls are padded to."""

    packed: bool
    packed_for: int | None
    sizes: tuple[int, ...]
    exact: bool = True

    @property
    def rows_max(self) -> int:
        """Most rows of one call."""
        return self.sizes[-1]

    @property
    def rows_at_first(self) -> int:
        """Rows that buffers are made for at first."""
        return self.sizes[-1]

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where the model computes."""
        return tensor

    def size_for(self, rows: int) -> int:
        """The smallest size that holds so many rows."""
        return next(size for size in self.sizes if size >= rows)

    def padded(self, rows: int) -> int:
        """Rows that an input needs so that each call, of rows_max rows and the last of the rest, has one of the sizes."""
        whole, rest = divmod(rows, self.rows_max)
        return whole * self.rows_max + (self.size_for(rest) if rest else 0)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Apply:
        """The layer of one weight, [outputs, inputs]. The bias is added to finished sums: it changes no order."""
        if not self.packed:
            return lambda rows: torch.nn.functional.linear(rows, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.packed_for)
        product = torch.ops.mkldnn._linear_pointwise.default

        def apply(rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = product(rows, packed, bias, "none", [], "")
            return result

        return apply


class Linear:
    """One layer. Inputs are padded by the caller to [scheme.padded(rows), inputs], with any content."""

    def __init__(self, weight: torch.Tensor, scheme: Scheme, bias: torch.Tensor | None = None) -> None:
        self._apply = scheme.pack(weight, bias)
        self._scheme = scheme

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[scheme.padded(rows), outputs], of the inputs' dtype."""
        most = self._scheme.rows_max
        if len(inputs) <= most:
            return self._apply(inputs)
        return torch.cat([self._apply(inputs[begin : begin + most]) for begin in range(0, len(inputs), most)])


def choose_scheme(shapes: set[Shape], dtype: torch.dtype, threads: tuple[int, ...]) -> Scheme:
    """The fastest scheme that is exact for layers of these shapes on this machine, at these thread counts.

    When none is: plain layers, and exact is false.
    """
    for scheme in _candidates(dtype):
        if all(is_exact(scheme, shape, dtype, threads) for shape in shapes):
            return scheme
    return Scheme(packed=False, packed_for=None, sizes=_SIZES, exact=False)


def has_onednn() -> bool:
    """Whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _candidates(dtype: torch.dtype) -> list[Scheme]:
    if not (has_onednn() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return []
    hints = (1, None) if dtype == torch.bfloat16 else (None, 1)
    free = [Scheme(True, hint, _sizes(1, most)) for most in (128, 64) for hint in hints]
    from_two = [Scheme(True, hint, _sizes(2, most)) for most in (128, 64, 32) for hint in hints]
    return [*free, *from_two, *(Scheme(True, hint, (only,)) for only in (32, 8) for hint in hints)]


def _sizes(least: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in _SIZES if least <= size <= most)


def is_exact(scheme: Scheme, shape: Shape, dtype: torch.dtype, threads: tuple[int, ...]) -> bool:
    """Whether calls of every size of the scheme give a row's bits, on inputs that cancel. A bias is 0 here, to hide nothing."""
    outputs, inputs, biased = shape
    generator = torch.Generator().manual_seed(outputs * 31 + inputs)
    half = torch.randn(outputs, inputs // 2, generator=generator)
    weight = torch.cat([half, half, torch.zeros(outputs, inputs % 2)], 1).to(dtype)
    part = torch.randn(scheme.rows_max, inputs // 2, generator=generator)
    rows = scheme.place(torch.cat([part, -part, torch.zeros(scheme.rows_max, inputs % 2)], 1).to(dtype))
    try:
        apply = scheme.pack(weight, torch.zeros(outputs, dtype=dtype) if biased else None)
        whole = apply(rows)
        return all(_agrees(apply, rows, whole, size, count) for count in threads for size in scheme.sizes)
    except (RuntimeError, NotImplementedError):  # this build cannot pack this way
        return False


def _agrees(apply: Apply, rows: torch.Tensor, whole: torch.Tensor, size: int, threads: int) -> bool:
    """Whether calls of this size on so many threads give the rows' bits, wherever among the rows they are."""
    torch.set_num_threads(threads)
    last = len(rows) - size
    same = torch.equal(apply(rows[:size]), whole[:size]) and torch.equal(apply(rows[last:]), whole[last:])
    return same and torch.equal(apply(rows.roll(1, 0)[:size]), whole.roll(1, 0)[:size])
