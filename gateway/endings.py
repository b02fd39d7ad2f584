"""Every accepted request gets its one terminal event, even if no worker is left to publish it.

Whoever holds the work has the first word: it knows the usage. Only when nothing comes does the gateway write the end
itself, under the message id of the attempt that it has seen: a worker that was merely slow then says it in vain.

    cancelled      mark and broadcast, wait CANCEL_GRACE_S for a worker's word, else write it
    deadline       the reader waited DEADLINE_GRACE_S already: write it at once, then mark, so that nobody computes on
    left to run    nobody reads a kept request here any more: its deadline is minded all the same, once the broker is there

Of a request whose log is gone because it ended long ago nothing is written.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from gateway.resume import Record, snapshot
from runtime.bus import Bus, BusError, BusUnavailable
from runtime.following import Follow
from runtime.patience import backoff_s
from runtime.publishing import Publisher
from runtime.sequencer import Deliver
from schemas import subjects
from schemas.codec import CodecError
from schemas.errors import HeadraceError
from schemas.events import Failed, Terminal, Tokens, Usage, joined

log = structlog.get_logger()

CANCEL_GRACE_S = 2.0  # a step of a busy engine and a guard's last words
DEADLINE_GRACE_S = 1.0  # a worker's own word about the deadline comes first
LOCAL_S = 1.0  # so long after that, readers here are ended whatever the broker does
READ_S = 5.0  # for one reading of the log


class Endings:
    """Sees to the ends of one gateway's requests, in the background."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks: set[asyncio.Task[Any]] = set()
        self._vigils: dict[str, asyncio.TimerHandle] = {}

    async def cancel(self, record: Record) -> "asyncio.Task[Terminal | None]":
        """Tells everybody to stop; the task gives the request's end, None without a broker. BusUnavailable: untold."""
        record.cancelled = True
        await self._bus.mark_cancelled(record.request)
        return self.spawn(self._cancelled(record))

    def abandon(self, record: Record) -> None:
        """Cancels in the background, as well as the broker allows at this moment."""
        self.spawn(self._abandon(record))

    def untake(self, request: str) -> None:
        """A request that may be queued although its client was told that it is not: nobody shall work on it."""
        self.spawn(self._mark(request))

    def expire(self, record: Record) -> None:
        """The deadline has passed without a word."""
        self.spawn(self._expired(record))

    def watch(self, record: Record) -> None:
        """Minds the deadline of a request that nobody reads here."""
        remaining_s = (record.ownership.deadline_us - self._bus.clock.now_us()) / 1e6
        wait_s = max(0.0, remaining_s) + DEADLINE_GRACE_S
        timer = asyncio.get_running_loop().call_later(wait_s, self._vigil_over, record)
        previous, self._vigils[record.request] = self._vigils.get(record.request), timer
        if previous is not None:
            previous.cancel()

    async def finish(self, seconds: float) -> None:
        """Waits so long for what is under way; the vigils are left to the workers."""
        for timer in self._vigils.values():
            timer.cancel()
        self._vigils.clear()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Runs it in the background; finish() waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _vigil_over(self, record: Record) -> None:
        self._vigils.pop(record.request, None)
        if record.terminal is not None:
            return
        if self._bus.connected:
            self.expire(record)
        else:  # nobody waits here, and whether it has ended is on file
            self.watch(record)

    async def _abandon(self, record: Record) -> None:
        """Until it is told, or is over: the broker may be away just now, and a worker would go on for nobody."""
        failures = 0
        while self._bus.clock.now_us() < record.ownership.deadline_us:
            try:
                await (await self.cancel(record))
                return
            except BusUnavailable as error:
                failures += 1
                log.warning("cancel_untold", request=record.request, error=str(error))
                await asyncio.sleep(backoff_s(failures))

    async def _cancelled(self, record: Record) -> Terminal | None:
        error = HeadraceError("cancelled", "the request was cancelled")
        end = await self._settle(record, error, CANCEL_GRACE_S)
        if end is None:
            end_here(record, error)
        return end

    async def _expired(self, record: Record) -> None:
        """Readers get the end from the log; if there is none in time, from here."""
        error = HeadraceError("deadline_exceeded", "no worker ended the request by its deadline")
        settling = self.spawn(self._settle(record, error, 0.0))
        await asyncio.wait({settling}, timeout=LOCAL_S if self._bus.connected else 0.0)
        end: Terminal | None = settling.result() if settling.done() else None
        if record.log_gone:
            return
        if end is None:
            end_here(record, error)
        if end is None or (isinstance(end, Failed) and end.code == error.code):
            record.cancelled = True
            await self._mark(record.request)

    async def _mark(self, request: str) -> None:
        try:
            await self._bus.mark_cancelled(request)
        except BusError as error:
            log.warning("cancel_untold", request=request, error=str(error))

    async def _settle(self, record: Record, error: HeadraceError, grace_s: float) -> Terminal | None:
        """The request's end: the one in the log if it comes within grace_s, else this error, written there."""
        reading = _Reading(Follow(self._bus, subjects.reply(record.request), record.timeline, log_first=True))
        try:
            await reading.follow.open()
            end = await reading.until_end(grace_s)
            if end is None:
                seen = await snapshot(self._bus, record.request)
                end, record.log_gone = seen.terminal, seen.ended
            if end is None and not record.log_gone:
                end = await self._write(record, error, reading)
        except (BusError, CodecError) as trouble:
            log.warning("end_unwritten", request=record.request, code=error.code, error=str(trouble))
            return None
        finally:
            await reading.follow.close()
        record.terminal = record.terminal or end
        return end

    async def _write(self, record: Record, error: HeadraceError, reading: "_Reading") -> Terminal:
        epoch = max([1, *(tokens.epoch for tokens in reading.said)])
        said = joined(epoch, reading.said)
        usage = Usage(0, said.end)  # of the prompt nothing is known to have been computed
        timeline = record.timeline.mark("gateway.wait", self._bus.clock.now_us())
        failed = Failed(epoch, said.end, error.code, error.message, timeline, error.param, usage)
        publisher = Publisher(self._bus, subjects.reply(record.request), epoch, said)
        publisher.close()
        await publisher.end(failed)
        log.info("ended_by_gateway", request=record.request, code=error.code, tokens=said.end)
        return (await snapshot(self._bus, record.request)).terminal or failed  # of two that write at once, one is heard


class _Reading:
    """What the log says of a request, for as long as somebody wants to wait."""

    def __init__(self, follow: Follow) -> None:
        self.follow = follow
        self.said: list[Tokens] = []

    async def until_end(self, patience_s: float) -> Terminal | None:
        """The terminal event, if it is there or comes in time."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + patience_s
        try:
            async with asyncio.timeout(patience_s + READ_S):
                while True:
                    for action in await self.follow.next(max(0.0, give_up - loop.time())):
                        if isinstance(action, Deliver):
                            self.said.append(action.tokens)
                        else:
                            return None if self.follow.ended_here else _in_log(action.outcome)
                    if loop.time() >= give_up:
                        return None
        except TimeoutError:
            return None


def _in_log(outcome: Terminal | HeadraceError) -> Terminal:
    assert not isinstance(outcome, HeadraceError), "the follower types every error"
    return outcome


def end_here(record: Record, error: HeadraceError) -> None:
    """Ends every stream of the request at this gateway."""
    for reader in list(record.readers):
        reader.end(error)
