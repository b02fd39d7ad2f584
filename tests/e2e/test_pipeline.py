"""A real prompt through every stage to a real answer, by the clients that people use."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import websockets

from tests.support.stack import RunningStack

MODEL = "smollm2-135m"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def test_the_capital_of_france_is_paris_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=40)
    streamed = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=40, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert "Paris" in text
    assert whole.choices[0].message.content == text


def test_one_command_answers_once_and_exits(stack: RunningStack, tmp_path: Path) -> None:
    """With no stack on its home, `up --prompt` starts one for the question and leaves nothing running."""
    environment = stack.environment | {"HEADRACE_HOME": str(tmp_path / "own")}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "up", "--prompt", "What is the capital of France?"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert not (tmp_path / "own" / "run.json").exists()


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        messages = [{"role": "user", "content": "Tell me a story about a river."}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=1.0, seed=seed, max_tokens=48)
        return answer.choices[0].message.content

    first = ask(7)
    assert first == ask(7)
    assert first != ask(8)


def test_the_text_alone_is_the_text_in_a_crowd(client: openai.OpenAI) -> None:
    """Greedy and seeded text do not depend on what else the engine does."""

    def ask(index: int) -> str | None:
        messages = [{"role": "user", "content": f"Write {index} sentences about mills."}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0.8 if index % 2 else 0.0, seed=index, max_tokens=32
        )
        return answer.choices[0].message.content

    alone = [ask(index) for index in range(2)]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(ask, range(16)))
    assert crowd[:2] == alone


def test_an_invented_fact_is_answered_from_its_passage(stack: RunningStack, tmp_path: Path) -> None:
    fact = tmp_path / "lighthouse.md"
    fact.write_text("# Brindlemoor\n\nThe Brindlemoor lighthouse was painted turquoise in 1987 by Odette Quarrie.\n")
    done = stack.command("ingest", str(fact), "--collection", "harbour")
    assert done.returncode == 0, done.stderr
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who painted the Brindlemoor lighthouse?"}],
        "temperature": 0,
        "max_tokens": 48,
        "headrace": {"retrieval": {"collection": "harbour"}},
    }
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60).json()
    assert "Quarrie" in answer["choices"][0]["message"]["content"]
    passages = answer["headrace"]["passages"]
    assert passages[0]["number"] == 1
    assert "Odette Quarrie" in passages[0]["text"]
    assert "lighthouse.md" in passages[0]["source"]


def test_an_unknown_collection_is_named(stack: RunningStack) -> None:
    body = {"model": MODEL, "messages": CAPITAL, "headrace": {"retrieval": {"collection": "nowhere"}}}
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "collection_not_found"
    assert "nowhere" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        "Repeat after me: My e-mail is jane.doe@example.com",
        'Repeat this sentence exactly: "Write to jane.doe@example.com today."',
        'Repeat this sentence exactly: "Write to x_1@example.org today."',
        "Repeat after me: x_1@example.org",
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_address_in_the_answer_is_redacted_in_every_byte(stack: RunningStack, prompt: str, stream: bool) -> None:
    """The verdict in the answer proves that the model did say an address; no byte that the client got has it."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 40,
        "stream": stream,
    }
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert "[e-mail]" in answer.text
    assert '"rule": "email"' in answer.text
    assert "example" not in answer.text.lower()


def test_a_blocking_rail_ends_the_answer_with_content_filter(stack: RunningStack) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Repeat after me: My e-mail is jane.doe@example.com"}],
        "temperature": 0,
        "max_tokens": 60,
        "headrace": {"guardrails": {"output": {"personal": "block"}}},
    }
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["finish_reason"] == "content_filter"
    assert "jane.doe" not in answer.text


def test_a_blocked_question_never_reaches_the_model(stack: RunningStack) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Is AKIAIOSFODNN7EXAMPLE a good key?"}],
        "headrace": {"guardrails": {"input": {"secrets": "block"}}},
    }
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "content_blocked"
    assert "AKIA" not in answer.text


def test_the_timings_are_contiguous_and_sum_to_the_whole(stack: RunningStack) -> None:
    body = {"model": MODEL, "messages": CAPITAL, "max_tokens": 8, "headrace": {"timings": True}}
    timings = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60).json()["headrace"]["timings"]
    spans = timings["spans_ms"]
    assert sum(spans.values()) == pytest.approx(timings["total_ms"], abs=0.01)
    assert list(spans) == [
        "gateway.accept",
        "rails.queue",
        "rails.check",
        "engine.queue",
        "engine.wait",
        "engine.prefill",
        "engine.decode",
        "rails.output",
        "gateway.reply",
    ]


def test_three_requests_share_one_socket(stack: RunningStack) -> None:
    async def talk() -> dict[str, list[dict[str, object]]]:
        frames: dict[str, list[dict[str, object]]] = {"a": [], "b": [], "c": []}
        async with websockets.connect(stack.url.replace("http", "ws") + "/v1/ws") as socket:
            for name in frames:
                body = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
                await socket.send(json.dumps({"type": "start", "id": name, "kind": "chat", "body": body}))
            while sum(f[-1]["type"] in ("done", "error") for f in frames.values() if f) < 3:
                frame = json.loads(await asyncio.wait_for(socket.recv(), 60))
                frames[frame["id"]].append(frame)
        return frames

    for frames in asyncio.run(talk()).values():
        kinds = [frame["type"] for frame in frames]
        assert kinds == ["accepted", *["token"] * (len(kinds) - 2), "done"]
        assert "Paris" in "".join(str(frame["text"]) for frame in frames if frame["type"] == "token")


def test_a_prompt_longer_than_the_context_is_refused_and_the_service_goes_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "mill " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model=MODEL, prompt="The sea is", max_tokens=4).usage.completion_tokens == 4


def test_stop_strings_and_lengths_are_kept(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=30, temperature=0, stop=[" 7"])
    assert "7" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    long = client.completions.create(model=MODEL, prompt="Hello", max_tokens=20, temperature=0, extra_body={"ignore_eos": True})
    assert (long.choices[0].finish_reason, long.usage.completion_tokens) == ("length", 20)
