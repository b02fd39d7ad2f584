"""Moves one request's bytes into its sequencer: a live subscription, and the log wherever the live one has a hole.

The reader sets the pace. Live messages wait in a bounded queue; when it is full the newest takes the place of the one
before it, the sequencer sees the hole, and the log fills it. So a reader that is slow costs a bounded memory and slows
nobody.

A live message can be lost (a reconnect, an overload), the last one too. After a silence the log is looked at.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from runtime.bus import Bus, BusError, Message, Subscription
from runtime.patience import backoff_s
from runtime.sequencer import Action, Deliver, End, FillGap, Sequencer
from schemas import events, limits
from schemas.codec import CodecError
from schemas.errors import HeadraceError
from schemas.events import Event, Failed, Tokens
from schemas.timeline import Timeline

log = structlog.get_logger()

QUEUE_MESSAGES_MAX = 256
SILENCE_S = 3.0  # then the log is looked at
GAP_S = 3 * limits.ACK_WAIT_S  # a hole that stays so long is final: the next holder of the work could not fill it either
REWIND_EVERY = 10  # looks; a log that began anew (a broker that lost its memory) is found by reading from its start


class Follow:
    """One reader of one request's subject (hr.raw or hr.reply), from token index start on.

    timeline is what is told when the end is made here.
    """

    def __init__(self, bus: Bus, subject: str, timeline: Timeline, start: int = 0, log_first: bool = False) -> None:
        self._bus = bus
        self._subject = subject
        self._timeline = timeline
        self._sequencer = Sequencer(start)
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._subscription: Subscription | None = None
        self._forget: Callable[[], None] | None = None
        self._ending: HeadraceError | None = None
        self._gap = False
        self._after = 0  # place in the log up to which it was read
        self._looks = 0
        self._resumed = log_first
        self._look_at = 0.0 if log_first else self._loop.time() + SILENCE_S
        self.overflowed = False
        self.gaps = 0
        self.ended_here = False  # the end is not the request's own: nothing in the log says it

    @property
    def index(self) -> int:
        """The next token that will be delivered."""
        return self._sequencer.index

    @property
    def repeated(self) -> int:
        """Live tokens that came again, and were not delivered again."""
        return self._sequencer.repeated

    async def open(self) -> None:
        """Listens; before the work is published, so that nothing is missed. BusUnavailable."""
        self._subscription = await self._bus.subscribe(self._subject, self._on_message)
        self._forget = self._bus.on_reconnect(self._on_reconnect)

    async def close(self) -> None:
        """Stops listening; idempotent."""
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            try:
                await subscription.unsubscribe()
            except Exception as error:  # a connection that is gone has no subscriptions either
                log.debug("unsubscribe", error=repr(error))

    def end(self, error: HeadraceError) -> None:
        """Ends the stream at once with this error, whatever the workers do; the first call counts."""
        if self._ending is None:
            self._ending = error
            self._wake()

    async def next(self, patience_s: float) -> list[Deliver | End]:
        """What comes next, in order; nothing when patience_s passed in silence. After an End there is nothing more."""
        give_up = self._loop.time() + patience_s
        while not self._sequencer.ended:
            if self._ending is not None:
                return [self._end_here(self._ending)]
            if self._gap:
                actions = await self._fill()
                if actions:
                    return actions
            elif self._queue:
                actions = self._take_queued()
                if actions:
                    return actions
            elif (now := self._loop.time()) >= self._look_at:
                self._look_at = now + SILENCE_S
                actions = await self._look()
                if actions:
                    return actions
            elif now >= give_up:
                return []
            else:
                await self._wait(min(give_up, self._look_at) - now)
        return []

    async def _on_message(self, message: Message) -> None:
        if len(self._queue) >= QUEUE_MESSAGES_MAX:
            self._queue.pop()
            self.overflowed = True
        self._queue.append(message.data)
        self._wake()

    async def _on_reconnect(self) -> None:
        """The log may have begun anew: it is read from its beginning, now."""
        self._rewind()
        self._look_at = 0.0
        self._wake()

    def _rewind(self) -> None:
        self._after = 0
        self._sequencer.rewind_log()

    def _wake(self, *_: object) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, seconds: float) -> None:
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _take_queued(self) -> list[Deliver | End]:
        """Everything that has come, up to a hole or the end."""
        found: list[Deliver | End] = []
        self._look_at = self._loop.time() + SILENCE_S
        while self._queue and not self._gap and not self._sequencer.ended:
            self._put(found, self._queue.popleft(), self._sequencer.take)
        return found

    def _put(self, found: list[Deliver | End], data: bytes, take: Callable[[Event], list[Action]]) -> None:
        try:
            event = events.decode(data)
        except CodecError as error:
            log.error("undecodable", subject=self._subject, error=str(error))
            found.append(self._end_here(HeadraceError("internal", "an event of this request cannot be read")))
            return
        for action in take(event):
            if isinstance(action, Deliver):
                found.append(action)
            elif isinstance(action, End):
                found.append(self._typed(action))
            elif isinstance(action, FillGap):
                self._gap = True

    async def _look(self) -> list[Deliver | End]:
        """Reads what the log has gained since the last look."""
        self._looks += 1
        if self._looks % REWIND_EVERY == 0:
            self._rewind()
        found: list[Deliver | End] = []
        try:
            messages = await self._bus.read_log(self._subject, self._after)
        except BusError as error:
            log.debug("log_unread", subject=self._subject, error=str(error))
            return found
        for message in messages:
            self._after = message.sequence or self._after
            if not self._sequencer.ended:
                self._put(found, message.data, _taker(self._sequencer, message))
        self._gap = self._sequencer.hole
        return found

    async def _fill(self) -> list[Deliver | End]:
        """Reads the log until something comes of it: the log may lag behind the live subject by some milliseconds."""
        self.gaps += 1
        give_up = self._loop.time() + GAP_S
        failures = 0
        while self._ending is None:
            found = await self._look()
            if found or not self._gap:
                return found
            failures += 1
            now = self._loop.time()
            if not self._bus.connected:
                give_up = now + GAP_S
            elif now > give_up:
                return [self._lost()]
            await asyncio.sleep(backoff_s(failures, base=0.01, most=0.25))
        return []

    def _lost(self) -> End:
        end = self._sequencer.give_up()
        log.error("hole", subject=self._subject, index=self.index, overflowed=self.overflowed)
        if isinstance(end.outcome, HeadraceError) and self._resumed and self.index == self._sequencer.start:
            message = f"the log no longer holds token {self.index} of this request"
            return self._end_here(HeadraceError("replay_expired", message))
        if isinstance(end.outcome, HeadraceError) and self.overflowed:
            return self._end_here(HeadraceError("slow_reader", "you read too slowly: what you missed is lost"))
        return self._typed(end)

    def _end_here(self, error: HeadraceError) -> End:
        self._sequencer.ended = True
        return self._typed(End(error))

    def _typed(self, end: End) -> End:
        """An error that was found here, as the terminal event it amounts to."""
        error = end.outcome
        if not isinstance(error, HeadraceError):
            return end
        self.ended_here = True
        epoch, index = self._sequencer.epoch, self._sequencer.index
        return End(Failed(epoch, index, error.code, error.message, self._timeline, error.param))


def _taker(sequencer: Sequencer, message: Message) -> Callable[[Event], list[Action]]:
    """How the sequencer takes what read_log gave: what has no sequence is the finished answer on file."""
    return sequencer.take_file if message.sequence is None else sequencer.take_log


@dataclass(frozen=True, slots=True)
class Before:
    """What earlier attempts published on a subject: tokens from 0 under the highest epoch, and whether it has ended."""

    said: Tokens
    ended: bool

    @property
    def epoch(self) -> int:
        """The highest epoch; 0 when nobody has said anything."""
        return self.said.epoch

    @property
    def ids(self) -> tuple[int | None, ...]:
        """The tokens' ids."""
        return self.said.ids

    @property
    def texts(self) -> tuple[str, ...]:
        """The tokens' texts."""
        return self.said.texts


NOTHING_BEFORE = Before(Tokens(0, 0, (), ()), ended=False)


def emitted_before(log: Iterable[Message]) -> Before:
    """Reads a whole log as a reader would, up to its first hole: what lies beyond a hole reached nobody in order."""
    sequencer = Sequencer()
    said: list[Tokens] = []
    for message in log:
        for action in _taker(sequencer, message)(events.decode(message.data)):
            if isinstance(action, Deliver):
                said.append(action.tokens)
    return Before(events.joined(sequencer.epoch, said), sequencer.ended)
