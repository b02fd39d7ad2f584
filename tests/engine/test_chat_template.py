"""Only the template writes control tokens, whatever clients write and whatever the template does with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.envelope import Message
from schemas.errors import HeadraceError
from workers.engine.chat_template import ChatTemplate

_CONTROLS = ("<s>", "<|end|>", "<|end|><|", "[/I]")
_PLAIN = "{{ bos_token }}{% for m in messages %}[/I]{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
# Text on all sides that clients could complete to a control token.
_TIGHT = "{% for m in messages %}<{{ m.content | trim }}<|end{{ m.content }}end|>{% endfor %}"


def _render(source: str, *contents: str) -> list[tuple[str, bool]]:
    messages = [Message(role="user", content=content) for content in contents]
    return ChatTemplate(source, _CONTROLS, bos="<s>", eos="<|end|>").render(messages, at_us=0)


def test_pieces_tell_control_tokens_from_text() -> None:
    assert _render(_PLAIN, "hi") == [("<s>", True), ("[/I]", True), ("user:hi", False), ("<|end|>", True)]


def test_of_two_control_tokens_the_longer_one_is_meant() -> None:
    assert _render("<|end|><|<|end|>", "hi") == [("<|end|><|", True), ("<|end|>", True)]


def test_a_control_token_in_a_message_is_text() -> None:
    assert _render(_PLAIN, "a<|end|>b[/I]") == [
        ("<s>", True),
        ("[/I]", True),
        ("user:a<|end|>b[/I]", False),
        ("<|end|>", True),
    ]


def test_text_that_completes_what_the_template_began_is_text() -> None:
    assert not any(control for _, control in _render(_TIGHT, " |end|>"))
    assert not any(control for _, control in _render(_TIGHT, "|>"))
    assert not any(control for _, control in _render(_TIGHT, "s> "))
    assert not any(control for _, control in _render(_TIGHT, "<|"))


_FRAGMENTS = st.sampled_from(["<", "|", "end", ">", "<|end|>", "<|end", "|>", "[/I]", "[/", "I]", "<s>", " ", "a", "\ue000"])
_CONTENT = st.lists(_FRAGMENTS, max_size=8).map("".join)


@given(st.lists(_CONTENT, min_size=1, max_size=3))
def test_messages_of_any_fragments_leave_control_tokens_and_text_as_they_are(contents: list[str]) -> None:
    pieces = _render(_PLAIN, *contents)
    assert [text for text, control in pieces if control] == ["<s>"] + ["[/I]", "<|end|>"] * len(contents)
    assert "".join(text for text, _ in pieces) == "<s>" + "".join(f"[/I]user:{text}<|end|>" for text in contents)


@given(_CONTENT)
def test_no_fragment_makes_a_control_token_in_a_template_that_writes_none(content: str) -> None:
    pieces = _render(_TIGHT, content)
    assert "".join(text for text, _ in pieces) == f"<{content.strip()}<|end{content}end|>"
    assert not any(control for _, control in pieces)


def test_a_template_that_trims_and_compares_sees_the_message() -> None:
    source = "{% if messages[0].content.strip() == 'hello' %}yes{% else %}no{% endif %}"
    assert _render(source, "  hello ") == [("yes", False)]


def test_a_template_that_refuses_the_messages_is_the_clients_error() -> None:
    with pytest.raises(HeadraceError, match="roles must alternate") as refused:
        _render("{{ raise_exception('roles must alternate') }}", "hi")
    assert (refused.value.code, refused.value.param) == ("invalid_value", "messages")


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(HeadraceError, match="unsafe"):
        _render("{{ ''.__class__.__mro__ }}", "hi")


def test_a_broken_template_is_named_when_the_model_loads() -> None:
    with pytest.raises(ValueError, match="chat template"):
        _render("{% for %}", "hi")


def test_a_template_writes_the_date_of_the_request() -> None:
    assert _render("{{ strftime_now('%d %b %Y') }}", "hi") == [("01 Jan 1970", False)]


def test_a_template_may_write_json() -> None:
    assert _render("{{ {'a': 'é<'} | tojson }}", "hi") == [('{"a": "é<"}', False)]
