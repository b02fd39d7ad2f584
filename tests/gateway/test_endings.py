"""Every accepted request has exactly one terminal event in its log, whoever cancels it where, and whoever is left to
say so.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets

from gateway import ownership
from gateway.endings import Endings
from gateway.ownership import Ownership
from gateway.resume import Record
from runtime.nats_bus import NatsBus
from schemas import subjects
from schemas.events import Failed, Usage
from schemas.timeline import Timeline
from tests.gateway.conftest import Pair, eventually, terminals, told
from tests.gateway.fake_engine import MODEL, FakeEngine, Job, silent
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = ASK | {"stream": True}
ROUTE = "/v1/chat/completions"


async def say_two_and_wait(job: Job) -> None:
    await job.say("one")
    await job.say("two")
    await asyncio.Event().wait()


async def asked(client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any]) -> tuple[asyncio.Task[Any], str]:
    """A call that runs, and its request."""
    count = len(engine.jobs)
    task = asyncio.create_task(client.post(ROUTE, json=body))
    await until(lambda: len(engine.jobs) > count, "the engine has it")
    return task, engine.jobs[-1].envelope.request


async def only_terminal(bus: NatsBus, request: str) -> Failed:
    found = await terminals(bus, request)
    assert len(found) == 1, found
    assert isinstance(found[0], Failed)
    return found[0]


async def test_delete_at_another_gateway_ends_the_stream_here_and_no_other(
    pair: Pair, engine: FakeEngine, bus: NatsBus
) -> None:
    engine.behave = say_two_and_wait
    asking, request = await asked(pair.a, engine, STREAM)
    other, kept = await asked(pair.a, engine, STREAM)
    await until(lambda: engine.jobs[0].index == 2, "both tokens are said")
    deleted = (await pair.b.delete(f"/v1/requests/{request}")).json()
    text = (await asking).text
    assert (deleted["status"], deleted["tokens"], deleted["usage"]["completion_tokens"]) == ("cancelled", 2, 2)
    assert '"one"' in text
    assert '"two"' in text
    assert text.index('"two"') < text.index('"code": "cancelled"') < text.index("[DONE]")
    assert engine.cancelled == [request]
    assert (await only_terminal(bus, request)).usage == Usage(7, 2, 3)
    assert not other.done()
    await pair.b.delete(f"/v1/requests/{kept}")
    await other


@pytest.mark.usefixtures("nobody_answers")
async def test_a_request_that_no_worker_has_seen_is_cancelled_in_its_queue(
    pair: Pair, engine: FakeEngine, bus: NatsBus
) -> None:
    """The gateway writes the end; the engine that takes the work later finds the mark, and says it in vain."""
    await engine.rest()
    asking = asyncio.create_task(pair.a.post(ROUTE, json=ASK))
    await eventually(lambda: queued(bus), "it waits in the queue")
    [request] = await requests_known(bus)
    deleted = await pair.b.delete(f"/v1/requests/{request}")
    answer = await asking
    assert (deleted.status_code, deleted.json()["status"]) == (200, "cancelled")
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
    assert (await only_terminal(bus, request)).usage == Usage(0, 0)
    await engine.work_again()
    await until(lambda: len(engine.jobs) == 1, "the engine takes it")
    await until(lambda: engine.jobs[0].ended, "the engine has had its say")
    assert engine.jobs[0].index == 0
    await only_terminal(bus, request)


async def queued(bus: NatsBus) -> bool:
    work = ("engine", MODEL, "standard")
    return await bus.backlog(subjects.work(*work), subjects.work_consumer(*work)) == 1  # type: ignore[arg-type]


async def requests_known(bus: NatsBus) -> list[str]:
    bucket = await bus.client.jetstream().key_value(subjects.REQUEST_BUCKET)
    return await bucket.keys()


@pytest.mark.usefixtures("nobody_answers")
async def test_when_the_engine_is_dead_the_cancelling_gateway_says_what_was_sent(
    pair: Pair, engine: FakeEngine, bus: NatsBus
) -> None:
    engine.behave, engine.deaf = say_two_and_wait, True
    asking, request = await asked(pair.a, engine, STREAM)
    await until(lambda: engine.jobs[0].index == 2, "both tokens are said")
    await engine.bus.flush()
    first, second = await asyncio.gather(*(client.delete(f"/v1/requests/{request}") for client in (pair.a, pair.b)))
    assert (first.json()["status"], second.json()["status"]) == ("cancelled", "cancelled")
    assert '"code": "cancelled"' in (await asking).text
    assert (await only_terminal(bus, request)).usage == Usage(0, 2)


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_a_client_that_goes_away_leaves_one_end_that_every_gateway_tells(
    pair: Pair, engine: FakeEngine, bus: NatsBus, body: dict[str, Any]
) -> None:
    engine.behave = say_two_and_wait
    asking, request = await asked(pair.a, engine, body)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await told(pair.b, request, "cancelled")
    await only_terminal(bus, request)


async def test_a_socket_cancels_what_another_gateway_took(pair: Pair, engine: FakeEngine, bus: NatsBus) -> None:
    engine.behave = say_two_and_wait
    asking, request = await asked(pair.a, engine, ASK)
    async with websockets.connect(str(pair.b.base_url).replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        await socket.send(json.dumps({"type": "resume", "id": "x", "request": request}))
        frames = [json.loads(await socket.recv()) for _ in range(3)]
        await socket.send(json.dumps({"type": "cancel", "id": "x"}))
        end = json.loads(await socket.recv())
    assert [frame["type"] for frame in frames] == ["accepted", "token", "token"]
    assert (end["type"], end["code"]) == ("error", "cancelled")
    assert (await asking).json()["error"]["code"] == "cancelled"
    await only_terminal(bus, request)


async def test_a_deadline_that_no_worker_minds_ends_every_readers_stream(pair: Pair, engine: FakeEngine, bus: NatsBus) -> None:
    engine.behave, engine.deaf = say_two_and_wait, True
    asking, request = await asked(pair.a, engine, ASK | {"headrace": {"deadline_ms": 300}})
    events = await pair.b.get(f"/v1/requests/{request}/events")
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert '"code":"deadline_exceeded"' in events.text.split("\n\n")[-2]
    assert (await only_terminal(bus, request)).usage == Usage(0, 2)
    await eventually(lambda: bus.is_cancelled(request), "the mark, so that nobody computes on")


async def test_a_kept_request_that_nobody_reads_ends_by_its_deadline(pair: Pair, engine: FakeEngine, bus: NatsBus) -> None:
    engine.behave, engine.deaf = silent, True
    asking, request = await asked(pair.a, engine, ASK | {"headrace": {"deadline_ms": 400, "on_disconnect": "keep"}})
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await told(pair.b, request, "failed")
    assert (await only_terminal(bus, request)).code == "deadline_exceeded"


async def test_an_answer_whose_log_is_gone_before_its_deadline_has_ended_all_the_same(
    pair: Pair, engine: FakeEngine, bus: NatsBus
) -> None:
    """Nobody says its end again, nobody cancels it, and whoever asks is told that it is over."""
    answer = await pair.a.post("/v1/chat/completions", json=ASK | {"headrace": {"on_disconnect": "keep"}})
    request = answer.headers["X-Request-Id"]
    for stream in (subjects.REPLY_STREAM, subjects.END_STREAM):
        await bus.client.jetstream().purge_stream(stream)
    for path in (f"/v1/requests/{request}", f"/v1/requests/{request}/events"):
        told = await pair.b.get(path)
        assert (told.status_code, told.json()["error"]["code"]) == (410, "replay_expired")
    owned = await ownership.read(bus, request)
    assert owned is not None
    endings = Endings(bus)
    endings.expire(Record(owned, taken_here=True))
    await endings.finish(10.0)
    assert await terminals(bus, request) == []
    assert not await bus.is_cancelled(request)


async def test_a_kept_request_that_ended_is_minded_no_longer(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(Ownership("a" * 32, "t", "m", "chat", 0, 0, "", "keep", False), taken_here=True)
    record.terminal = Failed(1, 0, "internal", "x", Timeline(0))
    endings = Endings(bus)
    monkeypatch.setattr(endings, "expire", lambda record: pytest.fail("it has ended"))
    endings._vigil_over(record)


async def test_a_client_that_left_while_the_broker_was_away_is_told_of_when_it_is_back(
    broker: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.nats_bus.CONFIRM_TRIES", 1)
    deadline_us = bus.clock.now_us() + 60_000_000
    record = Record(Ownership("a" * 32, "t", "m", "chat", 0, deadline_us, "", "cancel", False), taken_here=True)
    endings = Endings(bus)
    broker.kill()
    await until(lambda: not bus.connected, "the bus knows")
    endings.abandon(record)
    broker.start()
    await eventually(lambda: bus.is_cancelled("a" * 32), "the mark")


async def test_an_end_that_the_gateway_writes_says_where_the_time_went(pair: Pair, engine: FakeEngine, bus: NatsBus) -> None:
    engine.behave, engine.deaf = say_two_and_wait, True
    asking, request = await asked(pair.a, engine, STREAM)
    await pair.a.delete(f"/v1/requests/{request}")
    await asking
    spans = (await only_terminal(bus, request)).timeline.spans_us()
    assert spans["gateway.wait"] > 0
