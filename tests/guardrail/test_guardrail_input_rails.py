"""What the input rails do to an envelope: refuse it, change its input, or leave it alone."""

import pytest

from schemas.envelope import Action, ChatInput, Envelope, Message, Rails, RuleGroup, Sampling, TextInput, TokensInput
from schemas.errors import HeadraceError
from schemas.events import Verdict
from schemas.timeline import Timeline
from tests.guardrail.samples import SAMPLES
from workers.guardrail import input_rails

REDACT: dict[RuleGroup, Action] = {"secrets": "redact", "personal": "redact"}


def envelope(given: ChatInput | TextInput | TokensInput, actions: dict[RuleGroup, Action]) -> Envelope:
    return Envelope(
        request="0" * 32,
        tenant="t",
        model="m",
        priority="interactive",
        slip=("rails", "engine"),
        input=given,
        sampling=Sampling(seed=1),
        rails=Rails(input=actions),
        deadline_us=1,
        timeline=Timeline(0),
    )


def test_redacting_changes_each_message_and_counts_by_rule() -> None:
    chat = ChatInput(
        messages=(
            Message(role="system", content="Sign as boss@x.com."),
            Message(role="user", content=f"I am a@x.com, b@x.com, {SAMPLES['us_ssn']}; my key is {SAMPLES['github_token']}"),
            Message(role="user", content="Thanks"),
        )
    )
    cleaned = input_rails.apply(envelope(chat, REDACT))
    assert isinstance(cleaned.input, ChatInput)
    assert [message.content for message in cleaned.input.messages] == [
        "Sign as [e-mail].",
        "I am [e-mail], [e-mail], [SSN]; my key is [GitHub token]",
        "Thanks",
    ]
    assert [message.role for message in cleaned.input.messages] == ["system", "user", "user"]
    assert cleaned.verdicts == (
        Verdict("email", "input", "redact", 3),
        Verdict("us_ssn", "input", "redact", 1),
        Verdict("github_token", "input", "redact", 1),
    )


def test_redacting_changes_a_raw_prompt() -> None:
    cleaned = input_rails.apply(envelope(TextInput(prompt="Write to a@x.com"), {"personal": "redact"}))
    assert cleaned.input == TextInput(prompt="Write to [e-mail]")
    assert Envelope.decode(cleaned.encode()) == cleaned


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (ChatInput(messages=(Message(role="user", content="ok"), Message(role="user", content="I am a@x.com"))), "messages"),
        (TextInput(prompt="a@x.com"), "prompt"),
    ],
)
def test_blocking_names_the_rule_and_the_field_and_never_quotes(given: ChatInput | TextInput, param: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        input_rails.apply(envelope(given, {"personal": "block", "secrets": "redact"}))
    assert (caught.value.code, caught.value.param) == ("content_blocked", param)
    assert "email" in caught.value.message
    assert "a@x" not in caught.value.message


def test_a_prompt_of_token_ids_is_refused_when_a_rail_is_on_and_passed_when_none_is() -> None:
    with pytest.raises(HeadraceError) as caught:
        input_rails.apply(envelope(TokensInput(ids=(1, 2)), REDACT))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")
    untouched = envelope(TokensInput(ids=(1, 2)), {"secrets": "off"})
    assert input_rails.apply(untouched) is untouched


def test_a_group_that_is_off_is_not_looked_for() -> None:
    given = TextInput(prompt="a@x.com and " + SAMPLES["aws_access_key"])
    cleaned = input_rails.apply(envelope(given, {"personal": "off", "secrets": "redact"}))
    assert cleaned.input == TextInput(prompt="a@x.com and [AWS key]")
