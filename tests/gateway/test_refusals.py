"""What is refused and how: missing stages, wrong bodies and paths, our own faults, a broker that is away."""

import asyncio
from typing import Any

import httpx
import pytest

from runtime.bus import Delivery
from runtime.nats_bus import NatsBus
from schemas import subjects
from schemas.envelope import Envelope
from schemas.subjects import STAGES
from tests.gateway.conftest import running_gateway, settings, unready_gateway
from tests.gateway.fake_engine import MODEL, FakeEngine, silent, tell, worker
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_missing_stage_is_named_at_once(broker: NatsServer, bus: NatsBus, engine: FakeEngine) -> None:
    values = settings(broker, rails_output={"secrets": "redact"})
    async with running_gateway(values, bus, wait_ready=False) as url, httpx.AsyncClient(base_url=url) as client:
        await tell(engine.bus, worker("rails"))
        ready = await client.get("/readyz")
        while "rails" in ready.json()["missing"] or "engine" in ready.json()["missing"]:
            ready = await client.get("/readyz")
        answer = await client.post("/v1/chat/completions", json=ASK)
    assert (ready.status_code, ready.json()["missing"]) == (503, ["guard"])
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "stage_unavailable"
    assert "guard: no worker is alive" in answer.json()["error"]["message"]


async def test_an_engine_that_is_not_ready_is_named_with_its_reason(
    broker: NatsServer, bus: NatsBus, engine: FakeEngine
) -> None:
    engine.presence = engine.presence.model_copy(update={"ready": False, "reason": "loading weights"})
    async with unready_gateway(settings(broker), bus) as client:
        while "loading weights" not in (await client.get("/readyz")).text:
            pass
        answer = await client.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 503
    assert "loading weights" in answer.json()["error"]["message"]


async def test_a_stage_that_was_ready_a_moment_ago_still_gets_work_and_later_not(
    broker: NatsServer, bus: NatsBus, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is being restarted has a durable queue: its clients wait a moment, and are not refused."""
    async with running_gateway(settings(broker), bus) as url, httpx.AsyncClient(base_url=url) as client:
        engine.presence = engine.presence.model_copy(update={"ready": False, "reason": "it stops"})
        await engine.tell()
        while (await client.get("/readyz")).status_code == 200:
            pass
        taken = await client.post("/v1/chat/completions", json=ASK)
        monkeypatch.setattr("gateway.fleet.SUCCESSION_S", 0.0)
        refused = await client.post("/v1/chat/completions", json=ASK)
    assert taken.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_unavailable")


async def test_without_any_engine_a_model_is_not_unknown_but_unavailable(broker: NatsServer, bus: NatsBus) -> None:
    async with unready_gateway(settings(broker), bus) as client:
        answer = await client.post("/v1/chat/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stage_unavailable")


async def test_a_model_that_nobody_has_is_404_and_the_known_ones_are_listed(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=ASK | {"model": "gpt-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert MODEL in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.usefixtures("nobody_answers")
async def test_work_goes_to_the_first_stage_of_its_slip(broker: NatsServer, bus: NatsBus, engine: FakeEngine) -> None:
    """With rails on, nothing reaches the engine before the rails stage has passed it on."""
    taken: list[Envelope] = []

    async def take(delivery: Delivery) -> None:
        taken.append(Envelope.decode(delivery.data))
        await delivery.ack()

    puller = await engine.bus.pull(subjects.work("rails"), subjects.work_consumer("rails"), take, lambda: None)
    await puller.ask(1)
    values = settings(broker, rails_output={"secrets": "redact"})
    async with running_gateway(values, bus, wait_ready=False) as url, httpx.AsyncClient(base_url=url) as client:
        for stage in STAGES[:2] + STAGES[3:]:
            await tell(engine.bus, worker(stage))
        while (await client.get("/readyz")).status_code == 503:
            pass
        body = ASK | {"headrace": {"retrieval": {"collection": "docs"}}}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: bool(taken), "the rails stage has it")
        await client.delete(f"/v1/requests/{taken[0].request}")
        await asking
    assert taken[0].slip == ("rails", "retrieval", "engine")
    assert [mark.name for mark in taken[0].timeline.marks] == ["gateway.accept"]
    assert engine.jobs == []


async def test_a_wrong_path_or_method_has_openais_shape(http: httpx.AsyncClient) -> None:
    for method, path, status, code in (
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/requests/abc", 405, "method_not_allowed"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/requests/abc", 404, "not_found"),
        ("GET", "/v1/requests/" + "0" * 32 + "/events", 404, "not_found"),
        ("DELETE", "/v1/requests/" + "0" * 32, 404, "not_found"),
    ):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_that_cannot_be_is_the_clients_fault_by_name(http: httpx.AsyncClient) -> None:
    for content, status, code in (
        (b"{", 400, "malformed_request"),
        (b"", 400, "malformed_request"),
        (b'{"model": "\xff"}', 400, "malformed_request"),
        (b'{"model": NaN}', 400, "malformed_request"),
        (b'{"model": "\\ud800"}', 400, "malformed_request"),
        (b"[" * 100_000, 400, "malformed_request"),
        (b"[]", 400, "invalid_value"),
        (b'{"model": "a", "model": "b"}', 400, "invalid_value"),
        (b" " * (2 * 1024 * 1024 + 1), 413, "payload_too_large"),
    ):
        answer = await http.post("/v1/chat/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), content[:20]
        assert answer.headers["x-request-id"]


async def test_a_body_without_a_length_is_bounded_while_it_is_read(http: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(40):
            yield b" " * 65536

    answer = await http.post("/v1/chat/completions", content=endless())
    assert answer.status_code == 413


async def test_a_page_of_another_origin_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=ASK, headers={"Origin": "http://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


async def test_an_own_fault_is_500_and_never_the_clients(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.fleet.Fleet.models", broken)
    answer = await http.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


async def test_more_requests_than_fit_are_told_to_come_again(broker: NatsServer, bus: NatsBus, engine: FakeEngine) -> None:
    engine.behave = silent
    async with running_gateway(settings(broker, requests_max=1, drain_s=0.1), bus) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            first = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
            await until(lambda: bool(engine.jobs), "the engine has the first")
            second = await client.post("/v1/chat/completions", json=ASK)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "overloaded")
    assert "x-should-retry" not in second.headers
    assert second.headers["retry-after"] == "1"


async def test_a_broker_that_is_away_is_503_at_once(
    broker: NatsServer, http: httpx.AsyncClient, bus: NatsBus, engine: FakeEngine
) -> None:
    broker.kill()
    await until(lambda: not bus.connected, "the bus knows")
    answer = await http.post("/v1/chat/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stage_unavailable")
    assert "broker" in (await http.get("/readyz")).json()["missing"]
    assert (await http.get("/healthz")).status_code == 200
    broker.start()
    await until(lambda: bus.connected and engine.bus.connected, "both are back")
