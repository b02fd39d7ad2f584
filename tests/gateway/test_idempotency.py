"""One key, one answer: a retried call attaches to the first one's stream, at any gateway, whatever happened between."""

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets

from gateway.admission import Call
from gateway.auth import Principal
from gateway.idempotency import Claim, Claims
from runtime.bus import BusUnavailable
from runtime.nats_bus import NatsBus
from schemas import subjects
from schemas.requests import ChatCompletionRequest, parse
from tests.gateway.conftest import Pair, in_flight
from tests.gateway.fake_engine import MODEL, FakeEngine, Job
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = ASK | {"stream": True}
ROUTE = "/v1/chat/completions"
KEY = {"Idempotency-Key": "order-7"}


class Paused:
    """Says one, waits for go, says two."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        await job.say("one")
        await self.go.wait()
        await job.say("two")
        await job.finish()


async def dead(*_: object) -> None:
    """What a gateway that died does."""


async def post(client: httpx.AsyncClient, body: dict[str, Any] = ASK, key: dict[str, str] = KEY) -> httpx.Response:
    return await client.post(ROUTE, json=body, headers=key)


def text_of(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def test_a_retry_attaches_while_the_first_runs_and_replays_when_it_has_finished(pair: Pair, engine: FakeEngine) -> None:
    engine.behave = paused = Paused()
    first = asyncio.create_task(post(pair.a, STREAM))
    await until(lambda: bool(engine.jobs), "the engine has it")
    streamed, whole = asyncio.create_task(post(pair.b, STREAM)), asyncio.create_task(post(pair.a))
    paused.go.set()
    answers = [await first, await streamed, await whole, await post(pair.b, STREAM), await post(pair.b)]
    assert len(engine.jobs) == 1
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert answers[0].text == answers[1].text == answers[3].text
    assert answers[2].json() == answers[4].json()
    assert text_of(answers[2]) == "onetwo"


async def test_another_body_under_the_key_is_a_conflict_that_names_both(pair: Pair, engine: FakeEngine) -> None:
    request = (await post(pair.a)).headers["x-request-id"]
    for client in (pair.a, pair.b):
        answer = await post(client, ASK | {"seed": 1})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (409, "idempotency_conflict", "Idempotency-Key")
        assert answer.headers["x-should-retry"] == "false"
        assert "'order-7'" in error["message"]
        assert request in error["message"]
    assert len(engine.jobs) == 1


async def test_of_many_calls_that_race_at_two_gateways_one_is_first(pair: Pair, engine: FakeEngine) -> None:
    answers = await asyncio.gather(*(post(client) for client in (pair.a, pair.b) * 8))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert {text_of(answer) for answer in answers} == {"Hello wörld"}
    assert len(engine.jobs) == 1


async def test_the_first_clients_going_does_not_cancel_while_another_reads_and_the_last_ones_does(
    pair: Pair, engine: FakeEngine
) -> None:
    engine.behave = Paused()
    first = asyncio.create_task(post(pair.a))
    await until(lambda: bool(engine.jobs), "the engine has it")
    async with pair.a.stream("POST", ROUTE, json=STREAM, headers=KEY) as second:
        parts = second.aiter_text()
        assert '"one"' in await anext(parts)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await in_flight(pair.a, 1)
        assert engine.cancelled == []
    await until(lambda: engine.cancelled == [engine.jobs[0].envelope.request], "the cancel broadcast")


async def test_a_reader_at_another_gateway_leaves_without_effect(
    pair: Pair, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it came so soon that its gateway queued the same work once more."""
    monkeypatch.setattr("gateway.idempotency.Claims.queued", dead)
    engine.behave = paused = Paused()
    first = asyncio.create_task(post(pair.a))
    await until(lambda: bool(engine.jobs), "the engine has it")
    async with pair.b.stream("POST", ROUTE, json=STREAM, headers=KEY) as second:
        await anext(second.aiter_text())
    await in_flight(pair.b, 0)
    paused.go.set()
    assert text_of(await first) == "onetwo"
    assert engine.cancelled == []


@pytest.mark.parametrize("code", ["cancelled", "attempts_exhausted", "context_length_exceeded"])
async def test_a_failure_that_may_pass_frees_the_key_and_another_is_replayed(pair: Pair, engine: FakeEngine, code: str) -> None:
    """The second begins with the seed of the first: it is the same answer."""

    async def behave(job: Job) -> None:
        await (job.fail(code) if len(engine.jobs) == 1 else job.finish())

    engine.behave = behave
    first, second = await post(pair.a), await post(pair.b)
    seeds = {job.envelope.sampling.seed for job in engine.jobs}
    assert first.json()["error"]["code"] == code
    assert len(seeds) == 1
    if code == "context_length_exceeded":
        assert second.content == first.content
        assert len(engine.jobs) == 1
    else:
        assert second.status_code == 200
        assert second.headers["x-request-id"] != first.headers["x-request-id"]


