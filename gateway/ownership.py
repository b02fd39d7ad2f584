"""The record of a request that every gateway can read: whose it is, and how it was asked.

It is written once, before the work is published, and outlives everything that could be asked about the request. To
anybody but the tenant in it the request does not exist.
"""

from dataclasses import asdict, dataclass
from typing import Literal, Self

from runtime.bus import Bus
from schemas import codec, subjects
from schemas.codec import CodecError

Kind = Literal["chat", "completion"]
OnDisconnect = Literal["cancel", "keep"]


@dataclass(frozen=True, slots=True)
class Ownership:
    """One accepted request. Instants are microseconds of the broker's time; fingerprint is the digest of its body."""

    request: str
    tenant: str
    model: str
    kind: Kind
    created_us: int
    deadline_us: int
    fingerprint: str
    on_disconnect: OnDisconnect
    timings: bool

    def encode(self) -> bytes:
        """As bytes for the broker."""
        return codec.pack(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The record in these bytes; CodecError when they hold none."""
        try:
            return cls(**codec.unpack(data))
        except TypeError as error:
            raise CodecError(f"not an ownership record: {error}") from error


async def write(bus: Bus, ownership: Ownership) -> bool:
    """Stores the record; False when it is there already. BusUnavailable or BusRefused."""
    return await bus.kv_create(subjects.REQUEST_BUCKET, ownership.request, ownership.encode())


async def read(bus: Bus, request: str) -> Ownership | None:
    """The record of a request; None when nobody asked for it, or too long ago. BusUnavailable."""
    if not subjects.is_request_id(request):
        return None
    entry = await bus.kv_get(subjects.REQUEST_BUCKET, request)
    return Ownership.decode(entry.data) if entry is not None else None
