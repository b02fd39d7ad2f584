"""What a client may ask: defaults, what is taken, and what is refused by its name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth import authenticate
from gateway.bodies import loads
from schemas.errors import HeadraceError
from schemas.frames import parse_frame
from schemas.requests import ChatCompletionRequest, CompletionRequest, parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refused(model: Any, body: object) -> tuple[str, str | None]:
    with pytest.raises(HeadraceError) as caught:
        parse(model, body)
    return caught.value.code, caught.value.param


def test_the_defaults_are_openais() -> None:
    chat, text = parse(ChatCompletionRequest, CHAT), parse(CompletionRequest, TEXT)
    assert (chat.temperature, chat.top_p, chat.tokens_max, chat.stream, chat.seed) == (1.0, 1.0, None, False, None)
    assert text.tokens_max == 16
    assert (chat.headrace.priority, chat.headrace.on_disconnect, chat.headrace.timings) == ("standard", "cancel", False)


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1},
        {"logprobs": False},
        {"frequency_penalty": 0},
        {"presence_penalty": 0.0},
        {"tools": None},
        {"tools": []},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"logit_bias": {"0": -100, "7": 2.5}},
        {"min_p": 1, "repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 2},
        {"temperature": None},
        {"max_tokens": None},
        {"stop": ["a", "b", "c", "d"]},
        {"seed": 2**63 - 1},
        {"user": "somebody", "metadata": {"a": "b"}},
        {"max_tokens": 4, "max_completion_tokens": 4},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"top_k": 0, "ignore_eos": True, "min_tokens": 3, "stop_token_ids": [0, 7]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": None, "refusal": None}]},
    ],
)
def test_a_value_that_changes_nothing_or_is_served_is_taken(extra: dict[str, Any]) -> None:
    parse(ChatCompletionRequest, CHAT | extra)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"{a}": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"2147483648": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": "x" * 257}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a", "name": "bob"}]}, "messages[0].name"),
        ({"headrace": {"deadline_ms": 0}}, "headrace.deadline_ms"),
        ({"headrace": {"deadline_ms": 3_600_001}}, "headrace.deadline_ms"),
        ({"headrace": {"priority": "urgent"}}, "headrace.priority"),
        ({"headrace": {"on_disconnect": "wait"}}, "headrace.on_disconnect"),
        ({"headrace": {"retrieval": {"top_k": 3}}}, "headrace.retrieval.collection"),
        ({"headrace": {"retrieval": {"collection": "a", "top_k": 21}}}, "headrace.retrieval.top_k"),
        ({"headrace": {"guardrails": {"output": {"secrets": "maybe"}}}}, "headrace.guardrails.output.secrets"),
    ],
)
def test_a_wrong_value_is_refused_at_its_path(extra: dict[str, Any], param: str) -> None:
    assert refused(ChatCompletionRequest, CHAT | extra) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("extra", "param", "nearest"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"maxtokens": None}, "maxtokens", "max_tokens"),
        ({"headrace": {"dead_line": 1}}, "headrace.dead_line", "deadline_ms"),
        ({"headrace": {"guardrails": {"input": {"secret": "off"}}}}, "headrace.guardrails.input.secret", "secrets"),
        ({"messages": [{"role": "user", "content": "a", "rolle": "b"}]}, "messages[0].rolle", "role"),
    ],
)
def test_an_unknown_field_names_the_nearest_known_one(extra: dict[str, Any], param: str, nearest: str) -> None:
    with pytest.raises(HeadraceError, match=f"{nearest}$") as caught:
        parse(ChatCompletionRequest, CHAT | extra)
    assert (caught.value.code, caught.value.param) == ("unknown_field", param)


@pytest.mark.parametrize(("prompt", "expected"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_a_prompt_is_a_text_or_token_ids(prompt: object, expected: object) -> None:
    assert parse(CompletionRequest, {"model": "m", "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_text_completion_is_refused_at_its_path(extra: dict[str, Any], param: str) -> None:
    assert refused(CompletionRequest, TEXT | extra) == ("invalid_value", param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*ChatCompletionRequest.model_fields, *ChatCompletionRequest.NEUTRAL, "headrace", "odd"})


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_no_json_makes_the_parser_fail_otherwise_than_typed(extra: dict[str, Any]) -> None:
    with contextlib.suppress(HeadraceError):
        parse(ChatCompletionRequest, CHAT | extra)


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_the_reader_fail_otherwise_than_typed(data: bytes) -> None:
    with contextlib.suppress(HeadraceError):
        loads(data)


def test_a_repeated_key_is_named_with_its_path() -> None:
    with pytest.raises(HeadraceError) as caught:
        loads(b'{"a": [{"b": 1}, {"b": 1, "c": 2, "b": 3}]}')
    assert (caught.value.code, caught.value.param) == ("invalid_value", "a[1].b")


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", "1" * 5000, '"\\ud800"', '{"a": "\\udc00x"}', "[" * 60_000, "{", ""]
)
def test_what_is_not_json_of_ours_is_malformed(text: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        loads(text)
    assert caught.value.code == "malformed_request"


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert loads('"\\ud83d\\ude00"') == "😀"


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ([], "malformed_request", None),
        ({}, "invalid_value", "type"),
        ({"type": "begin"}, "invalid_value", "type"),
        ({"type": ["start"]}, "invalid_value", "type"),
        ({"type": "start", "id": "a", "kind": "chat"}, "invalid_value", "body"),
        ({"type": "start", "id": "a", "kind": "image", "body": {}}, "invalid_value", "kind"),
        ({"type": "start", "id": "", "kind": "chat", "body": {}}, "invalid_value", "id"),
        ({"type": "cancel", "id": 5}, "invalid_value", "id"),
        ({"type": "resume", "id": "a", "request": "zz"}, "invalid_value", "request"),
        ({"type": "resume", "id": "a", "request": "0" * 32, "from": -1}, "invalid_value", "from"),
        ({"type": "ping", "idd": 1}, "unknown_field", "idd"),
    ],
)
def test_a_wrong_frame_is_refused_at_its_path(frame: object, code: str, param: str | None) -> None:
    with pytest.raises(HeadraceError) as caught:
        parse_frame(frame)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    "text", ['[{"a":1,"a":1},]', '{"a":1,"a":1', '{"a":1,"a":1,"b":' + "[" * 100_000, '{"a":1,"a":1,"b":' + "9" * 5000 + "}"]
)
def test_a_repeated_key_before_another_fault_is_still_the_clients_fault(text: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        loads(text)
    assert caught.value.code in ("malformed_request", "invalid_value")


@pytest.mark.parametrize(
    ("origin", "host"), [("http://[", "127.0.0.1:8080"), ("http://evil.com", "evil.com"), ("http://evil.com", "127.0.0.1:8080")]
)
def test_a_page_of_another_origin_is_refused_whatever_host_it_names(origin: str, host: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        authenticate({"origin": origin, "host": host})
    assert caught.value.code == "forbidden"


def test_a_page_of_ours_is_answered() -> None:
    assert authenticate({"origin": "http://localhost:8080", "host": "localhost:8080"}).tenant == "default"
