"""The two brokers that the suites of this folder are run on: a real nats-server, and the one in memory on virtual time."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import nats.errors
import nats.js.errors
import pytest

from runtime.bus import Bus
from runtime.memory_broker import MemoryBroker
from runtime.memory_bus import MemoryBus
from runtime.nats_bus import NatsBus
from schemas import subjects
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.support.broker import NatsServer


class Server(Protocol):
    """A broker that a test may kill. Its connections are closed with it."""

    async def connect(self, name: str) -> Bus:
        """One process's connection."""
        ...

    def kill(self) -> None:
        """It is gone at once."""
        ...

    def start(self) -> None:
        """It is back, with what it had on file."""
        ...

    async def work_items(self) -> int | None:
        """Work items that are not acknowledged; None when the broker does not say."""
        ...

    async def close(self) -> None:
        """Ends everything."""
        ...


class RealServer:
    """nats-server."""

    def __init__(self, home: Path) -> None:
        self._server = NatsServer(home)
        self._server.start()
        self._connections: list[NatsBus] = []

    async def connect(self, name: str) -> NatsBus:
        """One process's connection."""
        bus = await NatsBus.connect(self._server.url, name)
        self._connections.append(bus)
        return bus

    def kill(self) -> None:
        """SIGKILL."""
        self._server.kill()

    def start(self) -> None:
        """Another process on the same store and port."""
        self._server.start()

    async def work_items(self) -> int | None:
        """What the work stream holds; None while the broker is away or has just begun anew, where questions get lost."""
        try:
            info = await self._connections[0]._js.stream_info(subjects.WORK_STREAM)
        except (nats.errors.Error, nats.js.errors.Error):
            return None
        return info.state.messages

    async def close(self) -> None:
        """Ends everything."""
        for bus in self._connections:
            await bus.close()
        self._server.kill()


class MemoryServer:
    """The broker in memory."""

    def __init__(self) -> None:
        self._broker = MemoryBroker(time.time_ns() // 1000)
        self._connections: list[MemoryBus] = []

    async def connect(self, name: str) -> MemoryBus:
        """One process's connection."""
        bus = MemoryBus(self._broker, name)
        self._connections.append(bus)
        return bus

    def kill(self) -> None:
        """What is in memory is lost."""
        self._broker.kill()

    def start(self) -> None:
        """It is back."""
        self._broker.start()

    async def work_items(self) -> int:
        """What the work stream holds."""
        return len(self._broker.work)

    async def close(self) -> None:
        """Ends everything."""
        for bus in self._connections:
            await bus.close()


class OnNats:
    """Fixtures of a suite on nats-server."""

    @pytest.fixture
    async def server(self, tmp_path: Path, anyio_backend: str) -> AsyncIterator[Server]:
        """A broker of the test's own."""
        server = RealServer(tmp_path / "broker")
        yield server
        await server.close()

    @pytest.fixture
    async def bus(self, server: Server) -> Bus:
        """A connection to it."""
        return await server.connect("test")


class OnMemory:
    """Fixtures of a suite on the broker in memory."""

    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, object]]:
        """Virtual time."""
        return "asyncio", {"loop_factory": VirtualTimeLoop}

    @pytest.fixture
    async def server(self, anyio_backend: object) -> AsyncIterator[Server]:
        """A broker of the test's own."""
        server = MemoryServer()
        yield server
        await server.close()

    @pytest.fixture
    async def bus(self, server: Server) -> Bus:
        """A connection to it."""
        return await server.connect("test")
