"""A worker's sign of life: told every second, and at once when somebody calls the roll."""

import asyncio
from collections.abc import Callable

import structlog

from runtime.bus import Bus, BusError, Message
from schemas import limits, subjects
from schemas.presence import Presence

log = structlog.get_logger()


class Beacon:
    """Publishes what snapshot() says. A worker that cannot make its snapshot (its loop hangs) falls silent: that is meant."""

    def __init__(self, bus: Bus, snapshot: Callable[[], Presence]) -> None:
        self._bus = bus
        self._snapshot = snapshot
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers roll calls and begins to tell."""
        await self._bus.subscribe(subjects.ROLLCALL, self._on_rollcall)
        self._task = asyncio.create_task(self._tell_for_ever(), name="beacon")

    async def tell(self) -> None:
        """Says it once, now."""
        presence = self._snapshot()
        try:
            await self._bus.publish(subjects.alive(presence.stage, presence.worker), presence.encode())
        except BusError as error:
            log.debug("presence", error=str(error))

    async def _on_rollcall(self, _: Message) -> None:
        await self.tell()

    async def _tell_for_ever(self) -> None:
        while True:
            await self.tell()
            await asyncio.sleep(limits.PRESENCE_S)

    async def stop(self) -> None:
        """Falls silent, saying so first."""
        if self._task:
            self._task.cancel()
        await self.tell()
