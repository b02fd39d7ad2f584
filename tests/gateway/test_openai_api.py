"""The OpenAI surface over a real broker: shapes, status lines, errors, and what a client's going means."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from runtime.nats_bus import NatsBus
from schemas.envelope import ChatInput
from schemas.events import Verdict
from tests.gateway.conftest import running_gateway, settings
from tests.gateway.fake_engine import MODEL, FakeEngine, Job, silent
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO}


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)


async def forever(job: Job) -> None:
    """One token, then silence."""
    await job.say("one")
    await asyncio.Event().wait()


def data_of(text: str) -> list[Any]:
    """The JSON of every data line but [DONE], which must be the last."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_the_openai_client_gets_the_same_text_streamed_and_not(gateway_url: str) -> None:
    async with client_of(gateway_url) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello wörld"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 4, 11)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello wörld"
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 11
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1


async def test_text_completions_have_their_own_shapes(gateway_url: str) -> None:
    async with client_of(gateway_url) as client:
        whole = await client.completions.create(model=MODEL, prompt="Say")
        chunks = [c async for c in await client.completions.create(model=MODEL, prompt=[1, 2, 3], stream=True)]
    assert whole.object == "text_completion"
    assert whole.choices[0].text == "Hello wörld"
    assert "".join(c.choices[0].text for c in chunks) == "Hello wörld"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models_are_what_live_engines_serve(gateway_url: str) -> None:
    async with client_of(gateway_url) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL]


async def test_a_stream_is_these_bytes(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=ASK | {"stream": True})
    request = answer.headers["x-request-id"]
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert [event.split("\n")[0] for event in events if event.startswith("id:")] == [
        f"id: {request}:1",
        f"id: {request}:2",
        f"id: {request}:3",
        f"id: {request}:4",
    ]
    chunks = data_of(answer.text)
    for chunk in chunks:
        assert (chunk["id"], chunk["object"], chunk["model"]) == (f"chatcmpl-{request}", "chat.completion.chunk", MODEL)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "Hel"}, None),
            ({"content": "lo"}, None),
            ({"content": " wörld"}, None),
            ({}, "stop"),
        ]
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timings_are_contiguous_and_sum_to_the_total(http: httpx.AsyncClient, stream: bool) -> None:
    body = ASK | {"stream": stream, "headrace": {"timings": True}}
    answer = await http.post("/v1/chat/completions", json=body)
    part = (data_of(answer.text)[-1] if stream else answer.json())["headrace"]
    timings = part["timings"]
    assert part["request"] == answer.headers["x-request-id"]
    assert list(timings["spans_ms"]) == ["gateway.accept", "engine.queue", "engine.decode", "gateway.reply"]
    microseconds = [round(spent * 1000) for spent in timings["spans_ms"].values()]
    assert sum(microseconds) == round(timings["total_ms"] * 1000)
    assert min(microseconds) >= 0


async def test_nothing_is_said_when_there_is_nothing_to_say(http: httpx.AsyncClient) -> None:
    assert "headrace" not in (await http.post("/v1/chat/completions", json=ASK)).json()


