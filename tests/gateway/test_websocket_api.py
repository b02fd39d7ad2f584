"""The WebSocket over a real broker: several requests on one socket, cancel, resume, and faults that cost only
themselves.
"""

import asyncio
import json
import socket as socket_module
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import websockets

from schemas.limits import BODY_BYTES_MAX
from tests.gateway.fake_engine import MODEL, FakeEngine, Job
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}

Socket = websockets.ClientConnection


@pytest.fixture
async def socket(gateway_url: str) -> AsyncIterator[Socket]:
    async with websockets.connect(gateway_url.replace("http", "ws") + "/v1/ws", proxy=None) as connection:
        yield connection


def start(name: str, **changes: Any) -> dict[str, Any]:
    return {"type": "start", "id": name, "kind": "chat", "body": BODY} | changes


async def send(socket: Socket, frame: Any) -> None:
    await socket.send(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))


async def receive(socket: Socket) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 10))
    return frame


async def until_end(socket: Socket, name: str) -> list[dict[str, Any]]:
    frames = [await receive(socket)]
    while frames[-1]["type"] not in ("done", "error"):
        frames.append(await receive(socket))
    assert {frame.get("id") for frame in frames} == {name}
    return frames


async def say_one_and_wait(job: Job) -> None:
    await job.say("one")
    await asyncio.Event().wait()


async def test_three_requests_share_a_socket(socket: Socket, engine: FakeEngine) -> None:
    """The engine starts to answer only once it holds all three: they do run at once."""
    everybody = asyncio.Event()

    async def behave(job: Job) -> None:
        if len(engine.jobs) == 3:
            everybody.set()
        await everybody.wait()
        for text in ("a", "", "b"):
            await job.say(text)
        await job.finish("length")

    engine.behave = behave
    for name in "xyz":
        await send(socket, start(name))
    frames: dict[str, list[dict[str, Any]]] = defaultdict(list)
    while sum(1 for found in frames.values() if found[-1]["type"] == "done") < 3:
        frame = await receive(socket)
        frames[frame["id"]].append(frame)
    assert set(frames) == set("xyz")
    for found in frames.values():
        assert [frame["type"] for frame in found] == ["accepted", "token", "token", "done"]
        assert [(f["index"], f["text"]) for f in found[1:3]] == [(0, "a"), (2, "b")]
        assert found[-1]["finish_reason"] == "length"
        assert found[-1]["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "cached_tokens": 3,
        }
        assert len({frame["request"] for frame in found}) == 1
    assert len({found[0]["request"] for found in frames.values()}) == 3


async def test_a_text_completion_with_timings(socket: Socket) -> None:
    body = {"model": MODEL, "prompt": "Say", "headrace": {"timings": True}}
    await send(socket, start("a", kind="completion", body=body))
    done = (await until_end(socket, "a"))[-1]
    assert next(iter(done["headrace"]["timings"]["spans_ms"])) == "gateway.accept"


@pytest.mark.parametrize("twice", [False, True])
async def test_cancel_ends_the_stream_at_once_and_tells_the_workers(socket: Socket, engine: FakeEngine, twice: bool) -> None:
    engine.behave = say_one_and_wait
    await send(socket, start("a"))
    assert [(await receive(socket))["type"] for _ in range(2)] == ["accepted", "token"]
    await send(socket, {"type": "cancel", "id": "a"})
    if twice:
        await send(socket, {"type": "cancel", "id": "a"})
    frame = await receive(socket)
    assert (frame["type"], frame["id"], frame["code"], frame["retryable"]) == ("error", "a", "cancelled", False)
    await until(lambda: bool(engine.cancelled), "the cancel broadcast")
    assert set(engine.cancelled) == {engine.jobs[0].envelope.request}


async def test_cancel_right_after_start_still_cancels(socket: Socket, engine: FakeEngine) -> None:
    engine.behave = say_one_and_wait
    await send(socket, start("a"))
    await send(socket, {"type": "cancel", "id": "a"})
    assert (await until_end(socket, "a"))[-1]["code"] == "cancelled"


