"""The follower between a live subject that loses messages and a log that lags: nothing is lost, nothing waits for
ever.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from runtime import following
from runtime.bus import BusUnavailable, Message, OnMessage
from runtime.clock import BrokerClock
from runtime.following import QUEUE_MESSAGES_MAX, Follow
from runtime.sequencer import Deliver, End
from schemas import events
from schemas.errors import HeadraceError
from schemas.events import Event, Failed, Finished, Tokens, Usage
from schemas.timeline import Timeline

pytestmark = pytest.mark.anyio

REQUEST = "0" * 32
T = Timeline(0)


class LossyBus:
    """One request's subject. What is published goes to the log; live listeners miss what the test says."""

    def __init__(self) -> None:
        self.clock = BrokerClock()
        self.connected = True
        self.log: list[Message] = []
        self.reads = 0
        self.hidden_reads = 0  # so many reads find nothing: the log lags
        self.unavailable_reads = 0
        self._listener: OnMessage | None = None

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        self.reconnected = callback
        return lambda: None

    async def subscribe(self, subject: str, on_message: OnMessage) -> "LossyBus":
        self._listener = on_message
        return self

    async def unsubscribe(self) -> None:
        self._listener = None

    async def read_log(self, subject: str, after: int = 0) -> list[Message]:
        self.reads += 1
        if self.reads <= self.unavailable_reads:
            raise BusUnavailable("away")
        if self.reads <= self.hidden_reads:
            return []
        return [message for message in self.log if (message.sequence or 0) > after]

    async def say(self, event: Event, live: bool = True, logged: bool = True) -> None:
        data = events.encode(event)
        if logged:
            self.log.append(Message(f"hr.reply.{REQUEST}", data, "", len(self.log) + 1))
        if live and self._listener is not None:
            await self._listener(Message(f"hr.reply.{REQUEST}", data))


def tokens(index: int, *texts: str, epoch: int = 1) -> Tokens:
    return Tokens(epoch, index, tuple(range(len(texts))), texts)


def finished(index: int) -> Finished:
    return Finished(1, index, "stop", Usage(1, index), T)


async def opened(bus: LossyBus, start: int = 0, log_first: bool = False) -> Follow:
    follow = Follow(bus, f"hr.reply.{REQUEST}", T, start, log_first)  # type: ignore[arg-type]
    await follow.open()
    return follow


async def everything(follow: Follow) -> tuple[list[str], Finished | Failed]:
    """All texts, and the end."""
    texts: list[str] = []
    while True:
        for action in await asyncio.wait_for(follow.next(5.0), 10):
            if isinstance(action, Deliver):
                texts += action.tokens.texts
            else:
                assert isinstance(action, End)
                assert not isinstance(action.outcome, HeadraceError)
                return texts, action.outcome


async def test_what_the_live_subject_lost_comes_from_the_log() -> None:
    bus = LossyBus()
    follow = await opened(bus)
    for index, text in enumerate("abcdef"):
        await bus.say(tokens(index, text), live=index not in (1, 2, 5))
    await bus.say(finished(6))
    assert await everything(follow) == (list("abcdef"), finished(6))
    assert follow.gaps > 0


async def test_a_log_that_lags_is_asked_again() -> None:
    bus = LossyBus()
    bus.hidden_reads, bus.unavailable_reads = 3, 1
    follow = await opened(bus)
    await bus.say(tokens(0, "a"), live=False)
    await bus.say(finished(1))
    assert await everything(follow) == (["a"], finished(1))
    assert bus.reads == 4


async def test_what_the_log_lost_comes_live() -> None:
    bus = LossyBus()
    follow = await opened(bus)
    await bus.say(tokens(0, "a"), live=False)
    await bus.say(tokens(1, "b"), logged=False)
    await bus.say(tokens(2, "c"))
    await bus.say(finished(3), live=False)
    await bus.say(finished(3))
    assert await everything(follow) == (["a", "b", "c"], finished(3))


async def test_a_hole_that_nothing_fills_ends_in_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "GAP_S", 0.02)
    bus = LossyBus()
    follow = await opened(bus)
    await bus.say(tokens(0, "a"))
    await bus.say(tokens(1, "b"), live=False, logged=False)
    await bus.say(finished(2))
    texts, end = await everything(follow)
    assert texts == ["a"]
    assert isinstance(end, Failed)
    assert (end.code, end.index) == ("internal", 1)
    assert follow.ended_here


