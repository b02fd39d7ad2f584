"""The gateway as a process: listening, readiness, metrics, the playground, and the way it stops."""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from gateway.app import run
from gateway.listener import StartError, listen
from gateway.ownership import Ownership
from gateway.resume import Record, Registry
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from schemas.errors import HeadraceError
from tests.gateway.conftest import running_gateway, settings
from tests.gateway.fake_engine import MODEL, FakeEngine, Job
from tests.support.broker import NatsServer
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def test_a_port_in_use_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(Settings(home=Path("unused"), port=port)) == 1
    assert capsys.readouterr().err == f"headrace gateway: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_a_host_that_others_reach_is_refused_while_there_are_no_keys(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Settings(home=Path("unused"), host=host)) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no API keys" in told


def test_loopback_is_taken() -> None:
    for host in ("127.0.0.1", "localhost"):
        listen(host, 0).close()
    with pytest.raises(StartError):
        listen("", 0)


def test_the_registry_forgets_the_oldest_that_nobody_reads() -> None:
    class Reader:
        gone = False

        def end(self, error: HeadraceError) -> None: ...

    registry = Registry(records_max=2)
    records = [Record(ownership(name), taken_here=True) for name in "abc"]
    records[0].readers.add(Reader())
    for record in records:
        registry.add(record)
    assert [registry.get(name) is not None for name in "abc"] == [True, False, True]


def ownership(request: str) -> Ownership:
    return Ownership(request, "default", MODEL, "chat", 0, 1, "", "cancel", False)


@pytest.mark.anyio
async def test_the_playground_is_one_page_without_outside_assets(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/v1/chat/completions" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


@pytest.mark.anyio
async def test_metrics_count_requests_and_show_the_workers_gauges(http: httpx.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=ASK)
    await http.post("/v1/chat/completions", json=ASK | {"n": 2})
    text = (await http.get("/metrics")).text
    for line in (
        'headrace_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'headrace_gateway_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        "headrace_gateway_time_to_first_token_seconds_count 1.0",
        "headrace_gateway_inter_token_latency_seconds_count 3.0",
        "headrace_gateway_end_to_end_seconds_count 1.0",
        "headrace_gateway_in_flight_requests 0.0",
        "headrace_gateway_tokens_total 4.0",
        'headrace_gateway_endings_total{outcome="stop"} 1.0',
        'headrace_engine_waiting{worker="fake-1"} 5.0',
        'headrace_engine_kv_blocks_free{worker="fake-1"} 100.0',
    ):
        assert line in text.splitlines(), text


@pytest.mark.anyio
async def test_a_worker_that_falls_silent_is_gone(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await http.get("/readyz")).status_code == 200
    monkeypatch.setattr("gateway.fleet.PRESENCE_TIMEOUT_S", 0.0)
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()["missing"]) == (503, ["engine"])
    assert (await http.get("/healthz")).status_code == 200


@pytest.mark.anyio
async def test_a_drain_serves_who_comes_and_ends_typed_what_outlasts_it(
    broker: NatsServer, bus: NatsBus, engine: FakeEngine
) -> None:
    async def behave(job: Job) -> None:
        await job.say("one")
        if job is engine.jobs[0]:
            await asyncio.Event().wait()
        await job.finish()

    engine.behave = behave
    async with httpx.AsyncClient() as client:
        async with running_gateway(settings(broker, drain_s=2.0), bus) as url:
            lasting = asyncio.create_task(client.post(url + "/v1/chat/completions", json=ASK))
            await until(lambda: len(engine.jobs) == 1, "the first runs")
            coming = asyncio.create_task(_ask_once_it_drains(client, url))
        served, refused = await coming
        ended = await lasting
    assert served.json()["choices"][0]["message"]["content"] == "one"
    assert served.headers["connection"] == "close"
    assert refused == "shutting_down"
    assert (ended.status_code, ended.json()["error"]["code"]) == (503, "shutting_down")
    assert engine.cancelled == []


async def _ask_once_it_drains(client: httpx.AsyncClient, url: str) -> tuple[httpx.Response, str]:
    """Once /readyz says that the gateway stops: an HTTP answer, and the code that a socket's start gets."""
    async with websockets.connect(url.replace("http", "ws") + "/v1/ws", proxy=None) as socket_:
        while "gateway" not in (await client.get(url + "/readyz")).json()["missing"]:
            pass
        answer = await client.post(url + "/v1/chat/completions", json=ASK)
        await socket_.send(json.dumps({"type": "start", "id": "late", "kind": "chat", "body": ASK}))
        return answer, json.loads(await socket_.recv())["code"]


@pytest.mark.parametrize("kind", ["closed", "not listening"])
def test_an_inherited_listener_that_is_none_is_one_line_and_a_status(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        descriptor = other.detach()
        if kind == "closed":
            os.close(descriptor)
        try:
            assert run(Settings(home=Path("unused"), listen_fd=descriptor)) == 2
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"listen_fd {descriptor}" in told


@pytest.mark.anyio
async def test_an_open_socket_does_not_hold_up_the_stop(broker: NatsServer, bus: NatsBus) -> None:
    async with running_gateway(settings(broker), bus, wait_ready=False) as url:
        socket_ = await websockets.connect(url.replace("http", "ws") + "/v1/ws", proxy=None)
    with pytest.raises(websockets.ConnectionClosed) as caught:
        await socket_.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1012
