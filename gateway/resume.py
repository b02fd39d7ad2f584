"""What a gateway remembers of requests, and what it can tell of any request from its log.

The log (hr.reply.<id>) is the truth on what was answered, the ownership record on whose it is; the registry only adds
who reads it here.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from gateway import ownership
from gateway.auth import Principal
from gateway.ownership import Ownership
from runtime.bus import Bus
from schemas import events, subjects
from schemas.errors import HeadraceError
from schemas.events import Failed, Terminal, Tokens
from schemas.limits import LOG_AGE_S
from schemas.timeline import Timeline

RECORDS_MAX = 4_096
SAID_AGAIN_S = 1.0  # after the broker's death its publishers say again what its logs have lost

State = Literal["queued", "running", "completed", "failed", "cancelled"]


class Reader(Protocol):
    """Somebody who follows a request here. gone: its client went away."""

    gone: bool

    def end(self, error: HeadraceError) -> None:
        """Ends the stream at once."""
        ...


@dataclass(slots=True)
class Record:
    """One request as this gateway knows it.

    taken_here: this gateway queued it first, so the last reader who leaves here is the one whose going may cancel it.
    """

    ownership: Ownership
    taken_here: bool
    cancelled: bool = False
    terminal: Terminal | None = None  # as the log or a client here got it
    log_gone: bool = False  # it ended so long ago that nothing else is known of it
    readers: set[Reader] = field(default_factory=set)

    @property
    def request(self) -> str:
        """The request's id."""
        return self.ownership.request

    @property
    def timeline(self) -> Timeline:
        """What is known of the time without the log: when it began."""
        return Timeline(self.ownership.created_us)

    def read_by_others(self, reader: Reader) -> bool:
        """Whether somebody else here still follows it."""
        return any(other is not reader and not other.gone for other in self.readers)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A request as its log shows it: tokens [first, end) (first None: none), and how it ended if it has.

    ended: it has, and the log is gone; asked only where the log holds nothing.
    """

    first: int | None
    end: int
    terminal: Terminal | None
    ended: bool = False

    @property
    def empty(self) -> bool:
        """Whether the log holds nothing at all."""
        return self.first is None and self.terminal is None

    def lacks(self, start: int) -> bool:
        """Whether token start was published and is not there any more."""
        if self.first is not None:
            return self.first > start
        return self.terminal is not None and self.terminal.index > start


class Registry:
    """Recent requests of this gateway, bounded: the oldest without readers go first."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._records_max = records_max

    def add(self, record: Record) -> None:
        """Remembers a request."""
        self._records[record.request] = record
        tries = len(self._records)
        while tries and len(self._records) > self._records_max:
            tries -= 1
            oldest = next(iter(self._records))
            if self._records[oldest].readers:
                self._records.move_to_end(oldest)
            else:
                del self._records[oldest]

    def remove(self, record: Record) -> None:
        """Forgets a request that was not taken after all."""
        self._records.pop(record.request, None)

    def get(self, request: str) -> Record | None:
        """The request, if this gateway knows it."""
        return self._records.get(request)


async def locate(bus: Bus, registry: Registry, principal: Principal, request: str) -> Record:
    """The record of a request, whichever gateway took it; HeadraceError not_found unless it is theirs. BusUnavailable."""
    record = registry.get(request)
    if record is None:
        found = await ownership.read(bus, request)
        if found is None:
            raise not_found(request)
        record = registry.get(request)  # somebody may have been quicker
        if record is None:
            record = Record(found, taken_here=False)
            registry.add(record)
    if record.ownership.tenant != principal.tenant:
        raise not_found(request)
    return record


def not_found(request: str) -> HeadraceError:
    """The answer to anybody who asks for what is not theirs or not there."""
    return HeadraceError("not_found", f"there is no request {request[:32]!r}")


async def snapshot(bus: Bus, request: str) -> Snapshot:
    """What the log holds of a request now. BusUnavailable."""
    first: int | None = None
    terminal: Terminal | None = None
    end = epoch = 0
    for message in await bus.read_log(subjects.reply(request)):
        event = events.decode(message.data)
        # What is on file is of every epoch, and has the tokens of which the log may have kept the end alone.
        if message.sequence is not None and (event.epoch < epoch or terminal is not None):
            continue
        epoch = max(epoch, event.epoch)
        if not isinstance(event, Tokens):
            terminal = terminal or event
        elif event.ids:
            first = event.index if first is None else min(first, event.index)
            end = max(end, event.end)
    seen = Snapshot(first, end, terminal)
    if not seen.empty:
        return seen
    return replace(seen, ended=await bus.kv_get(subjects.PROGRESS_BUCKET, subjects.ended(request)) is not None)


async def patient_snapshot(bus: Bus, request: str, start: int) -> Snapshot:
    """The snapshot; while the request runs, what the log lacks may come again in a moment. BusUnavailable."""
    seen = await snapshot(bus, request)
    if seen.terminal is None and seen.lacks(start):
        await asyncio.sleep(SAID_AGAIN_S)
        seen = await snapshot(bus, request)
    return seen


def refuse_unless_held(record: Record, seen: Snapshot, start: int, now_us: int) -> None:
    """HeadraceError replay_expired when the log has lost what was asked for."""
    if seen.lacks(start) or (seen.empty and lost(record, seen, now_us)):
        message = f"the log no longer holds token {start} of request {record.request}"
        raise HeadraceError("replay_expired", message)


def lost(record: Record, seen: Snapshot, now_us: int) -> bool:
    """Whether a log that holds nothing once held this request's answer."""
    if record.terminal is not None or seen.ended:
        return True
    return now_us > max(record.ownership.deadline_us, record.ownership.created_us + int(LOG_AGE_S * 1e6))


def state_of(record: Record, seen: Snapshot) -> State:
    """The one word for where a request is."""
    terminal = record.terminal or seen.terminal
    if terminal is None:
        return "cancelled" if record.cancelled else "running" if seen.end else "queued"
    if isinstance(terminal, Failed):
        return "cancelled" if terminal.code == "cancelled" else "failed"
    return "completed"