async def test_a_request_that_is_being_cancelled_is_not_attached_to(pair: Pair, engine: FakeEngine, bus: NatsBus) -> None:
    engine.behave, engine.deaf = Paused(), True
    first = asyncio.create_task(post(pair.a))
    await until(lambda: bool(engine.jobs), "the engine has it")
    await bus.mark_cancelled(engine.jobs[0].envelope.request)
    second = asyncio.create_task(post(pair.b))
    await until(lambda: len(engine.jobs) == 2, "the second begins anew")
    assert engine.jobs[0].envelope.request != engine.jobs[1].envelope.request
    for job, asking in zip(engine.jobs, (first, second), strict=True):
        await job.finish()
        assert (await asking).headers["x-request-id"] == job.envelope.request


async def test_a_gateway_that_died_between_claim_and_queue_leaves_the_work_to_the_retry(
    pair: Pair, engine: FakeEngine, bus: NatsBus
) -> None:
    request, now_us = subjects.new_request_id(), bus.clock.now_us()
    print_of_body = Call(parse(ChatCompletionRequest, ASK), "chat", Principal("default"), "", 0).fingerprint
    claim = Claim(request, print_of_body, now_us, now_us + 60_000_000, 4711)
    assert await Claims(bus).take("default", "order-7", claim, None)
    answer = await post(pair.b)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, request)
    assert [(job.envelope.request, job.envelope.sampling.seed) for job in engine.jobs] == [(request, 4711)]
    assert engine.jobs[0].envelope.timeline.start_us == now_us


async def test_a_gateway_that_died_right_after_queueing_leaves_one_work_all_the_same(
    pair: Pair, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry queues again what it cannot know to be queued; the broker keeps one."""
    monkeypatch.setattr("gateway.idempotency.Claims.queued", dead)
    engine.behave = paused = Paused()
    first = asyncio.create_task(post(pair.a))
    await until(lambda: bool(engine.jobs), "the engine has it")
    second = asyncio.create_task(post(pair.b))
    await in_flight(pair.b, 1)
    paused.go.set()
    assert (await first).json() == (await second).json()
    assert len(engine.jobs) == 1


@pytest.mark.parametrize("keyed", [True, False])
async def test_work_of_which_nobody_knows_whether_it_is_queued_is_found_by_the_retry_and_cancelled_without_a_key(
    pair: Pair, engine: FakeEngine, bus: NatsBus, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    publish = bus.publish_confirmed

    async def unconfirmed(subject: str, data: bytes, message_id: str) -> None:
        await publish(subject, data, message_id)
        raise BusUnavailable("the confirmation was lost")

    monkeypatch.setattr(bus, "publish_confirmed", unconfirmed)
    first = await post(pair.a, key=KEY if keyed else {})
    monkeypatch.undo()
    assert (first.status_code, first.json()["error"]["code"]) == (503, "stage_unavailable")
    if keyed:
        second = await post(pair.b)
        assert second.headers["x-request-id"] == first.headers["x-request-id"]
        assert (text_of(second), len(engine.jobs), engine.cancelled) == ("Hello wörld", 1, [])
    else:
        await until(lambda: engine.cancelled == [first.headers["x-request-id"]], "the cancel broadcast")


async def test_a_key_that_is_none_is_refused_by_name_and_the_longest_is_taken(http: httpx.AsyncClient) -> None:
    for key in (b"", b"a b", b"a\tb", b"x" * 256, "é".encode("latin-1")):
        answer = await http.post(ROUTE, json=ASK, headers=[(b"Idempotency-Key", key)])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key"), key
    assert (await post(http, key={"Idempotency-Key": "x" * 255})).status_code == 200
    twice = await http.post(ROUTE, json=ASK, headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_socket_has_the_same_keys(pair: Pair, engine: FakeEngine) -> None:
    request = (await post(pair.a)).headers["x-request-id"]
    frame = {"type": "start", "id": "x", "kind": "chat", "body": ASK, "idempotency_key": "order-7"}
    async with websockets.connect(str(pair.b.base_url).replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        await socket.send(json.dumps(frame))
        frames = [json.loads(await socket.recv()) for _ in range(5)]
        await socket.send(json.dumps(frame | {"body": ASK | {"seed": 1}}))
        conflict = json.loads(await socket.recv())
        await socket.send(json.dumps(frame | {"idempotency_key": ""}))
        refused = json.loads(await socket.recv())
    assert {frame["request"] for frame in frames} == {request}
    assert "".join(frame.get("text", "") for frame in frames) == "Hello wörld"
    assert conflict["code"] == "idempotency_conflict"
    assert (refused["code"], refused["param"]) == ("invalid_value", "idempotency_key")
    assert len(engine.jobs) == 1


def test_the_keys_of_two_tenants_never_meet() -> None:
    assert subjects.idempotency("a", "k") != subjects.idempotency("b", "k")
