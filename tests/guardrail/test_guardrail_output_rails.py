"""Token events through the output rails: adjacent indices, every token once, verdicts over the whole stream."""

import pytest

from schemas.envelope import Rails
from schemas.events import Likely, Logprob, Tokens, Verdict
from workers.guardrail.output_rails import OutputRail

TEXTS = ("Hi", " a", "@x", ".com", ",", " b@y.io", " bye", "")


def rail(action: str) -> OutputRail:
    return OutputRail(Rails.model_validate({"output": {"personal": action}}))


def through(output: OutputRail, batch: int) -> list[Tokens]:
    events = []
    for start in range(0, len(TEXTS), batch):
        texts = TEXTS[start : start + batch]
        events += output.feed(Tokens(1, start, tuple(range(100 + start, 100 + start + len(texts))), texts))
        if output.blocked:
            return events
    return events + output.close(1)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_any_batching_releases_the_same_tokens_with_adjacent_indices(batch: int) -> None:
    output = rail("redact")
    events = through(output, batch)
    assert [event.index for event in events] == [0, *(event.end for event in events[:-1])]
    assert "".join(event.text for event in events) == "Hi [e-mail], [e-mail] bye"
    assert [text for event in events for text in event.texts] == ["Hi", " [e-mail]", "", "", ",", " [e-mail]", " bye", ""]
    assert [token for event in events for token in event.ids] == [100, None, None, None, 104, None, 106, 107]
    assert output.verdicts == (Verdict("email", "output", "redact", 2),)
    assert output.blocked is None


def test_an_event_carries_the_epoch_of_the_event_that_released_it() -> None:
    output = rail("redact")
    assert output.feed(Tokens(1, 0, (7,), ("Hi",))) == []
    assert output.feed(Tokens(2, 1, (8,), (" yo ",))) == [Tokens(2, 0, (7, 8), ("Hi", " yo "))]
    assert output.close(3) == []


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_block_ends_the_stream_before_the_match(batch: int) -> None:
    output = rail("block")
    events = through(output, batch)
    assert events[-1].ids[-1] is None
    assert "".join(event.text for event in events) == "Hi "
    assert sum(len(event.ids) for event in events) == 2
    assert output.blocked is not None
    assert (output.blocked.rule, output.blocked.start) == ("email", 3)
    assert output.verdicts == (Verdict("email", "output", "block", 1),)


def test_a_gap_in_the_stream_is_our_bug() -> None:
    output = rail("redact")
    output.feed(Tokens(1, 0, (1,), ("a",)))
    with pytest.raises(AssertionError, match="got token 2, expected 1"):
        output.feed(Tokens(1, 2, (1,), ("a",)))


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_token_that_a_rail_changed_loses_its_logprob_and_no_other_does(batch: int) -> None:
    output, released = rail("redact"), []
    of = tuple(Logprob(Likely(number, b"?", -1.0)) for number in range(len(TEXTS)))
    for start in range(0, len(TEXTS), batch):
        end = min(start + batch, len(TEXTS))
        released += output.feed(Tokens(1, start, tuple(range(start, end)), TEXTS[start:end], of[start:end]))
    released += output.close(1)
    ids = [token for event in released for token in event.ids]
    assert [p for event in released for p in event.logprobs] == [None if token is None else of[token] for token in ids]
    assert None in ids
