"""What is built by hand for speed is what the plain way would build."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chunks import Chunks, timings_body, whole_body
from gateway.ownership import Kind, Ownership
from gateway.socket_frames import FrameWriter
from schemas.events import Finished, Likely, Logprob, Tokens, Usage
from schemas.frames import Token
from schemas.timeline import Timeline

REQUEST = "ab" * 16


def of(kind: Kind, model: str) -> Ownership:
    return Ownership(REQUEST, "default", model, kind, 0, 1, "", "cancel", False)


@given(st.text(min_size=1), st.sampled_from(["chat", "completion"]), st.booleans())
def test_a_chunk_is_one_sse_event_with_its_text_whatever_the_text(text: str, kind: Kind, usage: bool) -> None:
    chunk = Chunks(of(kind, 'a "model"\n'), usage).tokens(Tokens(1, 4, (1, 2), (text, ""))).decode()
    first, second, *rest = chunk.split("\n")
    assert first == f"id: {REQUEST}:6"
    assert rest == ["", ""]
    body = json.loads(second.removeprefix("data: "))
    choice = body["choices"][0]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text
    assert body["model"] == 'a "model"\n'
    assert ("usage" in body) == usage


@given(st.text(min_size=1), st.text(min_size=1, max_size=8))
def test_a_token_frame_is_what_its_model_says(text: str, name: str) -> None:
    frame = FrameWriter(REQUEST, name, False).piece(Tokens(1, 4, (1,), (text,)))
    assert json.loads(frame) == json.loads(Token(id=name, request=REQUEST, index=4, text=text).encode())


def test_tokens_without_text_are_no_chunk() -> None:
    assert Chunks(of("chat", "m"), False).tokens(Tokens(1, 0, (1,), ("",))) == b""


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 10**9)), max_size=8))
def test_timings_sum_to_the_total_whatever_the_marks(marks: list[tuple[str, int]]) -> None:
    timeline = Timeline(1_700_000_000_000_000)
    for name, later in marks:
        timeline = timeline.mark(name, timeline.end_us + later)
    timings = timings_body(timeline)
    assert sum(round(v * 1000) for v in timings["spans_ms"].values()) == round(timings["total_ms"] * 1000)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streamed_logprobs_are_those_of_the_whole_answer(kind: Kind) -> None:
    """Also those of a token that brings no text, and none for a token that a rail changed."""
    of_token = [Logprob(Likely(n, data, -1.5), (Likely(9, b"x", -0.5),)) for n, data in enumerate((b"\xc3", b"\xa9"))]
    streams = [Tokens(1, 0, (0,), ("",), (of_token[0],)), Tokens(1, 1, (1, None), ("é", "[e-mail]"), (of_token[1], None))]
    chunks = Chunks(of(kind, "m"), False)
    bodies = [json.loads(chunks.tokens(tokens).decode().partition("data: ")[2]) for tokens in streams]
    parts = [body["choices"][0]["logprobs"] for body in bodies]
    finished = Finished(1, 3, "stop", Usage(1, 3), Timeline(0))
    whole = whole_body(of(kind, "m"), "é[e-mail]", finished, (*of_token, None))["choices"][0]["logprobs"]
    name = "content" if kind == "chat" else "token_logprobs"
    assert [entry for part in parts for entry in part[name]] == whole[name]
    assert len(whole[name]) == 2
