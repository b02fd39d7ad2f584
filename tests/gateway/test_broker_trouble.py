"""The broker dies under running streams, comes back or does not, or is too small: tokens or one typed error, never a
hang.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.nats_bus import NatsBus
from schemas.limits import BODY_BYTES_MAX, PAYLOAD_BYTES_MAX
from tests.gateway.conftest import eventually, gateway_process, running_gateway, settings
from tests.gateway.fake_engine import MODEL, FakeEngine, Job, silent
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = ASK | {"stream": True}
ROUTE = "/v1/chat/completions"


async def test_a_stream_survives_a_broker_that_is_killed_and_restarted(
    broker: NatsServer, http: httpx.AsyncClient, bus: NatsBus, engine: FakeEngine
) -> None:
    """The token log is gone with the broker; who holds the work says it again, and the client gets each token once."""
    back = asyncio.Event()

    async def behave(job: Job) -> None:
        await job.say("one")
        await back.wait()
        await job.say("two")
        await job.finish()

    engine.behave = behave
    read = ""
    async with http.stream("POST", ROUTE, json=STREAM) as answer:
        async for part in answer.aiter_text():
            read += part
            if '"one"' in read and not back.is_set():
                broker.kill()
                await until(lambda: not bus.connected, "the bus knows")
                broker.start()
                await until(lambda: bus.connected and engine.bus.connected, "both are back")
                back.set()
    chunks = [json.loads(line[6:]) for line in read.split("\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "onetwo"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_broker_that_stays_away_ends_streams_by_their_deadline_and_refuses_new_ones(
    broker: NatsServer, http: httpx.AsyncClient, bus: NatsBus, engine: FakeEngine
) -> None:
    async def behave(job: Job) -> None:
        await job.say("one")
        await asyncio.Event().wait()

    engine.behave = behave
    body = STREAM | {"headrace": {"deadline_ms": 700}}
    asking = [asyncio.create_task(http.post(ROUTE, json=body)) for _ in range(3)]
    await until(lambda: [job.index for job in engine.jobs] == [1, 1, 1], "all run")
    await engine.bus.flush()
    broker.kill()
    await until(lambda: not bus.connected, "the bus knows")
    refused = [await http.post(ROUTE, json=ASK, headers=keys) for keys in ({}, {"Idempotency-Key": "a"})]
    request = engine.jobs[0].envelope.request
    refused += [await http.get(f"/v1/requests/{request}/events"), await http.delete(f"/v1/requests/{request}")]
    answers = await asyncio.wait_for(asyncio.gather(*asking), 5)
    broker.start()
    await until(lambda: bus.connected and engine.bus.connected, "both are back")
    assert [(a.status_code, a.json()["error"]["code"]) for a in refused] == [(503, "stage_unavailable")] * 4
    for answer in answers:
        assert '"one"' in answer.text
        assert answer.text.count('"code": "deadline_exceeded"') == 1
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_broker_with_a_smaller_limit_is_a_start_error_of_one_line_with_both_numbers(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    path = tmp_path / "nats.conf"
    path.write_text(path.read_text().replace(f"max_payload: {PAYLOAD_BYTES_MAX}", "max_payload: 1048576"))
    server.start()
    try:
        async with gateway_process(server) as process:
            assert process.stderr is not None
            told = (await asyncio.wait_for(process.stderr.read(), 30)).decode()
            status = await process.wait()
    finally:
        server.kill()
    assert status == 2
    assert told.count("\n") == 1
    assert f"1048576 bytes at most, and a request may need {PAYLOAD_BYTES_MAX}" in told


async def test_a_prompt_over_the_limit_is_413_before_anything_is_queued(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    message = {"role": "user", "content": "x" * BODY_BYTES_MAX}
    answer = await http.post(ROUTE, json=ASK | {"messages": [message]}, headers={"Idempotency-Key": "big"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert (await http.post(ROUTE, json=ASK, headers={"Idempotency-Key": "big"})).status_code == 200
    assert len(engine.jobs) == 1


async def test_the_largest_prompt_that_is_taken_passes_the_broker(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert engine.presence.model is not None
    large = engine.presence.model.model_copy(update={"context_tokens": BODY_BYTES_MAX})
    engine.presence = engine.presence.model_copy(update={"model": large})
    await engine.tell()

    async def known() -> bool:
        return bool((await http.get("/v1/models")).json()["data"][0]["max_model_len"] == BODY_BYTES_MAX)

    await eventually(known, "the gateway knows it")
    room = BODY_BYTES_MAX - len(json.dumps(ASK))
    message = {"role": "user", "content": "hi" + "é" * (room // 2)}
    body = json.dumps(ASK | {"messages": [message]}, ensure_ascii=False).encode()
    assert BODY_BYTES_MAX - 4 < len(body) <= BODY_BYTES_MAX
    answer = await http.post(ROUTE, content=body)
    assert (answer.status_code, len(engine.jobs)) == (200, 1)


async def test_retry_after_is_the_measured_rate_at_which_work_ends(
    broker: NatsServer, bus: NatsBus, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.retry_after.DrainRate.per_second", lambda *_: 0.5)
    engine.behave = silent
    engine.presence = engine.presence.model_copy(update={"gauges": {"waiting_batch": 3}})
    async with running_gateway(settings(broker, requests_max=1, drain_s=0.1), bus) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            first = asyncio.create_task(client.post(ROUTE, json=ASK))
            await until(lambda: bool(engine.jobs), "the engine has the first")
            second = await client.post(ROUTE, json=ASK)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    assert (second.status_code, second.headers["retry-after"]) == (429, "8")
