"""The broker behind memory_bus.py: streams, durable consumers with leases, buckets, and a journal of what became of work.

It decides at once and knows no network: the connections carry its words. It does to work what a NATS work queue does, as the
contract suite shows by asking both: an item is held under a lease, comes again when the lease lapses, and is gone at the first
acknowledgement, whoever's it is.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtime.bus import BusRefused, Message
from runtime.bus import Entry as Kept
from schemas import limits, subjects

What = Literal["stored", "duplicate", "refused", "delivered", "acknowledged", "given_back", "lapsed"]

# Subjects captured by streams; those in memory are empty after a kill.
STREAMS = {
    "hr.work.": subjects.WORK_STREAM,
    "hr.raw.": subjects.RAW_STREAM,
    "hr.reply.": subjects.REPLY_STREAM,
    "hr.end.": subjects.END_STREAM,
    "hr.dead.": subjects.DEAD_STREAM,
}
IN_MEMORY = (subjects.RAW_STREAM, subjects.REPLY_STREAM)


@dataclass(frozen=True, slots=True)
class Item:
    """One stored message."""

    sequence: int
    subject: str
    data: bytes
    stored_us: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal. attempt is 0 where no delivery is meant; who is the connection that asked or was given."""

    at_us: int
    what: What
    subject: str
    sequence: int
    attempt: int = 0
    who: str = ""
    data: bytes = b""


@dataclass(slots=True, eq=False)
class Pull:
    """A request for items: give() takes each, decline() says that no more come, alive() whether anybody still listens."""

    number: int
    count: int
    who: str
    give: Callable[[int, Item, int], None]
    decline: Callable[[], None]
    alive: Callable[[], bool]


class Connection(Protocol):
    """What the broker knows of a process."""

    def live(self, subject: str, data: bytes) -> None:
        """A live message for whoever subscribed there."""
        ...

    def disconnect(self) -> None:
        """The connection breaks."""
        ...

    def reconnect(self) -> None:
        """The connection stands again."""
        ...


