"""A whole gateway on a real broker, with a fake engine behind it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import serve
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from tests.gateway.fake_engine import FakeEngine
from tests.support.broker import NatsServer


def settings(broker: NatsServer, **changes: Any) -> Settings:
    """Settings without rails, so that the engine is the only stage; a test turns on what it is about."""
    values: dict[str, Any] = {"nats_url": broker.url, "port": 0, "rails_output": {}, "drain_s": 5.0}
    return Settings(home=Path("unused"), **(values | changes))


@contextlib.asynccontextmanager
async def running_gateway(values: Settings, bus: NatsBus, wait_ready: bool = True) -> AsyncIterator[str]:
    """serve() as a task, stopped at the end; gives the URL once /readyz is 200 (or at once)."""
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(values, bus, stop, ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    url = ready.result()
    if wait_ready:
        await _until_ready(url)
    try:
        yield url
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


@contextlib.asynccontextmanager
async def unready_gateway(values: Settings, bus: NatsBus) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that is not waited for."""
    async with running_gateway(values, bus, wait_ready=False) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client


async def _until_ready(url: str) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(1000):
            if (await client.get(url + "/readyz")).status_code == 200:
                return
    pytest.fail("the gateway did not become ready")


@pytest.fixture
async def engine(broker: NatsServer, anyio_backend: str) -> AsyncIterator[FakeEngine]:
    """A fake engine on a connection of its own."""
    bus = await NatsBus.connect(broker.url, "fake-engine")
    fake = FakeEngine(bus)
    await fake.start()
    yield fake
    await fake.stop()
    await bus.close()


@pytest.fixture
async def gateway_url(broker: NatsServer, bus: NatsBus, engine: FakeEngine) -> AsyncIterator[str]:
    """A ready gateway with the fake engine behind it."""
    async with running_gateway(settings(broker), bus) as url:
        yield url


@pytest.fixture
async def http(gateway_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the gateway."""
    async with httpx.AsyncClient(base_url=gateway_url, timeout=20) as client:
        yield client
