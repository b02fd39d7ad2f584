"""One client's view of one request's answer: the followed stream with its clocks, and what a client's going means.

Whoever made the request owns it: their going cancels it (unless they asked to keep it), and its deadline is watched
here. A resumed answer only reads.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from gateway.metrics import Metrics
from gateway.resume import Record
from runtime.bus import Bus, BusError
from runtime.following import Follow
from runtime.sequencer import Deliver, End
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Terminal, Tokens
from schemas.limits import DEADLINE_MS_MAX

log = structlog.get_logger()

DEADLINE_GRACE_S = 1.0  # a worker's own word about the deadline comes first

Piece = Tokens | Terminal

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Answer:
    """What a surface reads: next() until a terminal piece, then close(). Every way out must close()."""

    def __init__(
        self,
        record: Record,
        follow: Follow,
        bus: Bus,
        metrics: Metrics,
        spawn: Spawn,
        on_closed: Callable[["Answer"], None],
        owner: bool,
    ) -> None:
        self.record = record
        self.follow = follow
        self._bus = bus
        self._metrics = metrics
        self._spawn = spawn
        self._on_closed = on_closed
        self._owner = owner
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

    async def open(self) -> None:
        """Listens for events; BusUnavailable."""
        self.record.readers.add(self)
        await self.follow.open()

    def watch_deadline(self) -> None:
        """From now on the end comes by the deadline; a resumed answer of unknown deadline: by the longest there is.

        What has ended already must be in the log: if it is not, it never comes.
        """
        if self.record.terminal is not None:
            remaining_s = 0.0
        elif self.record.deadline_us is None:
            remaining_s = DEADLINE_MS_MAX / 1000
        else:
            remaining_s = max(0.0, (self.record.deadline_us - self._bus.clock.now_us()) / 1e6)
        self._deadline = self._loop.call_later(remaining_s + DEADLINE_GRACE_S, self._expire)

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
        """The client went away: its stream ends, and the request with it unless it was to be kept."""
        if self._finished or self._closed:
            return
        if self._owner and self.record.on_disconnect == "cancel":
            self.record.cancelled = True
            self._spawn(tell_cancelled(self._bus, self.request))
        self.end(HeadraceError("cancelled", "the client went away"))

    async def close(self) -> None:
        """Stops listening; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.record.readers.discard(self)
        self._metrics.in_flight.dec()
        if self.follow.gaps:
            self._metrics.gaps.inc(self.follow.gaps)
        if self._deadline is not None:
            self._deadline.cancel()
        await self.follow.close()
        self._on_closed(self)

    def _expire(self) -> None:
        ended = self.record.terminal
        if isinstance(ended, Failed):
            self.end(HeadraceError(ended.code, ended.message, ended.param))
        elif ended is not None:
            self.end(HeadraceError("replay_expired", "the log no longer holds this request's answer"))
        else:
            self.end(HeadraceError("deadline_exceeded", "no worker ended the request by its deadline"))
        if self._owner:
            self.record.cancelled = True
            self._spawn(tell_cancelled(self._bus, self.request))

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
        marked = _marked(terminal, self._bus.clock.now_us())
        self._finished = True
        if not self.follow.ended_here or self.record.cancelled:  # else only this stream has ended, not the request
            self.record.terminal = marked
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


async def tell_cancelled(bus: Bus, request: str) -> None:
    """Leaves the cancel mark, as well as the broker allows at this moment."""
    try:
        await bus.mark_cancelled(request)
    except BusError as error:
        log.warning("cancel_untold", request=request, error=str(error))
