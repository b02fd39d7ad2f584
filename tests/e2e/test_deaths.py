"""Whoever dies in the middle of a stream: the client gets the rest, each token once, the same text."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest

from schemas import subjects
from tests.support.stack import RunningStack
from tests.support.waiting import until_now

LONG = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Write a story about a mill on a river, in many sentences."}],
    "max_tokens": 160,
    "ignore_eos": True,
    "stream": True,
}
GREEDY = LONG | {"temperature": 0}
SEEDED = LONG | {"temperature": 0.9, "top_p": 0.95, "seed": 11}


def pieces(stack: RunningStack, body: dict[str, object]) -> Iterator[str]:
    """Text as it comes; fails on an error chunk, a second end, or an end without [DONE]."""
    ends = 0
    for _, _, chunk in chunks(stack, body):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            ends += choice["finish_reason"] is not None
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]
    assert ends == 1


def chunks(stack: RunningStack, body: dict[str, object]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Each chunk with the request that it is of and the index after it; fails on an end without [DONE]."""
    index = 0
    with httpx.stream("POST", stack.url + "/v1/chat/completions", json=body, timeout=90) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("id: "):
                index = int(line.rpartition(":")[2])
            elif line.startswith("data: "):
                yield answer.headers["X-Request-Id"], index, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


@pytest.mark.parametrize("body", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("victim", ["worker-engine", "worker-guardrail"])
def test_a_killed_worker_is_not_noticed_in_the_text(stack: RunningStack, victim: str, body: dict[str, object]) -> None:
    undisturbed = "".join(pieces(stack, body))
    text = ""
    for count, piece in enumerate(pieces(stack, body)):
        text += piece
        if count == 20:
            stack.kill(victim)
    assert text == undisturbed


FACT = "The Quillhaven mill was bought by Tamsin Oakes in 1911."


@pytest.fixture(scope="module")
def collection(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> str:
    document: Path = tmp_path_factory.mktemp("documents") / "mill.md"
    document.write_text(FACT)
    done = stack.command("ingest", str(document), "--collection", "mills")
    assert done.returncode == 0, done.stderr
    return "mills"


def test_a_retrieval_worker_that_dies_holding_a_request_is_succeeded(stack: RunningStack, collection: str) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Who bought the Quillhaven mill?"}],
        "temperature": 0,
        "max_tokens": 24,
        "headrace": {"retrieval": {"collection": collection}},
    }
    victim = stack.pid("worker-retrieval")
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, stack.url + "/v1/chat/completions", json=body, timeout=60)
            until_now(lambda: held(stack, subjects.work_consumer("retrieval")) == 1, "it holds the request")
            os.kill(victim, signal.SIGKILL)
            answer = asked.result()
    finally:
        if stack.pid("worker-retrieval") == victim:
            os.kill(victim, signal.SIGKILL)
    assert answer.status_code == 200, answer.text
    assert "Oakes" in answer.json()["choices"][0]["message"]["content"]


def held(stack: RunningStack, consumer: str) -> int:
    """Work items that this consumer's workers hold."""

    async def ask() -> int:
        connection = await nats.connect(stack.nats_url)
        try:
            info = await connection.jetstream().consumer_info(subjects.WORK_STREAM, consumer)
            return info.num_ack_pending or 0
        finally:
            await connection.close()

    return asyncio.run(ask())


def test_a_killed_gateways_client_goes_on_where_it_was(stack: RunningStack) -> None:
    body = GREEDY | {"headrace": {"on_disconnect": "keep"}}
    undisturbed = "".join(pieces(stack, body))
    request, text, index = broken_stream(stack, body, after=20)
    for event in resumed(stack, request, index):
        text += event
    assert text == undisturbed


def broken_stream(stack: RunningStack, body: dict[str, object], after: int) -> tuple[str, str, int]:
    """A stream whose gateway is killed once it has said so many tokens: the request, the text, the next index."""
    request, text, index = "", "", 0
    try:
        for request, index, chunk in chunks(stack, body):  # noqa: B007 - what the last one said is wanted
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if index == after:
                stack.kill("gateway")
    except httpx.HTTPError:
        return request, text, index
    raise AssertionError("the stream outlived its gateway")


def resumed(stack: RunningStack, request: str, index: int) -> Iterator[str]:
    """The texts from that index to the one end."""
    path = f"/v1/requests/{request}/events?from={index}"
    with httpx.stream("GET", stack.url + path, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            frame = json.loads(line[6:]) if line.startswith("data: ") else {"type": ""}
            assert frame["type"] != "error", frame
            if frame["type"] == "done":
                return
            if frame["type"] == "token":
                yield frame["text"]
    raise AssertionError("no end")


def test_a_rolling_restart_under_load_is_noticed_by_no_client(stack: RunningStack, collection: str) -> None:
    """Each process gets SIGTERM in its turn, while clients ask on and on, each call on a connection of its own."""
    stop = False

    def client(number: int) -> int:
        calls = 0
        while not stop:
            body = LONG | {"max_tokens": 12, "seed": number, "temperature": 0.5}
            if number % 2:
                body |= {"headrace": {"retrieval": {"collection": collection}}}
            assert "".join(pieces(stack, body))
            calls += 1
        return calls

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, number) for number in range(6)]
        try:
            for name in ("worker-guardrail", "worker-retrieval", "worker-engine", "gateway"):
                restart(stack, name)
        finally:
            stop = True
        assert all(each.result() > 0 for each in clients)


def restart(stack: RunningStack, name: str) -> None:
    """SIGTERM; returns when a successor is there and everything is ready."""
    old = stack.pid(name)
    assert old is not None
    os.kill(old, signal.SIGTERM)
    until_now(lambda: stack.pid(name) not in (None, old), f"a successor of {name}", seconds=60)
    until_now(lambda: httpx.get(stack.url + "/readyz", timeout=30).status_code == 200, f"ready after {name}", seconds=60)
