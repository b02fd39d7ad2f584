"""What a process holds of a MemoryBus: its subscriptions, its pullers, and the work items that came to it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.bus import Message, OnDelivery, OnMessage
from runtime.memory_broker import Item, Pull
from runtime.patience import CONFIRM_TIMEOUT_S, PULL_BEAT_S, PULL_EXPIRES_S

if TYPE_CHECKING:
    from runtime.memory_bus import MemoryBus


@dataclass(slots=True, eq=False)
class MemorySubscription:
    """A live subscription; its messages wait here for the one before to be handled."""

    bus: "MemoryBus"
    pattern: str
    on_message: OnMessage
    waiting: deque[Message]
    pump: asyncio.Task[None] | None = None
    closed: bool = False

    def arrive(self, message: Message) -> None:
        """One message at this end of the wire."""
        if self.closed:
            return
        self.waiting.append(message)
        if self.pump is None or self.pump.done():
            self.pump = self.bus.spawn(self._pump())

    async def _pump(self) -> None:
        while self.waiting:
            await self.on_message(self.waiting.popleft())

    async def unsubscribe(self) -> None:
        """Stops delivery; idempotent."""
        self.closed = True
        self.waiting.clear()
        self.bus.unsubscribe(self)


class MemoryDelivery:
    """One work item held under its lease."""

    def __init__(self, bus: "MemoryBus", item: Item, attempt: int, consumer: str) -> None:
        self._bus = bus
        self._consumer = consumer
        self.data = item.data
        self.subject = item.subject
        self.attempt = attempt
        self.published_us = item.stored_us
        self.sequence = item.sequence

    async def ack(self) -> None:
        """Acknowledges and waits for the broker's word; BusUnavailable without it (the item may come again)."""
        broker, sender = self._bus.broker, self._bus.name
        await self._bus.request(
            "ack", self.subject, lambda: broker.ack(self._consumer, self.sequence, self.attempt, sender), CONFIRM_TIMEOUT_S
        )

    async def nak(self, delay_s: float) -> None:
        """Gives the item back, to be delivered again after delay_s."""
        broker, sender, delay = self._bus.broker, self._bus.name, max(delay_s, 0.001)
        self._bus.send("nak", self.subject, lambda: broker.nak(self._consumer, self.sequence, self.attempt, delay, sender))

    async def beat(self) -> None:
        """Renews the lease."""
        broker = self._bus.broker
        self._bus.send("beat", self.subject, lambda: broker.renew(self._consumer, self.sequence))


class MemoryPuller:
    """Pull requests to one durable consumer. One that the broker lost is found by its silence."""

    def __init__(self, bus: "MemoryBus", consumer: str, on_delivery: OnDelivery, on_room: Callable[[], None]) -> None:
        self._bus = bus
        self._consumer = consumer
        self._on_delivery = on_delivery
        self._on_room = on_room
        self._pulls: dict[int, int] = {}  # pull -> items still to come, oldest first
        self._arrived: deque[MemoryDelivery] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Items asked for that have neither come nor been declined."""
        return sum(self._pulls.values())

    async def ask(self, count: int) -> None:
        """Asks for count more items."""
        if self._closed or count <= 0:
            return
        number = self._bus.broker.next_pull()
        self._pulls[number] = count
        pull = Pull(number, count, self._bus.name, self._item, lambda: self._declined(number), lambda: self._bus.connected)
        broker, loop = self._bus.broker, self._bus.loop
        self._bus.send("pull", self._consumer, lambda: broker.pull(self._consumer, pull, PULL_EXPIRES_S))
        loop.call_later(PULL_EXPIRES_S + 3 * PULL_BEAT_S, self._ended, number)

    async def close(self) -> None:
        """Stops taking; items on their way are given back as they come."""
        self._closed = True
        for number in self._pulls:
            self._bus.broker.forget_pull(self._consumer, number)
        self._pulls.clear()

    def forget(self) -> None:
        """Declares every outstanding pull dead, so that the owner asks again."""
        self._pulls.clear()
        self._on_room()

    def _item(self, pull: int, item: Item, attempt: int) -> None:
        """The broker gives an item: it goes on the wire."""
        delivery = MemoryDelivery(self._bus, item, attempt, self._consumer)
        self._bus.receive("item", item.subject, lambda: self._arrive(pull, delivery))

    def _declined(self, pull: int) -> None:
        self._bus.receive("decline", self._consumer, lambda: self._ended(pull))

    def _arrive(self, pull: int, delivery: MemoryDelivery) -> None:
        if pull in self._pulls:
            self._pulls[pull] -= 1
            if self._pulls[pull] == 0:
                del self._pulls[pull]
        self._arrived.append(delivery)
        if self._pump is None or self._pump.done():
            self._pump = self._bus.spawn(self._deliver())

    async def _deliver(self) -> None:
        while self._arrived:
            delivery = self._arrived.popleft()
            await (delivery.nak(0.0) if self._closed else self._on_delivery(delivery))

    def _ended(self, pull: int) -> None:
        if self._pulls.pop(pull, None) is not None:
            self._on_room()