class ManualClock:
    """The broker's time: a start and the event loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_us: int) -> None:
        self._loop = loop
        self._offset_us = start_us - int(loop.time() * 1e6)

    def now_us(self) -> int:
        """Microseconds since the epoch."""
        return self._offset_us + int(self._loop.time() * 1e6)


@dataclass(slots=True)
class _Stream:
    last: int = 0
    by_subject: dict[str, list[Item]] = field(default_factory=dict)
    ids: dict[str, tuple[int, int]] = field(default_factory=dict)  # message id -> sequence, stored_us


@dataclass(slots=True)
class _Lease:
    attempt: int
    expires: float
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Consumer:
    subject: str
    fresh: deque[int]
    again: deque[int] = field(default_factory=deque)  # lapsed or given back
    leases: dict[int, _Lease] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    pulls: deque[Pull] = field(default_factory=deque)


class MemoryBroker:
    """The one broker of a test. watch is called with every journal entry as it is written."""

    def __init__(self, start_us: int, watch: Callable[[Entry], None] = lambda entry: None) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = ManualClock(self.loop, start_us)
        self.context = contextvars.copy_context()
        self.up = True
        self.work_items_max = 1_000_000  # more are refused
        self._kept: dict[tuple[str, str], Kept] = {}  # by bucket and key
        self._revision = 0
        self.journal: list[Entry] = []
        self._watch = watch
        self._streams = {name: _Stream() for name in STREAMS.values()}
        self._consumers: dict[str, _Consumer] = {}
        self._work: dict[int, Item] = {}  # what the work stream holds
        self._connections: list[Connection] = []
        self._pulls = 0

    @property
    def work(self) -> list[Item]:
        """Work items that are not acknowledged."""
        return list(self._work.values())

    def attach(self, connection: Connection) -> None:
        """A process connects."""
        self._connections.append(connection)

    def detach(self, connection: Connection) -> None:
        """A process is gone."""
        if connection in self._connections:
            self._connections.remove(connection)

    def kill(self) -> None:
        """The broker dies: what was in memory is lost, and every connection breaks."""
        self.up = False
        for name in IN_MEMORY:
            self._streams[name] = _Stream()
        work = self._streams[subjects.WORK_STREAM]
        work.ids = {key: value for key, value in work.ids.items() if value[0] in self._work}
        for consumer in self._consumers.values():
            consumer.pulls.clear()
        for connection in list(self._connections):
            connection.disconnect()

    def start(self) -> None:
        """It is back, with what was on file."""
        self.up = True
        for connection in list(self._connections):
            connection.reconnect()

    def publish(self, subject: str, data: bytes) -> None:
        """A core publish: live to whoever listens, captured where a stream has the subject."""
        for connection in list(self._connections):
            connection.live(subject, data)
        if _stream_of(subject) is not None:
            self._append(subject, data, "")

    def store(self, subject: str, data: bytes, message_id: str, who: str) -> None:
        """A confirmed publish: live too, stored once for a message id within the window; BusRefused when full."""
        for connection in list(self._connections):
            connection.live(subject, data)
        name = _stream_of(subject)
        if name is None:
            raise BusRefused(f"no stream takes {subject}")
        stored = self._streams[name].ids.get(message_id)
        if stored is not None and self.clock.now_us() - stored[1] < limits.DUPLICATE_WINDOW_S * 1e6:
            self._write("duplicate", subject, stored[0], who=who, data=data)
        elif name == subjects.WORK_STREAM and len(self._work) >= self.work_items_max:
            self._write("refused", subject, 0, who=who, data=data)
            raise BusRefused("the work queue is full")
        else:
            item = self._append(subject, data, who)
            self._streams[name].ids[message_id] = (item.sequence, item.stored_us)

    def _append(self, subject: str, data: bytes, who: str) -> Item:
        name = _stream_of(subject)
        assert name is not None, f"no stream takes {subject}"
        stream = self._streams[name]
        stream.last += 1
        item = Item(stream.last, subject, data, self.clock.now_us())
        self._write("stored", subject, item.sequence, who=who, data=data)
        if name == subjects.WORK_STREAM:
            self._work[item.sequence] = item
            for consumer in self._consumers.values():
                if consumer.subject == subject:
                    consumer.fresh.append(item.sequence)
                    self._serve(consumer)
        else:
            stream.by_subject.setdefault(subject, []).append(item)
        return item

    def read(self, subject: str, after: int) -> list[Message]:
        """What a log stream holds of one subject after a sequence."""
        name = _stream_of(subject)
        assert name is not None, f"no stream takes {subject}"
        items = self._streams[name].by_subject.get(subject, [])
        return [Message(subject, item.data, "", item.sequence) for item in items if item.sequence > after]

    def read_all(self, name: str) -> list[Item]:
        """Everything that a log stream holds."""
        items = [item for kept in self._streams[name].by_subject.values() for item in kept]
        return sorted(items, key=lambda item: item.sequence)

    def keep(self, bucket: str, key: str, data: bytes, revision: int | None) -> bool:
        """Puts data under a key, in place of that revision (0: of nothing; None: of anything); False when it is another."""
        found = self._kept.get((bucket, key))
        if revision is not None and revision != (found.revision if found else 0):
            return False
        self._revision += 1
        self._kept[bucket, key] = Kept(data, self._revision)
        return True

    def kept(self, bucket: str, key: str) -> Kept | None:
        """What is under a key."""
        return self._kept.get((bucket, key))

    def declare(self, name: str, subject: str) -> None:
        """Makes the durable consumer, once."""
        if name not in self._consumers:
            waiting = deque(item.sequence for item in self._work.values() if item.subject == subject)
            self._consumers[name] = _Consumer(subject, waiting)

    def backlog(self, name: str) -> int | None:
        """Items that wait for, or are held by, the consumer; None when there is no such consumer."""
        consumer = self._consumers.get(name)
        return None if consumer is None else sum(item.subject == consumer.subject for item in self._work.values())

    def next_pull(self) -> int:
        """A number for a pull."""
        self._pulls += 1
        return self._pulls

    def pull(self, name: str, pull: Pull, expires_s: float) -> None:
        """Takes a pull; what has not come after expires_s is declined."""
        consumer = self._consumers[name]
        consumer.pulls.append(pull)
        self.loop.call_later(expires_s, self._expire, consumer, pull, context=self.context)
        self._serve(consumer)

    def forget_pull(self, name: str, number: int) -> None:
        """Nobody listens to that pull any more."""
        consumer = self._consumers[name]
        consumer.pulls = deque(pull for pull in consumer.pulls if pull.number != number)

    def ack(self, name: str, sequence: int, attempt: int, who: str) -> None:
        """The item is gone, whichever of its holders says so."""
        consumer = self._consumers[name]
        item = self._work.pop(sequence, None)
        if item is None:
            return
        self._write("acknowledged", item.subject, sequence, attempt, who, item.data)
        lease = consumer.leases.pop(sequence, None)
        if lease is not None and lease.timer is not None:
            lease.timer.cancel()

    def nak(self, name: str, sequence: int, attempt: int, delay_s: float, who: str) -> None:
        """The item comes again after delay_s, whichever of its holders says so."""
        consumer = self._consumers[name]
        lease = consumer.leases.get(sequence)
        if lease is None:
            return
        self._write("given_back", consumer.subject, sequence, attempt, who)
        lease.expires = self.loop.time() + delay_s
        self._arm(consumer, sequence, lease)

    def renew(self, name: str, sequence: int) -> None:
        """The lease starts again, whichever holder says so."""
        lease = self._consumers[name].leases.get(sequence)
        if lease is not None:
            lease.expires = max(lease.expires, self.loop.time() + limits.ACK_WAIT_S)

    def _serve(self, consumer: _Consumer) -> None:
        """Gives waiting items to waiting pulls, the longest waiting first."""
        while consumer.pulls and (consumer.again or consumer.fresh):
            pull = consumer.pulls.popleft()
            if not pull.alive():
                continue
            sequence = (consumer.again or consumer.fresh).popleft()
            item = self._work.get(sequence)
            if item is None:
                consumer.pulls.appendleft(pull)
                continue
            self._lend(consumer, item, pull)
            pull.count -= 1
            if pull.count:
                consumer.pulls.append(pull)

    def _lend(self, consumer: _Consumer, item: Item, pull: Pull) -> None:
        attempt = consumer.attempts.get(item.sequence, 0) + 1
        consumer.attempts[item.sequence] = attempt
        lease = _Lease(attempt, self.loop.time() + limits.ACK_WAIT_S)
        consumer.leases[item.sequence] = lease
        self._arm(consumer, item.sequence, lease)
        self._write("delivered", item.subject, item.sequence, attempt, pull.who, item.data)
        pull.give(pull.number, item, attempt)

    def _arm(self, consumer: _Consumer, sequence: int, lease: _Lease) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = self.loop.call_at(lease.expires, self._lapse, consumer, sequence, lease, context=self.context)

    def _lapse(self, consumer: _Consumer, sequence: int, lease: _Lease) -> None:
        if consumer.leases.get(sequence) is not lease:
            return
        if lease.expires > self.loop.time():  # renewed meanwhile
            self._arm(consumer, sequence, lease)
            return
        del consumer.leases[sequence]
        self._write("lapsed", consumer.subject, sequence, lease.attempt)
        consumer.again.append(sequence)
        self._serve(consumer)

    def _expire(self, consumer: _Consumer, pull: Pull) -> None:
        if pull in consumer.pulls:
            consumer.pulls.remove(pull)
            pull.decline()

    def _write(self, what: What, subject: str, sequence: int, attempt: int = 0, who: str = "", data: bytes = b"") -> None:
        entry = Entry(self.clock.now_us(), what, subject, sequence, attempt, who, data)
        self.journal.append(entry)
        self._watch(entry)


def _stream_of(subject: str) -> str | None:
    head = ".".join(subject.split(".", 2)[:2]) + "."
    return STREAMS.get(head)
