"""What lies between a process and the memory broker: a place for faults. A test derives its own Network and does harm there."""

import asyncio
import contextvars
from collections.abc import Callable


class Network:
    """What lies between one process and the broker. This one is perfect and takes no time."""

    def delay_s(self, what: str, subject: str) -> float:
        """Seconds that a message is on its way. Messages of one direction never overtake each other by this alone."""
        return 0.0

    def loses(self, what: str, subject: str) -> bool:
        """Whether a message to the broker (publish, confirm, ack, nak, beat, pull, read, ...) never comes there."""
        return False

    def loses_answer(self, what: str, subject: str) -> bool:
        """Whether the broker does what it was asked for, and its word on it never comes back."""
        return False

    def copies_s(self, subject: str) -> tuple[float, ...]:
        """Extra seconds of each copy of a live message: () loses it, (0, 0) doubles it, (0.1,) lets others overtake it."""
        return (0.0,)

    def sent(self, what: str, subject: str) -> None:
        """Called after a message has left the process: a process may die here, between its word and the answer."""

    def sending(self, what: str, subject: str) -> None:
        """Called before a message leaves the process: a process may die here, before its word."""


class Wire:
    """One direction of a connection: first in, first out."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        self._loop = loop
        self._context = context
        self._last = 0.0

    def carry(self, delay_s: float, arrive: Callable[[], None]) -> None:
        """Calls arrive() after delay_s, and after everything that was carried before."""
        self._last = max(self._loop.time() + delay_s, self._last + 1e-6)
        self._loop.call_at(self._last, arrive, context=self._context)
