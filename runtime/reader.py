"""A request's subject as an ordered stream: live messages, with holes filled from the log. The shell around the sequencer.

The log is read once at the start (what was said before we listened), at every hole, and when nothing was heard for a while (a
broker that restarted says nothing of what it dropped).
"""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import structlog

from runtime.bus import Bus, BusError, Message, Subscription
from runtime.sequencer import Deliver, Diverged, End, Hole, Ignore, Sequencer
from schemas import events
from schemas.codec import CodecError
from schemas.errors import HeadraceError
from schemas.events import Event, Terminal, Tokens

log = structlog.get_logger()

SILENCE_S = 5.0
HOLE_PATIENCE_S = 5.0  # the log lags behind the live messages by milliseconds; a hole older than this stays one


class LogReader:
    """An async context manager and iterator: Tokens in order, each once, then one terminal event.

    Raises HeadraceError replay_diverged when a token contradicts one already delivered, internal when the log lost tokens, and
    replay_expired when start lies before what the log still holds.
    """

    def __init__(self, bus: Bus, subject: str, start: int = 0) -> None:
        self._bus = bus
        self._subject = subject
        self._sequencer = Sequencer(start)
        self._live: asyncio.Queue[Message] = asyncio.Queue()
        self._subscription: Subscription | None = None

    @property
    def next_index(self) -> int:
        """The index after the last token given out."""
        return self._sequencer.next_index

    async def __aenter__(self) -> Self:
        self._subscription = await self._bus.subscribe(self._subject, self._live.put)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._subscription is not None
        await self._subscription.unsubscribe()

    async def __aiter__(self) -> AsyncIterator[Tokens | Terminal]:
        async for event in self._from_log():
            yield event
        while not self._sequencer.ended:
            try:
                message = await asyncio.wait_for(self._live.get(), SILENCE_S)
            except TimeoutError:
                async for event in self._from_log():
                    yield event
                continue
            async for event in self._from_live(message):
                yield event

    async def _from_live(self, message: Message) -> AsyncIterator[Tokens | Terminal]:
        event = _decode(message)
        if event is None:
            return
        answer = self._sequencer.offer(event)
        if isinstance(answer, Hole):
            async for filled in self._fill(event.index):
                yield filled
            answer = self._sequencer.offer(event)
        given = self._given(answer)
        if given is not None:
            yield given

    async def _fill(self, index: int) -> AsyncIterator[Tokens | Terminal]:
        """Reads the log until it reaches index, for the log may be a moment behind."""
        loop = asyncio.get_running_loop()
        give_up, pause_s = loop.time() + HOLE_PATIENCE_S, 0.002
        while not self._sequencer.ended and self.next_index < index:
            async for event in self._from_log():
                yield event
            if self.next_index >= index:
                return
            if loop.time() > give_up:
                raise HeadraceError("internal", f"tokens from {self.next_index} to {index} are lost")
            await asyncio.sleep(pause_s)
            pause_s = min(0.5, pause_s * 2)

    async def _from_log(self) -> AsyncIterator[Tokens | Terminal]:
        try:
            messages = await self._bus.read_log(self._subject)
        except BusError as error:
            log.warning("log_unread", subject=self._subject, error=str(error))
            return
        for message in messages:
            event = _decode(message)
            answer = self._sequencer.offer(event) if event is not None else Ignore()
            if isinstance(answer, Hole):
                if message is messages[0]:
                    raise HeadraceError("replay_expired", f"the log no longer holds tokens from {answer.index} on")
                return
            given = self._given(answer)
            if given is not None:
                yield given

    def _given(self, answer: Deliver | Ignore | Hole | Diverged | End) -> Tokens | Terminal | None:
        match answer:
            case Deliver(tokens):
                return tokens
            case End(terminal):
                return terminal
            case Diverged(index):
                raise HeadraceError("replay_diverged", f"token {index} differs from the one that was already sent")
            case Ignore() | Hole():
                return None


def _decode(message: Message) -> Event | None:
    try:
        return events.decode(message.data)
    except CodecError as error:
        log.warning("undecodable", subject=message.subject, error=str(error))
        return None
