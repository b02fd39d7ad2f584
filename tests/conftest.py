"""Fixtures for every suite: a real broker per test, and one whole stack for the end-to-end tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from runtime.nats_bus import NatsBus
from tests.support.broker import NatsServer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server with a store of its own, as `headrace up` configures it."""
    server = NatsServer(tmp_path / "broker")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def bus(broker: NatsServer, anyio_backend: str) -> AsyncIterator[NatsBus]:
    """A connection to the broker, streams declared."""
    connection = await NatsBus.connect(broker.url, "test")
    yield connection
    await connection.close()
