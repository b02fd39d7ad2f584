"""A whole gateway on a real broker, with a fake engine behind it; where one gateway is not enough, two."""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import serve
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from schemas import events, subjects
from schemas.events import Terminal, Tokens
from tests.gateway.fake_engine import FakeEngine
from tests.support.broker import NatsServer

MEMORY = Path("/dev/shm")  # a file system without a disk, where there is one: what is tested here is no fsync


@pytest.fixture
def broker() -> Iterator[NatsServer]:
    """A real nats-server with a store of its own."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as home:
        server = NatsServer(Path(home) / "broker")
        server.start()
        yield server
        server.kill()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine here minds a deadline: nothing is gained by waiting for its word."""
    monkeypatch.setattr("gateway.endings.DEADLINE_GRACE_S", 0.1)


class _Brisk:
    """asyncio for uvicorn's server, which looks every 0.1 s whether it should stop: a third of this suite's time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        """Sleeps, shortly."""
        await asyncio.sleep(seconds / 20)


@pytest.fixture(autouse=True)
def _brisk_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.server.asyncio", _Brisk())


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test in which nobody is left to answer a cancel."""
    monkeypatch.setattr("gateway.endings.CANCEL_GRACE_S", 0.1)


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
        await until_ready(url)
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


GATEWAY = "\n".join(
    (
        "import sys",
        "from gateway.app import run",
        "from runtime.settings import Settings",
        "sys.exit(run(Settings.load(port=0), lambda url: print(url, flush=True)))",
    )
)


@contextlib.asynccontextmanager
async def gateway_process(broker: NatsServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """A gateway in a process of its own, killed at the end; the first line that it prints is its URL."""
    environment = {"HEADRACE_NATS_URL": broker.url, "HEADRACE_RAILS_OUTPUT": "{}", "HEADRACE_LOG_LEVEL": "error"}
    command = (sys.executable, "-c", GATEWAY)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_ready(url: str) -> None:
    """Returns when the gateway at that URL is ready."""
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


@dataclass(frozen=True)
class Pair:
    """Two gateways on one broker, each on a connection of its own, and a client of each."""

    a: httpx.AsyncClient
    b: httpx.AsyncClient


@pytest.fixture
async def pair(broker: NatsServer, gateway_url: str, http: httpx.AsyncClient) -> AsyncIterator[Pair]:
    """The ready gateway as a, and another one as b."""
    bus = await NatsBus.connect(broker.url, "gateway-b")
    async with running_gateway(settings(broker), bus) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield Pair(http, client)
    await bus.close()


async def terminals(bus: NatsBus, request: str) -> list[Terminal]:
    """Every terminal event in the log of a request, or on file; the same one in both is one."""
    found = [events.decode(message.data) for message in await bus.read_log(subjects.reply(request))]
    return list(dict.fromkeys(event for event in found if not isinstance(event, Tokens)))


async def eventually(check: Callable[[], Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    """Returns when check() holds; fails, naming what was awaited, after that many seconds."""
    give_up = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < give_up, f"waited {seconds} s for: {what}"
        await asyncio.sleep(0.005)


async def in_flight(client: httpx.AsyncClient, count: int) -> None:
    """Returns when the gateway follows that many streams."""

    async def check() -> bool:
        return f"in_flight_requests {count}.0" in (await client.get("/metrics")).text

    await eventually(check, f"{count} streams in flight")


async def told(client: httpx.AsyncClient, request: str, status: str) -> None:
    """Returns when the gateway tells that status of the request."""

    async def check() -> bool:
        return bool((await client.get(f"/v1/requests/{request}")).json()["status"] == status)

    await eventually(check, f"status {status}")
