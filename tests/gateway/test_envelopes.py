"""From request to envelope: the slip, the server's rails, the seed and the deadline."""

from pathlib import Path
from typing import Any

import pytest

from gateway.envelopes import Stamp, stamp
from runtime.settings import Settings
from schemas.envelope import Envelope
from schemas.errors import HeadraceError
from schemas.requests import ChatCompletionRequest, CompletionRequest, parse

STAMP = Stamp("0" * 32, "default", 1_000_000, 77)


def settings(**changes: Any) -> Settings:
    return Settings(home=Path("unused"), **changes)


def stamped(headrace: dict[str, Any], values: Settings, **body: Any) -> Envelope:
    given = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "headrace": headrace} | body
    return stamp(parse(ChatCompletionRequest, given), STAMP, values)


@pytest.mark.parametrize(
    ("policy_in", "policy_out", "headrace", "slip"),
    [
        ({}, {}, {}, ("engine",)),
        ({}, {"secrets": "off"}, {}, ("engine",)),
        ({}, {"secrets": "redact"}, {}, ("rails", "engine")),
        ({"personal": "block"}, {}, {}, ("rails", "engine")),
        ({}, {}, {"guardrails": {"input": {"secrets": "block"}}}, ("rails", "engine")),
        ({}, {}, {"retrieval": {"collection": "docs"}}, ("retrieval", "engine")),
        ({}, {"secrets": "redact"}, {"retrieval": {"collection": "docs"}}, ("rails", "retrieval", "engine")),
    ],
)
def test_the_slip_has_the_stages_that_were_asked_for(
    policy_in: Any, policy_out: Any, headrace: dict[str, Any], slip: tuple[str, ...]
) -> None:
    assert stamped(headrace, settings(rails_input=policy_in, rails_output=policy_out)).slip == slip


def test_a_request_strengthens_the_policy() -> None:
    values = settings(rails_input={"secrets": "redact"}, rails_output={"secrets": "redact", "personal": "redact"})
    headrace = {"guardrails": {"input": {"personal": "block"}, "output": {"secrets": "block", "personal": "redact"}}}
    rails = stamped(headrace, values).rails
    assert rails.input == {"secrets": "redact", "personal": "block"}
    assert rails.output == {"secrets": "block", "personal": "redact"}


@pytest.mark.parametrize("weaker", ["off", "redact"])
def test_a_request_cannot_weaken_the_policy(weaker: str) -> None:
    with pytest.raises(HeadraceError, match="requires at least 'block'") as caught:
        stamped({"guardrails": {"output": {"secrets": weaker}}}, settings(rails_output={"secrets": "block"}))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "headrace.guardrails.output.secrets")


@pytest.mark.parametrize(
    ("values", "headrace"),
    [
        (settings(rails_input={"secrets": "redact"}, rails_output={}), {}),
        (settings(rails_output={}), {"retrieval": {"collection": "docs"}}),
    ],
)
def test_token_ids_that_no_stage_could_read_are_refused(values: Settings, headrace: dict[str, Any]) -> None:
    asked = parse(CompletionRequest, {"model": "m", "prompt": [1, 2], "headrace": headrace})
    with pytest.raises(HeadraceError) as caught:
        stamp(asked, STAMP, values)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")


def test_the_seed_is_the_requests_or_the_stamps() -> None:
    assert stamped({}, settings()).sampling.seed == 77
    assert stamped({}, settings(), seed=0).sampling.seed == 0


def test_the_deadline_is_absolute_and_the_servers_when_none_is_given() -> None:
    assert stamped({}, settings(deadline_ms=2000)).deadline_us == 1_000_000 + 2_000_000
    assert stamped({"deadline_ms": 5}, settings()).deadline_us == 1_000_000 + 5_000


def test_an_envelope_survives_the_wire() -> None:
    envelope = stamped({"retrieval": {"collection": "docs", "top_k": 9, "mode": "vector"}}, settings(), top_k=5)
    assert Envelope.decode(envelope.encode()) == envelope
    assert envelope.sampling.top_k == 5


def test_what_adjusts_the_draw_reaches_the_engine() -> None:
    asked = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4}
    sampling = Envelope.decode(stamped({}, settings(), **asked, logit_bias={"10": 1, "9": -2.5}).encode()).sampling
    assert sampling.model_dump(include=set(asked)) == asked
    assert sampling.logit_bias == ((9, -2.5), (10, 1.0))
