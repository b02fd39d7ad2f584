"""What crosses a process boundary comes out as it went in, and anything else is refused in a typed way."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import codec, errors, events, limits, subjects
from schemas.codec import CodecError
from schemas.envelope import Envelope, Rails, Retrieval, Sampling, TokensInput
from schemas.errors import MEANINGS, HeadraceError
from schemas.events import Failed, Finished, Likely, Logprob, Passage, Tokens, Usage, Verdict
from schemas.presence import ModelCard, Presence
from schemas.timeline import Timeline
from tests.support.envelopes import envelope

TIMELINE = Timeline(100).mark("gateway.accept", 150).mark("rails.queue", 170)


def test_a_timelines_spans_are_contiguous_and_sum_to_the_whole() -> None:
    timeline = TIMELINE.mark("rails.check", 160).mark("gateway.reply", 400)
    assert timeline.spans_us() == {"gateway.accept": 50, "rails.queue": 20, "rails.check": 0, "gateway.reply": 230}
    assert sum(timeline.spans_us().values()) == timeline.end_us - timeline.start_us


@pytest.mark.parametrize(
    "event",
    [
        Tokens(1, 3, (5, None), ("a", "")),
        Tokens(1, 3, (5, None), ("a", ""), (Logprob(Likely(5, b"a\xff", -0.5), (Likely(6, b"", -1.0),)), None)),
        Finished(
            2,
            4,
            "length",
            Usage(3, 4, 1),
            TIMELINE,
            (Passage(1, "a.md", "text", 0.5),),
            (Verdict("e-mail", "output", "redact", 2),),
        ),
        Failed(1, 0, "cancelled", "the request was cancelled", TIMELINE, "messages", Usage(1, 2)),
        Failed(1, 0, "internal", "x", TIMELINE),
    ],
)
def test_an_event_comes_back_as_it_went(event: events.Event) -> None:
    assert events.decode(events.encode(event)) == event


def test_an_envelope_comes_back_as_it_went() -> None:
    sent = envelope(
        input=TokensInput(ids=(1, 2)),
        sampling=Sampling(seed=2**63 - 1, stop=("a", "b"), top_k=5),
        retrieval=Retrieval(collection="c"),
        rails=Rails(output={"secrets": "block"}),
        timeline=TIMELINE,
        passages=(Passage(1, "s", "t", 0.25),),
        verdicts=(Verdict("card", "input", "redact", 1),),
    )
    assert Envelope.decode(sent.encode()) == sent


def test_the_slip_leads_from_stage_to_stage() -> None:
    first = envelope(slip=("rails", "retrieval", "engine"), model="Org/Model.X", priority="batch")
    second = first.passed("rails")
    third = second.passed("retrieval")
    assert [e.next_subject for e in (first, second)] == ["hr.work.rails", "hr.work.retrieval"]
    assert re.fullmatch(r"hr\.work\.engine\.org-model-x-[0-9a-f]{12}\.batch", third.next_subject)


def test_guarded_tokens_go_by_way_of_the_guard() -> None:
    free, guarded = envelope(), envelope(rails=Rails(output={"personal": "redact"}))
    assert free.events_subject == subjects.reply(free.request)
    assert guarded.events_subject == subjects.raw(guarded.request)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_codec_error(data: bytes) -> None:
    for decode in (events.decode, Envelope.decode, Presence.decode):
        for attempt in (data, bytes((codec.VERSION,)) + data):
            try:
                decode(attempt)
            except CodecError:
                continue


def test_another_version_and_an_oversized_message_are_refused_by_name() -> None:
    with pytest.raises(CodecError, match="message of version 9, this process reads version 1"):
        codec.unpack(b"\x09\x80")
    with pytest.raises(CodecError, match="over the limit"):
        codec.pack({"x": bytes(limits.PAYLOAD_BYTES_MAX)})


@given(st.text(st.characters(), max_size=100))
def test_any_name_becomes_one_safe_subject_token(name: str) -> None:
    made = subjects.slug(name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", made)
    assert subjects.slug(name) == made


def test_different_names_become_different_tokens() -> None:
    names = ["a.b", "a-b", "A.B", "a b", "a*b", ">", "*", ""]
    assert len({subjects.slug(name) for name in names}) == len(names)


def test_every_error_code_is_in_the_drawing_of_the_tree() -> None:
    missing = [code for code in MEANINGS if code not in (errors.__doc__ or "")]
    assert missing == []
    with pytest.raises(KeyError, match="no meaning"):
        HeadraceError("made_up", "x")


def test_a_presence_comes_back_as_it_went() -> None:
    card = ModelCard(id="m", context_tokens=8, precision="bf16")
    sent = Presence(stage="engine", worker="w", ready=True, model=card, slots=2, gauges={"blocks_free": 3.0})
    assert Presence.decode(sent.encode()) == sent


def test_lone_surrogates_are_refused_in_messages_and_mapped_in_names() -> None:
    with pytest.raises(CodecError, match="not Unicode"):
        envelope("\ud800").encode()
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", subjects.slug("model\ud800"))
