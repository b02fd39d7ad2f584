"""The named faults, as a network that does harm and as things that happen to processes and to the broker."""

import asyncio
import random

from runtime.memory_broker import MemoryBroker
from runtime.memory_bus import MemoryBus
from runtime.memory_network import Network
from tests.simulation.plan import Lossy
from tests.simulation.virtual_time import Process

# What may be lost on the way to the broker. A token that is published is not: a publisher on a connection that stands
# either reaches the log, or says it again after the reconnect.
LOSABLE = ("confirm", "ack", "nak", "beat", "pull", "read", "get", "put", "mark")


class FaultyNetwork(Network):
    """Harms what one process sends and gets. When calm is set it does no more harm."""

    def __init__(self, lossy: Lossy, process: Process, rng: random.Random) -> None:
        self.calm = False
        self._lossy = lossy
        self._process = process
        self._rng = rng

    def _happens(self, chance: float) -> bool:
        return chance > 0 and not self.calm and self._rng.random() < chance

    def delay_s(self, what: str, subject: str) -> float:
        """delay: a message, and all behind it, takes long."""
        if self._happens(self._lossy.delay):
            return self._rng.random() * 0.8
        return 0.0002 + self._rng.random() * 0.0005

    def loses(self, what: str, subject: str) -> bool:
        """drop, on the way to the broker."""
        return what in LOSABLE and self._happens(self._lossy.lose)

    def loses_answer(self, what: str, subject: str) -> bool:
        """drop, on the way back."""
        return self._happens(self._lossy.lose_answer)

    def copies_s(self, subject: str) -> tuple[float, ...]:
        """drop, duplicate and reorder of live messages."""
        if self._happens(self._lossy.drop):
            return ()
        if self._happens(self._lossy.duplicate):
            return (0.0, self._rng.random() * 0.5)
        if self._happens(self._lossy.reorder):
            return (self._rng.random() * 0.5,)
        return (0.0,)

    def sending(self, what: str, subject: str) -> None:
        """crash before ack."""
        if what == "ack" and self._happens(self._lossy.crash_before_ack):
            self._process.kill()

    def sent(self, what: str, subject: str) -> None:
        """crash after publish."""
        if what == "confirm" and self._happens(self._lossy.crash_after_publish):
            self._process.kill()


async def stale_wake_up(process: Process, for_s: float, timers_first: bool) -> None:
    """Stops a process, past its leases when for_s is long enough, and lets it go on."""
    process.freeze()
    await asyncio.sleep(for_s)
    process.thaw(timers_first)


async def disconnect(bus: MemoryBus, for_s: float) -> None:
    """Breaks one connection for a while."""
    bus.disconnect()
    await asyncio.sleep(for_s)
    if bus.broker.up:
        bus.reconnect()


async def full_store(broker: MemoryBroker, for_s: float) -> None:
    """The work queue takes nothing for a while."""
    usual, broker.work_items_max = broker.work_items_max, 0
    await asyncio.sleep(for_s)
    broker.work_items_max = max(usual, broker.work_items_max)


async def broker_death(broker: MemoryBroker, for_s: float) -> None:
    """SIGKILL to the broker, and another one on its store."""
    if broker.up:
        broker.kill()
        await asyncio.sleep(for_s)
        broker.start()
