"""The guard on a real broker: a verdict ends a stream once, whenever its events come."""

import asyncio

import pytest

from runtime.nats_bus import NatsBus
from runtime.publishing import Publisher
from runtime.stage import Work
from schemas import events, subjects
from schemas.envelope import Rails
from schemas.events import Finished, Passage, Tokens, Usage
from schemas.timeline import Timeline
from tests.support.envelopes import envelope
from workers.guardrail.output_rails import clean_passages
from workers.guardrail.worker import GuardStage

pytestmark = pytest.mark.anyio

BLOCK = Rails(output={"personal": "block"})


async def test_a_block_whose_last_word_came_in_the_same_batch_ends_at_once(bus: NatsBus) -> None:
    """The whole raw stream is in the log already, as after a redelivery."""
    item = envelope(rails=BLOCK)
    publisher = Publisher(bus, subjects.raw(item.request), 1)
    texts = ("Write ", "to jane", ".doe@example", ".com ", "now")
    await publisher.tokens(Tokens(1, 0, tuple(range(5)), texts))
    await publisher.end(Finished(1, 5, "stop", Usage(3, 5), Timeline(0)))
    publisher.close()
    await asyncio.wait_for(GuardStage(bus, bus.clock).handle(Work(item, 1)), 5)
    log = [events.decode(m.data) for m in await bus.read_log(subjects.reply(item.request)) if m.sequence is not None]
    assert "".join(event.text for event in log if isinstance(event, Tokens)) == "Write to "
    [end] = [event for event in log if isinstance(event, Finished)]
    assert (end.reason, end.usage) == ("content_filter", Usage(3, 5))


def test_passages_are_cleaned_as_the_answer_is() -> None:
    passage = Passage(1, "a.md", "Ask alice.manager@heron.example.com about it.", 0.5)
    [clean] = clean_passages(BLOCK, (passage,))
    assert clean.text == "Ask [e-mail] about it."
    assert clean_passages(Rails(), (passage,)) == (passage,)
