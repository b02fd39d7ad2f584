"""Whoever dies in the middle of a stream: the client gets the rest, each token once, the same text."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.stack import RunningStack

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
    with httpx.stream("POST", stack.url + "/v1/chat/completions", json=body, timeout=90) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                assert ends == 1
                return
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                ends += choice["finish_reason"] is not None
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
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
