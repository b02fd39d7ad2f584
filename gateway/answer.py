"""One client's view of one request's answer: the followed stream with its clocks, and what a client's going means.

It tells its gateway (the Keeper) when its client has left and when the deadline has passed without an end; what that
means for the request is decided there.
"""

import asyncio
from typing import Protocol

import structlog

from gateway import endings
from gateway.metrics import Metrics
from gateway.resume import Record
from runtime.clock import Clock
from runtime.following import Follow
from runtime.sequencer import Deliver, End
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Terminal, Tokens
from schemas.limits import SLOW_READER_S

log = structlog.get_logger()

Piece = Tokens | Terminal


class Keeper(Protocol):
    """The gateway, as an answer sees it."""

    def client_left(self, answer: "Answer") -> None:
        """Its client went away before the end."""
        ...

    def deadline_passed(self, answer: "Answer") -> None:
        """The deadline and its grace have passed without an end."""
        ...

    def closed(self, answer: "Answer") -> None:
        """It holds nothing any more."""
        ...


class Answer:
    """What a surface reads: next() until a terminal piece, then close(). Every way out must close()."""

    def __init__(
        self,
        record: Record,
        follow: Follow,
        clock: Clock,
        metrics: Metrics,
        keeper: Keeper,
    ) -> None:
        self.record = record
        self.follow = follow
        self.gone = False
        self._clock = clock
        self._metrics = metrics
        self._keeper = keeper
        self._start = follow.index
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.time()
        self._last_token = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._finished = False
        self._closed = False
        metrics.in_flight.inc()

    @property
    def request(self) -> str:
        """The request's id."""
        return self.record.request

    @property
    def start(self) -> int:
        """The first token that was asked for."""
        return self._start

    @property
    def ended(self) -> bool:
        """Whether the terminal piece was given out."""
        return self._finished

    async def open(self) -> None:
        """Listens for events; BusUnavailable."""
        self.record.readers.add(self)
        await self.follow.open()

    def watch_deadline(self) -> None:
        """From now on the end comes by the deadline, whatever the workers do."""
        remaining_s = max(0.0, (self.record.ownership.deadline_us - self._clock.now_us()) / 1e6)
        self._deadline = self._loop.call_later(remaining_s + endings.DEADLINE_GRACE_S, self._keeper.deadline_passed, self)

    async def next(self, patience_s: float) -> list[Piece]:
        """The next pieces, in order; nothing when patience_s passed in silence."""
        pieces: list[Piece] = []
        for action in await self.follow.next(patience_s):
            if isinstance(action, Deliver):
                self._count(action.tokens)
                pieces.append(action.tokens)
            else:
                pieces.append(self._finish(action))
        return pieces

    def end(self, error: HeadraceError) -> None:
        """Ends the stream with this error, at once."""
        self.follow.end(error)

    def disconnected(self) -> None:
        """The client went away: its stream ends here; idempotent."""
        self._leave(HeadraceError("cancelled", "the client went away"))

    def too_slow(self) -> None:
        """The client takes nothing: it is waited for no longer, and is told so if it should read on."""
        self._leave(HeadraceError("slow_reader", f"nothing was read for {SLOW_READER_S:g} s; resume from where you are"))

    def _leave(self, error: HeadraceError) -> None:
        if self._finished or self._closed or self.gone:
            return
        self.gone = True
        self._keeper.client_left(self)
        self.end(error)

    async def close(self) -> None:
        """Stops listening; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.record.readers.discard(self)
        self._metrics.in_flight.dec()
        self._metrics.gaps.inc(self.follow.gaps)
        self._metrics.repeated.inc(self.follow.repeated)
        if self._deadline is not None:
            self._deadline.cancel()
        await self.follow.close()
        self._keeper.closed(self)

    def _count(self, tokens: Tokens) -> None:
        now = self._loop.time()
        if self._last_token:
            self._metrics.between_tokens.observe(now - self._last_token)
        else:
            self._metrics.first_token.observe(now - self._opened)
        self._last_token = now
        self._metrics.tokens.inc(len(tokens.ids))

    def _finish(self, end: End) -> Terminal:
        """The terminal event with the gateway's own last span; one log line a request."""
        terminal = end.outcome
        assert not isinstance(terminal, HeadraceError), "the follower types every error"
        marked = _marked(terminal, self._clock.now_us())
        self._finished = True
        if not self.follow.ended_here:  # else only this stream has ended, not the request
            self.record.terminal = self.record.terminal or marked
        outcome = marked.code if isinstance(marked, Failed) else marked.reason
        self._metrics.end_to_end.observe(self._loop.time() - self._opened)
        self._metrics.endings.labels(outcome).inc()
        log.info("answered", request=self.request, outcome=outcome, tokens=marked.index, epoch=marked.epoch)
        return marked


def _marked(terminal: Terminal, now_us: int) -> Terminal:
    t, timeline = terminal, terminal.timeline.mark("gateway.reply", now_us)
    if isinstance(t, Finished):
        return Finished(t.epoch, t.index, t.reason, t.usage, timeline, t.passages, t.verdicts)
    return Failed(t.epoch, t.index, t.code, t.message, timeline, t.param, t.usage, t.verdicts)