async def test_a_resume_from_what_the_log_no_longer_holds_is_replay_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "GAP_S", 0.02)
    bus = LossyBus()
    await bus.say(tokens(7, "h"))
    follow = await opened(bus, start=3, log_first=True)
    texts, end = await everything(follow)
    assert isinstance(end, Failed)
    assert (texts, end.code) == ([], "replay_expired")


async def test_a_lost_end_is_found_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "SILENCE_S", 0.02)
    bus = LossyBus()
    follow = await opened(bus)
    await bus.say(tokens(0, "a"))
    await bus.say(finished(1), live=False)
    assert await everything(follow) == (["a"], finished(1))


async def test_a_log_that_began_anew_is_read_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that lost its memory counts from 1 again, below where we had read to."""
    monkeypatch.setattr(following, "SILENCE_S", 0.001)
    bus = LossyBus()
    follow = await opened(bus, log_first=True)
    for index in range(5):
        await bus.say(tokens(index, "x"), live=False)
    assert len(await follow.next(1.0)) == 5
    bus.log.clear()
    await bus.say(tokens(0, "x", "x", "x", "x", "x", epoch=2), live=False)
    await bus.say(Finished(2, 5, "stop", Usage(1, 5), T), live=False)
    texts, end = await everything(follow)
    assert (texts, end.index) == ([], 5)


async def test_a_slow_reader_costs_a_bounded_queue_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at once, by the newest message that it keeps: the look after a silence is not what saves it."""
    monkeypatch.setattr(following, "SILENCE_S", 1000.0)
    bus = LossyBus()
    follow = await opened(bus)
    many = 20 * QUEUE_MESSAGES_MAX
    for index in range(many):
        await bus.say(tokens(index, str(index)))
        assert len(follow._queue) <= QUEUE_MESSAGES_MAX
    await bus.say(finished(many))
    texts, end = await everything(follow)
    assert texts == [str(index) for index in range(many)]
    assert end == finished(many)


async def test_a_reader_from_the_middle_gets_the_log_then_the_live_subject() -> None:
    bus = LossyBus()
    await bus.say(tokens(0, "a", "b"))
    await bus.say(tokens(2, "c"))
    follow = await opened(bus, start=1, log_first=True)
    first = await follow.next(1.0)
    await bus.say(tokens(3, "d"))
    await bus.say(finished(4))
    texts, end = await everything(follow)
    assert [a.tokens.texts for a in first if isinstance(a, Deliver)] == [("b",), ("c",)]
    assert (texts, end) == (["d"], finished(4))


async def test_silence_is_nothing_and_an_end_from_outside_is_at_once() -> None:
    bus = LossyBus()
    follow = await opened(bus)
    assert await follow.next(0.01) == []
    waiting = asyncio.create_task(follow.next(60.0))
    follow.end(HeadraceError("cancelled", "stop"))
    follow.end(HeadraceError("internal", "too late"))
    [end] = await asyncio.wait_for(waiting, 1)
    assert isinstance(end, End)
    assert end.outcome == Failed(0, 0, "cancelled", "stop", T)
    assert await follow.next(1.0) == []


async def test_an_event_that_cannot_be_read_ends_the_stream_as_our_fault() -> None:
    bus = LossyBus()
    follow = await opened(bus)
    await follow._on_message(Message("", b"\x01nonsense"))
    texts, end = await everything(follow)
    assert isinstance(end, Failed)
    assert (texts, end.code) == ([], "internal")


async def test_closing_stops_listening_and_may_be_done_twice() -> None:
    bus = LossyBus()
    follow = await opened(bus)
    await follow.close()
    await follow.close()
    assert bus._listener is None


def test_what_was_emitted_before_is_read_up_to_the_first_hole() -> None:
    log = [tokens(0, "a", "b"), Tokens(2, 3, (3,), ("d",))]
    before = following.emitted_before(Message("s", events.encode(event), "", at) for at, event in enumerate(log, 1))
    assert (before.ids, before.epoch, before.ended) == ((0, 1), 2, False)
