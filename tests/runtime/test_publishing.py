"""What a publisher said survives the broker: the log is said again, a finished answer is on file."""

import pytest

from runtime.following import Follow, emitted_before
from runtime.nats_bus import NatsBus
from runtime.publishing import Publisher
from runtime.sequencer import Deliver, End
from schemas import events, limits, subjects
from schemas.events import Finished, Tokens, Usage
from schemas.timeline import Timeline
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SUBJECT = subjects.reply("a" * 32)
END = Finished(1, 3, "stop", Usage(1, 3), Timeline(0))


def tokens(index: int, *texts: str) -> Tokens:
    return Tokens(1, index, tuple(range(index, index + len(texts))), texts)


async def read_all(follow: Follow) -> tuple[str, list[End]]:
    text, ends = "", []
    while not ends:
        for action in await follow.next(10.0):
            if isinstance(action, Deliver):
                text += action.tokens.text
            else:
                ends.append(action)
    return text, ends


async def test_tokens_that_died_with_the_broker_are_said_again(bus: NatsBus, broker: NatsServer) -> None:
    publisher = Publisher(bus, SUBJECT, 1)
    await publisher.tokens(tokens(0, "a", "b"))
    await bus.flush()
    broker.kill()
    broker.start()
    await until(lambda: bus.connected, "the reconnect")
    follow = Follow(bus, SUBJECT, Timeline(0), log_first=True)
    await follow.open()
    await publisher.tokens(tokens(2, "c"))
    await publisher.end(END)
    assert await read_all(follow) == ("abc", [End(END)])
    await follow.close()
    publisher.close()


async def test_a_finished_answer_survives_the_broker(bus: NatsBus, broker: NatsServer) -> None:
    publisher = Publisher(bus, SUBJECT, 1)
    await publisher.tokens(tokens(0, "a", "b", "c"))
    await publisher.end(END)
    publisher.close()
    broker.kill()
    broker.start()
    await until(lambda: bus.connected, "the reconnect")
    before = emitted_before(await bus.read_log(SUBJECT))
    assert (before.texts, before.ended) == (("a", "b", "c"), True)
    follow = Follow(bus, SUBJECT, Timeline(0), start=1, log_first=True)
    await follow.open()
    assert await read_all(follow) == ("bc", [End(END)])
    await follow.close()


async def test_an_answer_that_no_message_could_hold_is_said_again_and_ends(bus: NatsBus, broker: NatsServer) -> None:
    count = 60_000
    text = "x" * (limits.PAYLOAD_BYTES_MAX // count + 10)
    publisher = Publisher(bus, SUBJECT, 1, Tokens(1, 0, tuple(range(count)), (text,) * count))
    broker.kill()
    broker.start()
    await until(lambda: bus.connected, "the reconnect")
    follow = Follow(bus, SUBJECT, Timeline(0), log_first=True)
    await follow.open()
    end = Finished(1, count, "length", Usage(1, count), Timeline(0))
    await publisher.end(end)
    assert await read_all(follow) == (text * count, [End(end)])
    await follow.close()
    publisher.close()
    broker.kill()
    broker.start()
    await until(lambda: bus.connected, "the second reconnect")
    before = emitted_before(await bus.read_log(SUBJECT))
    assert (len(before.texts), before.ended) == (count, True)


async def test_the_end_is_not_told_twice_by_log_and_file(bus: NatsBus) -> None:
    publisher = Publisher(bus, SUBJECT, 1)
    await publisher.tokens(tokens(0, "a", "b", "c"))
    await publisher.end(END)
    publisher.close()
    follow = Follow(bus, SUBJECT, Timeline(0), log_first=True)
    await follow.open()
    assert await read_all(follow) == ("abc", [End(END)])
    await follow.close()


async def test_a_publisher_that_goes_on_leaves_out_what_was_said(bus: NatsBus) -> None:
    publisher = Publisher(bus, SUBJECT, 2, Tokens(1, 0, (0, 1), ("a", "b")))
    await publisher.tokens(Tokens(2, 0, (0, 1, 2), ("a", "b", "c")))
    await publisher.tokens(Tokens(2, 0, (0, 1), ("a", "b")))
    publisher.close()
    await bus.publish_confirmed(SUBJECT, b"", "mark")
    first = events.decode((await bus.read_log(SUBJECT))[0].data)
    assert first == Tokens(2, 2, (2,), ("c",))
