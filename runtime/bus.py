"""What the pipeline needs of a message bus, as types; nats_bus.py is the real one.

Two ways to publish: publish is core (no confirmation, may be dropped under overload; readers see holes by index and fill them
from the log), publish_confirmed returns only when the broker has stored the message.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from runtime.clock import Clock


class BusError(Exception):
    """The broker could not do what was asked.

    BusError
    ├── BusUnavailable   no broker, or no answer in time: the same call may succeed later
    └── BusRefused       the broker said no (over a limit, no such stream): the same call will fail again
    """


class BusUnavailable(BusError):
    """No broker, or no answer in time."""


class BusRefused(BusError):
    """The broker refused the operation."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as a subscriber or log reader gets it. sequence is its place in the log, None for a live one."""

    subject: str
    data: bytes
    reply: str = ""
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """What a bucket holds under a key; revision grows with every change."""

    data: bytes
    revision: int


class Subscription(Protocol):
    """A live subscription."""

    async def unsubscribe(self) -> None:
        """Stops delivery; idempotent."""
        ...


class Delivery(Protocol):
    """One work item held under a lease."""

    data: bytes
    subject: str
    attempt: int  # from 1; the broker counts
    published_us: int  # broker time at which the item was stored
    sequence: int  # its place in the work stream

    async def ack(self) -> None:
        """Done, and the broker knows (confirmed)."""
        ...

    async def nak(self, delay_s: float) -> None:
        """Give back; the broker redelivers after delay_s."""
        ...

    async def beat(self) -> None:
        """Still working: the lease starts again."""
        ...


class Puller(Protocol):
    """Takes work from one durable consumer, only what was asked for."""

    @property
    def outstanding(self) -> int:
        """Items asked for that have neither come nor been declined."""
        ...

    async def ask(self, count: int) -> None:
        """Asks for count more items; each comes through the callback."""
        ...

    async def close(self) -> None:
        """Stops taking; items that still come are given back at once."""
        ...


OnMessage = Callable[[Message], Awaitable[None]]
OnDelivery = Callable[[Delivery], Awaitable[None]]


class Bus(Protocol):
    """The operations that stages and gateways use."""

    @property
    def clock(self) -> Clock:
        """The broker's time."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the connection stands at this moment."""
        ...

    @property
    def payload_bytes_max(self) -> int:
        """The largest message that the broker takes."""
        ...

    async def publish(self, subject: str, data: bytes) -> None:
        """Core publish: no confirmation."""
        ...

    async def publish_confirmed(self, subject: str, data: bytes, message_id: str) -> None:
        """Returns when stored (once for a message id within the window); BusUnavailable or BusRefused."""
        ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        """Live messages, in the order of each publisher."""
        ...

    async def pull(self, subject: str, consumer: str, on_delivery: OnDelivery, on_room: Callable[[], None]) -> Puller:
        """Takes work from the durable consumer of that subject; on_room is called when asked-for items will not come."""
        ...

    async def read_log(self, subject: str, after: int = 0) -> list[Message]:
        """What the captured log holds of one subject, in order, after that sequence.

        If the answer is finished and on file, the whole of it follows, without a sequence: the log may have lost any part of it
        (the broker died), or show its end as stale.
        """
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Calls back after every reconnect, once streams are checked: the logs may have lost things. Returns what stops it."""
        ...

    async def kv_create(self, bucket: str, key: str, data: bytes) -> bool:
        """Puts data under a key that nobody has put; of several at once one succeeds. BusUnavailable or BusRefused.

        False when the key is there, which an earlier try of this very call may have put (its confirmation was lost).
        """
        ...

    async def kv_update(self, bucket: str, key: str, data: bytes, revision: int) -> bool:
        """Puts data in place of that revision; False when it is no longer the newest. BusUnavailable or BusRefused."""
        ...

    async def kv_get(self, bucket: str, key: str) -> Entry | None:
        """What is under the key; None when there is nothing. BusUnavailable."""
        ...

    async def kv_note(self, bucket: str, key: str, data: bytes) -> None:
        """Puts data under a key over anything, without waiting for the broker: it may be lost."""
        ...

    async def mark_cancelled(self, request: str) -> None:
        """Leaves a mark that outlives any queue wait, and tells everybody now."""
        ...

    async def is_cancelled(self, request: str) -> bool:
        """Whether the mark is there."""
        ...

    async def backlog(self, subject: str, consumer: str) -> int | None:
        """Work items waiting or held (pending + ack pending); None when nobody ever consumed them."""
        ...

    async def flush(self) -> None:
        """Returns when the broker has everything that was published."""
        ...
