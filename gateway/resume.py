"""What a gateway remembers of requests, and what it can tell of any request from its log.

The log (hr.reply.<id>) is the truth on what was answered; the registry only adds what the log cannot hold: whose it
is, that it was asked at all, and who reads it here. Which tenant owns a request that another gateway took is asked of
owner_of: with one tenant everything in the log is that tenant's.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gateway.auth import Principal
from runtime.bus import Bus
from runtime.sequencer import Deliver, End, Sequencer
from schemas import events, subjects
from schemas.errors import HeadraceError
from schemas.events import Failed, Terminal
from schemas.timeline import Timeline

RECORDS_MAX = 10_000

State = Literal["queued", "running", "completed", "failed", "cancelled"]


class Reader(Protocol):
    """Somebody who follows a request here."""

    def end(self, error: HeadraceError) -> None:
        """Ends the stream at once."""
        ...


@dataclass(slots=True)
class Record:
    """One request as this gateway knows it. model and deadline_us are None for one that another gateway took."""

    request: str
    tenant: str
    timeline: Timeline
    model: str | None = None
    deadline_us: int | None = None
    on_disconnect: Literal["cancel", "keep"] = "cancel"
    timings: bool = True
    created_s: int = field(default_factory=lambda: int(time.time()))
    cancelled: bool = False
    terminal: Terminal | None = None  # as the client got it
    readers: set[Reader] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A request as its log shows it: tokens so far, and how it ended if it has."""

    tokens: int
    terminal: Terminal | None


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

    def find(self, principal: Principal, request: str) -> Record | None:
        """The request, if this gateway knows it and it is theirs."""
        record = self._records.get(request)
        return record if record is not None and record.tenant == principal.tenant else None


async def locate(bus: Bus, registry: Registry, principal: Principal, request: str) -> Record:
    """The record of a request that is here or in the log; HeadraceError not_found when it is neither, or not theirs."""
    record = registry.find(principal, request)
    if record is not None:
        return record
    if not subjects.is_request_id(request) or await owner_of(bus, request) != principal.tenant:
        raise not_found(request)
    return Record(request, principal.tenant, Timeline(0))


async def owner_of(bus: Bus, request: str) -> str | None:
    """The tenant of a request that this gateway did not take; None when nobody knows the request."""
    return "default" if await bus.read_log(subjects.reply(request)) else None


def not_found(request: str) -> HeadraceError:
    """The answer to anybody who asks for what is not theirs or not there."""
    return HeadraceError("not_found", f"there is no request {request[:32]!r}")


async def snapshot(bus: Bus, request: str) -> Snapshot:
    """What the log holds of a request now."""
    sequencer = Sequencer()
    terminal: Terminal | None = None
    tokens = 0
    for message in await bus.read_log(subjects.reply(request)):
        for action in sequencer.take_log(events.decode(message.data)):
            if isinstance(action, Deliver):
                tokens = action.tokens.end
            elif isinstance(action, End) and not isinstance(action.outcome, HeadraceError):
                terminal = action.outcome
    return Snapshot(tokens, terminal)


def state_of(record: Record, seen: Snapshot) -> State:
    """The one word for where a request is."""
    terminal = record.terminal or seen.terminal
    if terminal is None:
        return "cancelled" if record.cancelled else "running" if seen.tokens else "queued"
    if isinstance(terminal, Failed):
        return "cancelled" if terminal.code == "cancelled" else "failed"
    return "completed"
