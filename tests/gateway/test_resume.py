"""A gateway dies or a connection breaks: the rest of the stream comes from any other gateway, byte for byte, to its
owner alone.
"""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest
import websockets

from gateway import ownership, resume
from gateway.ownership import Ownership
from gateway.resume import Record, Snapshot, refuse_unless_held
from runtime.nats_bus import NatsBus
from schemas import events, subjects
from schemas.errors import HeadraceError
from schemas.events import Tokens
from tests.gateway.conftest import Pair, gateway_process, until_ready
from tests.gateway.fake_engine import MODEL, FakeEngine, Job
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "stream": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
KEEP: dict[str, Any] = {"headrace": {"on_disconnect": "keep"}}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


def rests(stream: str) -> dict[str, str]:
    """What must come after each durable event, by its id."""
    events = stream.split("\n\n")
    return {
        event.split("\n")[0].removeprefix("id: "): "\n\n".join(events[place + 1 :])
        for place, event in enumerate(events)
        if event.startswith("id: ") and '"finish_reason": null' in event
    }


def after(last: str) -> dict[str, str]:
    return {"Last-Event-ID": last}


class Paused:
    """Says abc, waits for go, says def and finishes."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        for text in "abc":
            await job.say(text)
        await self.go.wait()
        for text in "def":
            await job.say(text)
        await job.finish()


@pytest.mark.parametrize(("route", "body"), [(CHATS, CHAT), (CHATS, CHAT | USAGE), (TEXTS, TEXT)])
async def test_the_rest_of_a_finished_stream_is_the_same_bytes_at_another_gateway(
    pair: Pair, route: str, body: dict[str, Any]
) -> None:
    first = await pair.a.post(route, json=body)
    found = rests(first.text)
    assert len(found) == 3
    for last, rest in found.items():
        again = await pair.b.post(route, json=body, headers=after(last))
        assert again.text == rest
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
    whole = await pair.b.post(route, json=body, headers=after(f"{first.headers['x-request-id']}:0"))
    assert whole.text == first.text


async def test_a_stream_that_broke_off_goes_on_at_another_gateway(pair: Pair, engine: FakeEngine) -> None:
    engine.behave = paused = Paused()
    read, body = "", CHAT | KEEP
    async with pair.a.stream("POST", CHATS, json=body) as answer:
        async for part in answer.aiter_text():
            read += part
            if '"b"' in read:
                break
    last = [line for line in read.split("\n") if line.startswith("id: ")][-1].removeprefix("id: ")
    read = read[: read.rindex("\n\n") + 2]
    resuming = asyncio.create_task(pair.b.post(CHATS, json=body, headers=after(last)))
    paused.go.set()
    rest = (await resuming).text
    request = last.split(":")[0]
    whole = await pair.b.post(CHATS, json=body, headers=after(f"{request}:0"))
    assert read + rest == whole.text
    assert len(engine.jobs) == 1
    assert engine.cancelled == []


async def test_events_at_another_gateway_are_the_same_bytes_whichever_way_the_place_is_named(pair: Pair) -> None:
    request = (await pair.a.post(CHATS, json=CHAT)).headers["x-request-id"]
    whole = (await pair.a.get(f"/v1/requests/{request}/events")).text
    rest = "\n\n".join(whole.split("\n\n")[2:])
    assert (await pair.b.get(f"/v1/requests/{request}/events?from=2")).text == rest
    assert (await pair.b.get(f"/v1/requests/{request}/events", headers=after(f"{request}:2"))).text == rest


async def test_a_socket_resumes_at_another_gateway(pair: Pair, engine: FakeEngine) -> None:
    engine.behave = paused = Paused()
    first, second = (str(client.base_url).replace("http", "ws") + "/v1/ws" for client in (pair.a, pair.b))
    body = {name: value for name, value in (CHAT | KEEP).items() if name != "stream"}
    async with websockets.connect(first, proxy=None) as socket:
        await socket.send(json.dumps({"type": "start", "id": "x", "kind": "chat", "body": body}))
        frames = [json.loads(await socket.recv()) for _ in range(3)]
    assert [frame.get("text") for frame in frames] == [None, "a", "b"]
    async with websockets.connect(second, proxy=None) as socket:
        await socket.send(json.dumps({"type": "resume", "id": "x", "request": frames[0]["request"], "from": 2}))
        paused.go.set()
        rest = [json.loads(await socket.recv()) for _ in range(6)]
    assert [(frame["type"], frame.get("text")) for frame in rest[1:]] == [
        ("token", "c"),
        ("token", "d"),
        ("token", "e"),
        ("token", "f"),
        ("done", None),
    ]


async def test_a_failure_in_the_middle_comes_in_band_again(pair: Pair, engine: FakeEngine) -> None:
    told = asyncio.Event()

    async def behave(job: Job) -> None:
        await job.say("one")
        await told.wait()
        await job.fail("attempts_exhausted")

    engine.behave = behave
    read = ""
    async with pair.a.stream("POST", CHATS, json=CHAT) as answer:
        async for part in answer.aiter_text():
            read += part
            if '"one"' in read:
                told.set()
    [(last, rest)] = rests(read).items()
    again = await pair.b.post(CHATS, json=CHAT, headers=after(last))
    assert (again.status_code, again.text) == (200, rest)


async def test_to_another_tenant_a_request_does_not_exist(pair: Pair, bus: NatsBus) -> None:
    request = subjects.new_request_id()
    theirs = Ownership(request, "other", MODEL, "chat", bus.clock.now_us(), 2**60, "", "keep", False)
    await ownership.write(bus, theirs)
    await bus.publish(subjects.reply(request), events.encode(Tokens(1, 0, (1,), ("secret",))))
    for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
        answer = await pair.a.request(method, f"/v1/requests/{request}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = await pair.b.post(CHATS, json=CHAT, headers=after(f"{request}:0"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    async with websockets.connect(str(pair.b.base_url).replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        await socket.send(json.dumps({"type": "resume", "id": "x", "request": request}))
        assert json.loads(await socket.recv())["code"] == "not_found"
    assert not await bus.is_cancelled(request)


async def test_what_cannot_be_resumed_is_refused_by_name(pair: Pair) -> None:
    request = (await pair.a.post(CHATS, json=CHAT)).headers["x-request-id"]
    whole = {name: value for name, value in CHAT.items() if name != "stream"}
    for route, body, last, status, code in (
        (CHATS, CHAT, "nonsense", 400, "invalid_value"),
        (CHATS, CHAT, f"{request}:x", 400, "invalid_value"),
        (CHATS, CHAT, f"{request}:5", 400, "invalid_value"),
        (CHATS, whole, f"{request}:1", 400, "invalid_value"),
        (CHATS, CHAT, f"{'0' * 32}:1", 404, "not_found"),
        (CHATS, CHAT | {"seed": 1}, f"{request}:1", 409, "idempotency_conflict"),
        (TEXTS, TEXT, f"{request}:1", 409, "idempotency_conflict"),
    ):
        answer = await pair.b.post(route, json=body, headers=after(last))
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (body, last)


async def test_what_the_log_has_lost_is_replay_expired_on_every_surface(pair: Pair, engine: FakeEngine) -> None:
    engine.behave = paused = Paused()
    asking = asyncio.create_task(pair.a.post(CHATS, json=CHAT))
    await until(lambda: bool(engine.jobs) and engine.jobs[0].index == 3, "abc is said")
    request = engine.jobs[0].envelope.request
    await engine.bus.flush()
    await engine.bus.client.jetstream().purge_stream(subjects.REPLY_STREAM)
    await engine.jobs[0].say("later")
    await engine.bus.flush()
    for answer in (
        await pair.b.get(f"/v1/requests/{request}/events?from=1"),
        await pair.b.post(CHATS, json=CHAT, headers=after(f"{request}:1")),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "replay_expired")
    async with websockets.connect(str(pair.b.base_url).replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        await socket.send(json.dumps({"type": "resume", "id": "x", "request": request}))
        assert json.loads(await socket.recv())["code"] == "replay_expired"
    paused.go.set()
    await asking


def test_a_request_of_which_nothing_is_left_is_waited_for_only_while_something_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume, "LOG_AGE_S", 10.0)
    nothing = Snapshot(None, 0, None)
    for deadline_s, now_s, expired in ((5, 4, False), (5, 9, False), (5, 11, True), (20, 11, False), (20, 21, True)):
        record = Record(Ownership("a", "t", "m", "chat", 0, deadline_s * 1_000_000, "", "keep", False), taken_here=False)
        with pytest.raises(HeadraceError, match="no longer holds") if expired else contextlib.nullcontext():
            refuse_unless_held(record, nothing, 0, now_s * 1_000_000)


async def test_a_gateway_that_is_killed_loses_no_token(pair: Pair, engine: FakeEngine, broker: NatsServer) -> None:
    """A real process and a real SIGKILL: nobody is left there who could cancel or say goodbye."""
    engine.behave = paused = Paused()
    read = ""
    async with gateway_process(broker) as process:
        assert process.stdout is not None
        url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            await until_ready(url)
            async with client.stream("POST", CHATS, json=CHAT) as answer:
                with contextlib.suppress(httpx.HTTPError):
                    async for part in answer.aiter_text():
                        read += part
                        if '"c"' in read:
                            process.kill()
    assert "[DONE]" not in read
    [*_, (last, _)] = rests(read).items()
    resuming = asyncio.create_task(pair.b.post(CHATS, json=CHAT, headers=after(last)))
    paused.go.set()
    rest = (await resuming).text
    whole = await pair.a.post(CHATS, json=CHAT, headers=after(f"{last.split(':')[0]}:0"))
    assert read + rest == whole.text
    chunks = [json.loads(line[6:]) for line in whole.text.split("\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abcdef"
    assert engine.cancelled == []
