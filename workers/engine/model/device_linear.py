"""Linear layers on a torch device, and how they are made to give a row the same bits in every step.

A device's library picks its kernel by the number of rows, as oneDNN does (see linear.py): here too calls are padded to fixed
sizes, and the sizes are compared at load on inputs that show a changed order of sums. Without that, rows are not padded.
"""

from dataclasses import dataclass, field

import torch

from workers.engine.model.linear import Apply, Scheme, Shape, is_exact

_SIZES = ((16, 32, 64, 128, 256), (64, 256), (256,), (64,), (16,))  # of the fixed way; the first that proves exact
_ROWS_FREE = 1 << 20  # more than any step has: one call


@dataclass(frozen=True, slots=True)
class DeviceScheme(Scheme):
    """See Scheme. device: where the weights lie. free: rows are not padded, and nothing is promised."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    free: bool = False

    @property
    def rows_max(self) -> int:
        """Most rows of one call."""
        return _ROWS_FREE if self.free else self.sizes[-1]

    def padded(self, rows: int) -> int:
        """See Scheme."""
        return rows if self.free else Scheme.padded(self, rows)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Scheme."""
        return tensor.to(self.device)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Apply:
        """The layer of one weight, [outputs, inputs], and its bias, moved to the device."""
        placed, added = self.place(weight), None if bias is None else self.place(bias)
        return lambda rows: torch.nn.functional.linear(rows, placed, added)


def choose_device_scheme(shapes: set[Shape], dtype: torch.dtype, device: torch.device, deterministic: bool) -> DeviceScheme:
    """The fixed sizes that prove exact for layers of these shapes on this device; free, and not exact, when not asked for."""
    if deterministic:
        for sizes in _SIZES:
            scheme = DeviceScheme(False, None, sizes, device=device)
            if all(is_exact(scheme, shape, dtype, (torch.get_num_threads(),)) for shape in shapes):
                return scheme
        return DeviceScheme(False, None, _SIZES[-1], exact=False, device=device)
    return DeviceScheme(False, None, _SIZES[0], exact=False, device=device, free=True)
