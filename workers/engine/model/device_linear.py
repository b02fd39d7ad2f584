"""Linear layers on a torch device, and how they are made to give a row the same bits in every step.

A device's library picks its kernel by the number of rows, as oneDNN does (see linear.py): here too calls are padded to fixed
sizes, and the sizes are compared at load on inputs that show a changed order of sums. Without that, rows are not padded.
"""

from dataclasses import dataclass, field

import torch

from workers.engine.model.linear import Apply, Scheme

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
        if self.free:
            return rows
        whole, rest = divmod(rows, self.sizes[-1])
        return whole * self.sizes[-1] + (self.size_for(rest) if rest else 0)

    @property
    def rows_at_first(self) -> int:
        """Rows that buffers are made for at first."""
        return self.sizes[-1]

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Scheme."""
        return tensor.to(self.device)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Apply:
        """The layer of one weight, [outputs, inputs], and its bias, moved to the device."""
        placed, added = self.place(weight), None if bias is None else self.place(bias)
        return lambda rows: torch.nn.functional.linear(rows, placed, added)


def choose_device_scheme(
    shapes: set[tuple[int, int]], dtype: torch.dtype, device: torch.device, deterministic: bool
) -> DeviceScheme:
    """The fixed sizes that prove exact for weights of these shapes on this device; free, and not exact, when not asked for."""
    if deterministic:
        for sizes in _SIZES:
            scheme = DeviceScheme(False, None, sizes, device=device)
            if all(_is_exact(scheme, outputs, inputs, dtype) for outputs, inputs in shapes):
                return scheme
        return DeviceScheme(False, None, _SIZES[-1], exact=False, device=device)
    return DeviceScheme(False, None, _SIZES[0], exact=False, device=device, free=True)


def _is_exact(scheme: DeviceScheme, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether calls of every size give a row's bits, wherever the row is, on inputs that cancel (see linear.py)."""
    generator = torch.Generator().manual_seed(outputs * 31 + inputs)
    half = torch.randn(outputs, inputs // 2, generator=generator)
    apply = scheme.pack(torch.cat([half, half, torch.zeros(outputs, inputs % 2)], 1).to(dtype))
    part = torch.randn(scheme.rows_max, inputs // 2, generator=generator)
    rows = scheme.place(torch.cat([part, -part, torch.zeros(len(part), inputs % 2)], 1).to(dtype))
    whole = apply(rows)
    turned, turned_whole = rows.roll(1, 0), whole.roll(1, 0)
    return all(
        torch.equal(apply(rows[:size]), whole[:size])
        and torch.equal(apply(rows[-size:]), whole[-size:])
        and torch.equal(apply(turned[:size]), turned_whole[:size])
        for size in scheme.sizes
    )