async def test_a_rail_that_ends_the_answer_is_content_filter_with_its_verdict(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    async def behave(job: Job) -> None:
        await job.say("My key is ")
        await job.finish("content_filter", (Verdict("aws-key", "output", "block", 1),))

    engine.behave = behave
    body = ASK | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = data_of((await http.post("/v1/chat/completions", json=body)).text)
    assert chunks[-2]["choices"][0]["finish_reason"] == "content_filter"
    assert chunks[-1]["headrace"]["verdicts"] == [{"rule": "aws-key", "where": "output", "action": "block", "count": 1}]


async def test_the_envelope_holds_the_request(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = ASK | {
        "seed": 11,
        "max_completion_tokens": 5,
        "stop": "END",
        "top_k": -1,
        "headrace": {"priority": "interactive", "deadline_ms": 5000},
    }
    body["messages"] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = await http.post("/v1/chat/completions", json=body)
    envelope = engine.jobs[0].envelope
    assert envelope.request == answer.headers["x-request-id"]
    assert isinstance(envelope.input, ChatInput)
    assert [(m.role, m.content) for m in envelope.input.messages] == [("system", "be brief"), ("user", "ab")]
    assert (envelope.sampling.seed, envelope.sampling.max_tokens, envelope.sampling.top_k) == (11, 5, None)
    assert envelope.sampling.stop == ("END",)
    assert envelope.priority == "interactive"
    assert envelope.deadline_us - envelope.timeline.start_us == 5_000_000


async def test_a_failure_before_the_first_token_is_a_status(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    failures = {
        "context_length_exceeded": (400, "invalid_request_error"),
        "collection_not_found": (404, "invalid_request_error"),
        "deadline_exceeded": (504, "timeout"),
        "attempts_exhausted": (500, "server_error"),
    }

    async def behave(job: Job) -> None:
        await job.fail(list(failures)[(len(engine.jobs) - 1) // 2])

    engine.behave = behave
    for code, (status, kind) in failures.items():
        for stream in (False, True):
            answer = await http.post("/v1/chat/completions", json=ASK | {"stream": stream})
            assert answer.status_code == status
            assert answer.json()["error"] == {"message": "it went wrong", "type": kind, "param": None, "code": code}


async def test_a_failure_after_a_token_comes_in_band(gateway_url: str, engine: FakeEngine) -> None:
    async def behave(job: Job) -> None:
        await job.say("one")
        # The stream must be open before the failure: it is, once the token is in the log and the client has read it.
        await told.wait()
        await job.fail("attempts_exhausted")

    told = asyncio.Event()
    engine.behave = behave
    async with client_of(gateway_url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)

        async def read() -> None:
            async for _ in stream:
                told.set()

        with pytest.raises(openai.APIError, match="it went wrong") as caught:
            await read()
    assert caught.value.code == "attempts_exhausted"


async def test_a_silent_stream_is_kept_alive_by_comments(broker: NatsServer, bus: NatsBus, engine: FakeEngine) -> None:
    silence = asyncio.Event()

    async def behave(job: Job) -> None:
        await silence.wait()
        await job.say("late")
        await job.finish()

    engine.behave = behave
    async with running_gateway(settings(broker, keepalive_s=0.05), bus) as url, httpx.AsyncClient() as client:
        async with client.stream("POST", url + "/v1/chat/completions", json=ASK | {"stream": True}) as answer:
            assert answer.status_code == 200
            text = ""
            async for part in answer.aiter_text():
                text += part
                if text.count(": keepalive") >= 2:
                    silence.set()
    assert text.index('"role"') < text.index("late") < text.index("[DONE]")
    assert text.index(": keepalive\n") < text.index("late")


async def test_a_stock_client_survives_silence_after_its_first_text(
    broker: NatsServer, bus: NatsBus, engine: FakeEngine
) -> None:
    """A keepalive must not end an event: after a chunk with an id, a stock client would take it for an event without data."""
    kept_alive = asyncio.Event()

    async def behave(job: Job) -> None:
        await job.say("one ")
        await kept_alive.wait()
        await job.say("two")
        await job.finish()

    async def watch(request: httpx.Response) -> None:
        asyncio.get_running_loop().call_later(0.3, kept_alive.set)

    engine.behave = behave
    async with running_gateway(settings(broker, keepalive_s=0.03), bus) as url:
        hooks = httpx.AsyncClient(event_hooks={"response": [watch]})
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", http_client=hooks) as client:
            stream = await client.chat.completions.create(**ASK, stream=True)  # type: ignore[call-overload]
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "one two"


@pytest.mark.parametrize("behave", [forever, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request(
    gateway_url: str, engine: FakeEngine, bus: NatsBus, stream: bool, behave: Any
) -> None:
    engine.behave = behave
    async with httpx.AsyncClient(base_url=gateway_url) as client:
        asking = asyncio.create_task(_read(client, ASK | {"stream": stream}))
        await until(lambda: bool(engine.jobs), "the engine has the request")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    request = engine.jobs[0].envelope.request
    await until(lambda: engine.cancelled == [request], "the cancel broadcast")
    assert await bus.is_cancelled(request)


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_text():
            pass


async def test_a_request_to_keep_outlives_its_client(gateway_url: str, engine: FakeEngine, bus: NatsBus) -> None:
    go = asyncio.Event()

    async def behave(job: Job) -> None:
        await job.say("one")
        await go.wait()
        await job.finish()

    engine.behave = behave
    async with httpx.AsyncClient(base_url=gateway_url) as client:
        body = ASK | {"stream": True, "headrace": {"on_disconnect": "keep"}}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_text())
        request = engine.jobs[0].envelope.request
        while "in_flight_requests 0.0" not in (await client.get("/metrics")).text:
            pass
        go.set()
        while (state := (await client.get(f"/v1/requests/{request}")).json())["status"] == "running":
            pass
    assert (state["status"], state["tokens"], state["finish_reason"]) == ("completed", 1, "stop")
    assert engine.cancelled == []


async def test_a_deadline_that_no_worker_minds_is_minded_by_the_gateway(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.behave = silent
    answer = await http.post("/v1/chat/completions", json=ASK | {"headrace": {"deadline_ms": 1}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    await until(lambda: len(engine.cancelled) == 1, "the cancel broadcast")


async def test_an_own_fault_in_the_middle_of_a_stream_is_told_in_band(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.chunks.Chunks.tokens", broken)
    answer = await http.post("/v1/chat/completions", json=ASK | {"stream": True})
    assert data_of(answer.text)[-1]["error"]["code"] == "internal"
    assert "in_flight_requests 0.0" in (await http.get("/metrics")).text


async def test_a_prompt_that_cannot_fit_is_refused_by_its_length_alone(
    broker: NatsServer, bus: NatsBus, engine: FakeEngine
) -> None:
    assert engine.presence.model is not None
    card = engine.presence.model.model_copy(update={"token_bytes_max": 64})
    engine.presence = engine.presence.model_copy(update={"model": card})
    async with running_gateway(settings(broker), bus) as url, httpx.AsyncClient() as client:
        body = {"model": MODEL, "prompt": "x" * (64 * (card.context_tokens + 1))}
        answer = await client.post(url + "/v1/completions", json=body, timeout=10)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
