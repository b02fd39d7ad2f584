"""A client that does not read costs a bounded memory, slows nobody, and is not waited for for ever."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import websockets

from runtime.bus import Message
from runtime.following import QUEUE_MESSAGES_MAX, Follow
from schemas import limits
from tests.gateway.conftest import in_flight
from tests.gateway.fake_engine import MODEL, FakeEngine, Job
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

STREAM: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
WHOLE: dict[str, Any] = {name: value for name, value in STREAM.items() if name != "stream"}
MANY, TEXT = 2500, "x" * 2500  # more than every buffer on the way holds


async def talk(job: Job) -> None:
    """Says much, unless one token is asked for; then goes on at length in silence."""
    if job.envelope.sampling.max_tokens == 1:
        await job.say("quick")
        await job.finish()
        return
    for _ in range(MANY):
        await job.say(TEXT)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def narrow(url: str) -> AsyncIterator[socket.socket]:
    """A connection whose kernel takes little."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", httpx.URL(url).port))
    connection.setblocking(False)
    try:
        yield connection
    finally:
        connection.close()


async def ask(connection: socket.socket) -> None:
    body = json.dumps(STREAM).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(connection, head.encode() + body)


async def read_all(connection: socket.socket) -> str:
    loop, found = asyncio.get_running_loop(), bytearray()
    while part := await asyncio.wait_for(loop.sock_recv(connection, 65536), 10):
        found += part
    return found.decode()


async def test_one_client_that_never_reads_slows_nobody_and_fills_no_memory(
    gateway_url: str, engine: FakeEngine, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = [0]

    class Watched(Follow):
        async def _on_message(self, message: Message) -> None:
            await super()._on_message(message)
            most[0] = max(most[0], len(self._queue))

    monkeypatch.setattr("gateway.admission.Follow", Watched)
    engine.behave = talk
    async with narrow(gateway_url) as connection:
        await ask(connection)
        await until(lambda: bool(engine.jobs) and engine.jobs[0].index == MANY, "the engine has said it all")
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=WHOLE | {"max_tokens": 1}) for _ in range(20)))
        assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {"quick"}
        assert loop.time() - began < 3.0
        assert most[0] == QUEUE_MESSAGES_MAX  # it did overflow, and was bounded
        assert engine.cancelled == []
    await until(lambda: len(engine.cancelled) == 1, "its going cancels it")


async def test_a_client_that_reads_on_too_late_is_told_so_after_what_was_on_its_way(
    gateway_url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.behave = talk
    async with narrow(gateway_url) as connection:
        await ask(connection)
        monkeypatch.setattr(limits, "SLOW_READER_S", 0.1)
        await until(lambda: len(engine.cancelled) == 1, "it is not waited for any longer")
        text = await read_all(connection)
    assert text.count(TEXT) < MANY
    ids = [int(line.split(":")[2]) for line in text.split("\r\n") for line in line.split("\n") if line.startswith("id: ")]
    assert ids == list(range(1, len(ids) + 1))
    assert '"code": "slow_reader"' in text
    assert "data: [DONE]" in text


async def test_a_client_that_never_reads_on_is_given_up(
    gateway_url: str, engine: FakeEngine, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOW_READER_S", 0.1)
    monkeypatch.setattr(limits, "GIVEN_UP_S", 0.1)
    engine.behave = talk
    async with narrow(gateway_url) as connection:
        await ask(connection)
        await until(lambda: len(engine.cancelled) == 1, "it is not waited for any longer")
        await in_flight(http, 0)


async def test_a_socket_that_reads_on_too_late_is_told_for_each_request_and_goes_on(
    gateway_url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.behave = talk
    url = gateway_url.replace("http", "ws") + "/v1/ws"
    async with narrow(gateway_url) as connection:
        async with websockets.connect(url, proxy=None, max_queue=1, sock=connection) as slow:
            for name in "ab":
                await slow.send(json.dumps({"type": "start", "id": name, "kind": "chat", "body": WHOLE}))
            monkeypatch.setattr(limits, "SLOW_READER_S", 0.1)
            await until(lambda: len(engine.cancelled) == 2, "they are not waited for any longer")
            ends: dict[str, str] = {}
            while len(ends) < 2:
                frame = json.loads(await asyncio.wait_for(slow.recv(), 10))
                if frame["type"] == "error":
                    ends[frame["id"]] = frame["code"]
            await slow.send(json.dumps({"type": "ping"}))
            assert json.loads(await slow.recv()) == {"type": "pong"}
    assert ends == {"a": "slow_reader", "b": "slow_reader"}


async def test_a_socket_that_never_reads_on_is_given_up(
    gateway_url: str, engine: FakeEngine, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOW_READER_S", 0.1)
    monkeypatch.setattr(limits, "GIVEN_UP_S", 0.1)
    engine.behave = talk
    url = gateway_url.replace("http", "ws") + "/v1/ws"
    async with narrow(gateway_url) as connection:
        slow = await websockets.connect(url, proxy=None, max_queue=1, sock=connection, close_timeout=0)
        await slow.send(json.dumps({"type": "start", "id": "a", "kind": "chat", "body": WHOLE}))
        await until(lambda: len(engine.cancelled) == 1, "it is not waited for any longer")
        await in_flight(http, 0)
        async with asyncio.timeout(5):
            with contextlib.suppress(websockets.ConnectionClosed):
                while True:
                    await slow.recv()