async def test_closing_the_socket_cancels_its_requests_but_not_those_to_keep(gateway_url: str, engine: FakeEngine) -> None:
    engine.behave = say_one_and_wait
    async with websockets.connect(gateway_url.replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        await send(socket, start("kept", body=BODY | {"headrace": {"on_disconnect": "keep"}}))
        await send(socket, start("gone"))
        requests: dict[str, str] = {}
        while len(requests) < 2:
            frame = await receive(socket)
            if frame["type"] == "token":
                requests[frame["id"]] = frame["request"]
    await until(lambda: bool(engine.cancelled), "the cancel broadcast")
    assert engine.cancelled == [requests["gone"]]


async def test_a_resumed_request_is_replayed_from_the_index_then_followed(gateway_url: str, engine: FakeEngine) -> None:
    go = asyncio.Event()

    async def behave(job: Job) -> None:
        for text in "abc":
            await job.say(text)
        await go.wait()
        await job.say("d")
        await job.finish()

    engine.behave = behave
    url = gateway_url.replace("http", "ws") + "/v1/ws"
    async with websockets.connect(url, proxy=None) as first:
        await send(first, start("a", body=BODY | {"headrace": {"on_disconnect": "keep"}}))
        frames = [await receive(first) for _ in range(4)]
    async with websockets.connect(url, proxy=None) as second:
        await send(second, {"type": "resume", "id": "again", "request": frames[0]["request"], "from": 1})
        resumed = [await receive(second) for _ in range(3)]
        go.set()
        resumed += await until_end(second, "again")
    assert [(f["index"], f["text"]) for f in resumed if f["type"] == "token"] == [(1, "b"), (2, "c"), (3, "d")]
    assert resumed[-1]["usage"]["completion_tokens"] == 4
    assert engine.cancelled == []


async def test_a_wrong_frame_is_told_and_the_socket_goes_on(socket: Socket) -> None:
    frames: tuple[tuple[Any, str], ...] = (
        ("{", "malformed_request"),
        (b"\x00", "malformed_request"),
        ("[]", "malformed_request"),
        (" " * (BODY_BYTES_MAX + 4097), "payload_too_large"),
        ({"type": "launch"}, "invalid_value"),
        ({"type": "cancel", "id": "nobody"}, "not_found"),
        ({"type": "resume", "id": "r", "request": "0" * 32}, "not_found"),
        (start("s", body={}), "invalid_value"),
        (start("s", body=BODY | {"n": 2}), "invalid_value"),
        (start("s", body=BODY | {"model": "gpt-9"}), "model_not_found"),
    )
    for frame, code in frames:
        await send(socket, frame)
        error = await receive(socket)
        assert (error["type"], error["code"]) == ("error", code)
        assert error.get("id") == (frame.get("id") if isinstance(frame, dict) else None)
        await send(socket, {"type": "ping"})
        assert await receive(socket) == {"type": "pong"}


async def test_a_name_in_use_is_refused_without_ending_the_request_that_has_it(socket: Socket, engine: FakeEngine) -> None:
    engine.behave = say_one_and_wait
    await send(socket, start("a"))
    await send(socket, start("a"))
    frames = [await receive(socket) for _ in range(3)]
    refusal = next(frame for frame in frames if frame["type"] == "error")
    assert "id" not in refusal
    assert refusal["param"] == "id"
    assert len(engine.jobs) == 1


async def test_a_socket_carries_a_bounded_number_of_requests(socket: Socket, engine: FakeEngine) -> None:
    engine.behave = say_one_and_wait
    for number in range(65):
        await send(socket, start(str(number)))
    error = await receive(socket)
    while error["type"] != "error":
        error = await receive(socket)
    assert (error["id"], error["code"], error["retryable"]) == ("64", "overloaded", True)


async def test_a_reader_that_stops_reading_slows_nobody_else(
    gateway_url: str, engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    """One socket does not read while its request says more than every buffer holds; another is answered meanwhile."""
    many, text = 2000, "x" * 2000

    async def behave(job: Job) -> None:
        if job.envelope.sampling.max_tokens == 1:
            await job.say("quick")
        else:
            for _ in range(many):
                await job.say(text)
        await job.finish()

    engine.behave = behave
    url = gateway_url.replace("http", "ws") + "/v1/ws"
    small = socket_module.socket()
    small.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", httpx.URL(gateway_url).port))
    small.setblocking(False)
    async with (
        websockets.connect(url, proxy=None, max_queue=1, sock=small) as slow,
        websockets.connect(url, proxy=None) as quick,
    ):
        await send(slow, start("slow"))
        await until(lambda: bool(engine.jobs) and engine.jobs[0].index == many, "the engine has said it all")
        await send(quick, start("quick", body=BODY | {"max_tokens": 1}))
        assert (await until_end(quick, "quick"))[1]["text"] == "quick"
        frames = await until_end(slow, "slow")
    assert frames[-1]["type"] == "done"
    assert "".join(frame["text"] for frame in frames if frame["type"] == "token") == text * many
    metrics = (await http.get("/metrics")).text
    assert "headrace_gateway_gaps_filled_total 0.0" not in metrics  # its queue did overflow


async def test_a_page_of_another_origin_gets_no_socket(gateway_url: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        await websockets.connect(
            gateway_url.replace("http", "ws") + "/v1/ws",
            origin="http://evil.example",
            proxy=None,  # type: ignore[arg-type]
        )
    assert caught.value.response.status_code == 403


async def test_text_that_is_no_utf_8_closes_the_socket_and_says_nothing_in_the_log(
    socket: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    async with socket.send_context():
        socket.protocol.send_text(b"\xff")
    with pytest.raises(websockets.ConnectionClosed) as caught:
        await socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1007
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
