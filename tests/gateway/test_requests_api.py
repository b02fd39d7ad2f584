"""A request's state, its replay, and DELETE, on a real log."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from runtime.nats_bus import NatsBus
from schemas import subjects
from tests.gateway.conftest import settings, unready_gateway
from tests.gateway.fake_engine import MODEL, FakeEngine, Job
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(id, frame) of each server-sent event."""
    found = []
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        found.append((name.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_finished_request_is_told_with_its_timings(http: httpx.AsyncClient) -> None:
    request = (await http.post("/v1/chat/completions", json=ASK)).headers["x-request-id"]
    state = (await http.get(f"/v1/requests/{request}")).json()
    assert (state["id"], state["status"], state["model"], state["tokens"]) == (request, "completed", MODEL, 4)
    assert (state["finish_reason"], state["usage"]["total_tokens"], state["error"]) == ("stop", 11, None)
    assert list(state["timings"]["spans_ms"])[-1] == "gateway.reply"


async def test_a_failed_request_is_told_with_its_error(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.behave = lambda job: job.fail("context_length_exceeded")
    request = (await http.post("/v1/chat/completions", json=ASK)).headers["x-request-id"]
    state = (await http.get(f"/v1/requests/{request}")).json()
    assert (state["status"], state["error"]["code"]) == ("failed", "context_length_exceeded")


async def test_events_are_replayed_from_an_index_or_after_the_last_event(http: httpx.AsyncClient) -> None:
    request = (await http.post("/v1/chat/completions", json=ASK)).headers["x-request-id"]
    for query, last, indices in (("", None, [0, 1, 2]), ("?from=2", None, [2]), ("?from=0", 1, [1, 2])):
        headers = {} if last is None else {"Last-Event-ID": f"{request}:{last}"}
        answer = await http.get(f"/v1/requests/{request}/events{query}", headers=headers)
        found = events_of(answer.text)
        assert answer.headers["x-request-id"] == request
        assert [frame["index"] for _, frame in found if frame["type"] == "token"] == indices
        assert [name for name, _ in found] == [f"{request}:{index + 1}" for index in indices] + [f"{request}:4"]
        assert found[-1][1]["type"] == "done"


async def test_another_gateway_tells_and_replays_what_it_never_took(http: httpx.AsyncClient, broker: NatsServer) -> None:
    request = (await http.post("/v1/chat/completions", json=ASK)).headers["x-request-id"]
    bus = await NatsBus.connect(broker.url, "other")
    async with unready_gateway(settings(broker), bus) as other:
        state = (await other.get(f"/v1/requests/{request}")).json()
        events = events_of((await other.get(f"/v1/requests/{request}/events")).text)
        deleted = await other.delete(f"/v1/requests/{request}")
    await bus.close()
    assert (state["status"], state["tokens"]) == ("completed", 4)
    assert "".join(frame.get("text", "") for _, frame in events) == "Hello wörld"
    assert (deleted.status_code, deleted.json()["status"]) == (200, "completed")


async def test_events_follow_a_request_that_still_runs(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    go = asyncio.Event()

    async def behave(job: Job) -> None:
        await job.say("a")
        await go.wait()
        await job.say("b")
        await job.finish()

    engine.behave = behave
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=ASK))
    await until(lambda: bool(engine.jobs), "the engine has it")
    request = engine.jobs[0].envelope.request
    text = ""
    async with http.stream("GET", f"/v1/requests/{request}/events") as answer:
        async for part in answer.aiter_text():
            text += part
            go.set()
    assert [frame.get("text") for _, frame in events_of(text)] == ["a", "b", None]
    assert (await asking).json()["choices"][0]["message"]["content"] == "ab"


async def test_an_index_that_is_none_is_refused(http: httpx.AsyncClient) -> None:
    for query in ("?from=-1", "?from=x", "?from=1e3", "?from=99999999999"):
        answer = await http.get(f"/v1/requests/{'0' * 32}/events{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from"), query


async def test_delete_ends_every_stream_of_the_request_and_nothing_else(
    http: httpx.AsyncClient, engine: FakeEngine, bus: NatsBus
) -> None:
    async def behave(job: Job) -> None:
        await asyncio.Event().wait()

    engine.behave = behave
    asking = [asyncio.create_task(http.post("/v1/chat/completions", json=ASK)) for _ in range(2)]
    await until(lambda: len(engine.jobs) == 2, "the engine has both")
    first, second = (job.envelope.request for job in engine.jobs)
    deleted = await http.delete(f"/v1/requests/{first}")
    done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    [answer] = [task.result() for task in done]
    state = (await http.get(f"/v1/requests/{first}")).json()["status"]
    await http.delete(f"/v1/requests/{second}")
    await asyncio.gather(*asking)
    assert deleted.json()["status"] == "cancelled"
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
    assert answer.headers["x-request-id"] == first
    assert state == "cancelled"
    assert await bus.is_cancelled(first)
    assert engine.cancelled == [first, second]


async def test_delete_leaves_what_has_ended_as_it_is(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = (await http.post("/v1/chat/completions", json=ASK)).headers["x-request-id"]
    assert (await http.delete(f"/v1/requests/{request}")).json()["status"] == "completed"
    assert engine.cancelled == []


async def test_a_replay_that_the_log_no_longer_holds_is_410(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = (await http.post("/v1/chat/completions", json=ASK)).headers["x-request-id"]
    for stream in (subjects.REPLY_STREAM, subjects.END_STREAM):
        await engine.bus.client.jetstream().purge_stream(stream)
    answer = await http.get(f"/v1/requests/{request}/events")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "replay_expired")
    assert (await http.get(f"/v1/requests/{request}")).json()["status"] == "completed"
