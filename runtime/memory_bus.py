"""The bus in one process: a broker that keeps its promises and no others, for simulations and for tests without a server.

It is honest. What NATS may do, it does: redeliver, take the old holder's acknowledgement for the new one's, deliver live what
it does not store twice, forget its memory logs when it dies. It tells everything that happens to work in a journal. Time is
the event loop's, so a loop on a manual clock makes the whole bus run on it; what lies between a process and the broker is a
Network, and a test puts its faults there.
"""

import asyncio
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from runtime.bus import BusRefused, BusUnavailable, Entry, Message, OnDelivery, OnMessage
from runtime.memory_broker import MemoryBroker
from runtime.memory_ends import MemoryPuller, MemorySubscription
from runtime.memory_network import Network, Wire
from runtime.patience import CONFIRM_TIMEOUT_S, CONFIRM_TRIES, READ_TIMEOUT_S, backoff_s
from schemas import events, limits, subjects


class MemoryBus:
    """One process's connection to a MemoryBroker. What comes in runs in the context in which the connection was made."""

    def __init__(self, broker: MemoryBroker, name: str, network: Network | None = None) -> None:
        self.broker = broker
        self.clock = broker.clock
        self.name = name
        self.loop = asyncio.get_running_loop()
        self._subscriptions: list[MemorySubscription] = []
        self._listening: list[MemorySubscription] = []  # those of which the broker knows
        self._network = network or Network()
        self._context = contextvars.copy_context()
        self._up = Wire(self.loop, broker.context)
        self._down = Wire(self.loop, self._context)
        self._unsent: list[Callable[[], None]] = []  # while the connection is away
        self._pullers: list[MemoryPuller] = []
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._generation = 0  # of the connection: what was on its way when it broke never comes
        self._severed = False
        self._connected = True
        broker.attach(self)

    @property
    def connected(self) -> bool:
        """Whether the connection stands at this moment."""
        return self._connected and not self._severed

    @property
    def payload_bytes_max(self) -> int:
        """The largest message that the broker takes."""
        return limits.PAYLOAD_BYTES_MAX

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """A task of this connection."""
        task: asyncio.Task[None] = self.loop.create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def send(self, what: str, subject: str, operation: Callable[[], None]) -> None:
        """Carries one message to the broker, or keeps it until the connection is back."""
        self._network.sending(what, subject)
        if self._severed or self._network.loses(what, subject):
            return
        if not self._connected:
            self._unsent.append(operation)
        else:
            self._up.carry(self._network.delay_s(what, subject), self._at_broker(operation))
        self._network.sent(what, subject)

    def receive(self, what: str, subject: str, arrive: Callable[[], None], extra_s: float = 0.0) -> None:
        """Carries one message from the broker. With extra_s others overtake it."""
        if not self.connected:
            return
        generation = self._generation

        def at_process() -> None:
            if generation == self._generation and not self._severed:
                arrive()

        delay = self._network.delay_s(what, subject)
        if extra_s:
            self.loop.call_later(delay + extra_s, at_process, context=self._context)
        else:
            self._down.carry(delay, at_process)

    def _at_broker(self, operation: Callable[[], None]) -> Callable[[], None]:
        generation = self._generation
        return lambda: operation() if self.broker.up and generation == self._generation else None

    async def request(self, what: str, subject: str, operation: Callable[[], Any], timeout_s: float) -> Any:
        """The broker's answer to one operation; BusRefused is its own, BusUnavailable when none comes within timeout_s."""
        if self._severed:
            raise BusUnavailable("the connection is closed")
        answer: asyncio.Future[Any] = self.loop.create_future()

        def settle(outcome: Any) -> None:
            if answer.done():
                return
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        def at_broker() -> None:
            outcome: Any
            try:
                outcome = operation()
            except BusRefused as error:
                outcome = error
            if not self._network.loses_answer(what, subject):
                self.receive("answer", subject, lambda: settle(outcome))

        self.send(what, subject, at_broker)
        silence = BusUnavailable(f"{what} {subject}: no answer within {timeout_s} s")
        timer = self.loop.call_later(timeout_s, settle, silence)
        try:
            return await answer
        finally:
            timer.cancel()

    async def _patiently(self, what: str, subject: str, operation: Callable[[], Any], timeout_s: float) -> Any:
        failures = 0
        while True:
            try:
                return await self.request(what, subject, operation, timeout_s)
            except BusUnavailable as error:
                failures += 1
                if failures >= CONFIRM_TRIES or self._severed:
                    raise BusUnavailable(f"{what} {subject} was not answered after {failures} tries") from error
                await asyncio.sleep(backoff_s(failures))

    async def publish(self, subject: str, data: bytes) -> None:
        """Core publish: no confirmation."""
        if self._severed:
            raise BusUnavailable("cannot publish: the connection is closed")
        self.send("publish", subject, lambda: self.broker.publish(subject, data))

    async def publish_confirmed(self, subject: str, data: bytes, message_id: str) -> None:
        """Returns when stored, once for a message id; tried again under the same id."""
        if len(data) > limits.PAYLOAD_BYTES_MAX:
            raise BusRefused(f"the broker refuses {subject}: {len(data)} bytes are over its limit")
        await self._patiently(
            "confirm", subject, lambda: self.broker.store(subject, data, message_id, self.name), CONFIRM_TIMEOUT_S
        )

    async def subscribe(self, subject: str, on_message: OnMessage) -> MemorySubscription:
        """Live messages of a subject."""
        if self._severed:
            raise BusUnavailable("cannot subscribe: the connection is closed")
        subscription = MemorySubscription(self, subject, on_message, deque())
        self._subscriptions.append(subscription)
        self.send("subscribe", subject, lambda: self._listening.append(subscription))
        return subscription

    def unsubscribe(self, subscription: MemorySubscription) -> None:
        """Nothing more comes for it; idempotent."""
        for known in (self._subscriptions, self._listening):
            if subscription in known:
                known.remove(subscription)

    def live(self, subject: str, data: bytes) -> None:
        """The broker has a live message: it goes on the wire for every subscription that wants it."""
        for subscription in list(self._listening):
            if matches(subscription.pattern, subject):
                for extra_s in self._network.copies_s(subject):
                    self._live(subscription, Message(subject, data), extra_s)

    def _live(self, subscription: MemorySubscription, message: Message, extra_s: float) -> None:
        self.receive("live", message.subject, lambda: subscription.arrive(message), extra_s)

    async def pull(self, subject: str, consumer: str, on_delivery: OnDelivery, on_room: Callable[[], None]) -> MemoryPuller:
        """Declares the durable consumer of that subject and opens a puller on it."""
        await self._patiently("declare", subject, lambda: self.broker.declare(consumer, subject), CONFIRM_TIMEOUT_S)
        puller = MemoryPuller(self, consumer, on_delivery, on_room)
        self._pullers.append(puller)
        return puller

    async def read_log(self, subject: str, after: int = 0) -> list[Message]:
        """What the captured log holds of one subject after a sequence, and a finished answer on file that it has lost."""
        found: list[Message] = await self._patiently("read", subject, lambda: self.broker.read(subject, after), READ_TIMEOUT_S)
        end = subjects.end(subject)
        kept = await self._patiently("read", end, lambda: self.broker.read(end, 0), READ_TIMEOUT_S)
        return found + [Message(subject, data) for data in events.decode_end(message.data for message in kept)]

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Calls back after every reconnect; returns what stops that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def kv_create(self, bucket: str, key: str, data: bytes) -> bool:
        """Puts data under a new key, atomically; False when it is there."""
        return await self.kv_update(bucket, key, data, 0)

    async def kv_update(self, bucket: str, key: str, data: bytes, revision: int) -> bool:
        """Puts data in place of that revision, atomically; False when it is no longer the newest."""
        put = functools.partial(self.broker.keep, bucket, key, data, revision)
        done: bool = await self._patiently("put", key, put, CONFIRM_TIMEOUT_S)
        return done

    async def kv_get(self, bucket: str, key: str) -> Entry | None:
        """What is under the key; None when there is nothing."""
        found: Entry | None = await self._patiently("get", key, lambda: self.broker.kept(bucket, key), READ_TIMEOUT_S)
        return found

    async def kv_note(self, bucket: str, key: str, data: bytes) -> None:
        """Puts data under a key, unconfirmed."""

        def note() -> None:
            self.broker.keep(bucket, key, data, None)

        self.send("note", key, note)

    async def mark_cancelled(self, request: str) -> None:
        """Leaves the mark first, then tells everybody."""
        try:
            mark = functools.partial(self.broker.keep, subjects.CANCEL_BUCKET, request, b"", None)
            await self.request("mark", request, mark, CONFIRM_TIMEOUT_S)
        finally:
            await self.publish(subjects.cancel(request), b"")

    async def is_cancelled(self, request: str) -> bool:
        """Whether the request was cancelled."""
        return await self.kv_get(subjects.CANCEL_BUCKET, request) is not None

    async def backlog(self, subject: str, consumer: str) -> int | None:
        """Work items that wait for, or are held by, the consumer."""
        count: int | None = await self.request("backlog", subject, lambda: self.broker.backlog(consumer), CONFIRM_TIMEOUT_S)
        return count

    async def flush(self) -> None:
        """Returns when the broker has everything that was published."""
        await self.request("flush", "", lambda: None, CONFIRM_TIMEOUT_S)

    def disconnect(self) -> None:
        """The connection breaks: what was on its way is lost, both ways; what is sent now waits for reconnect()."""
        self._connected = False
        self._generation += 1
        self._listening.clear()

    def reconnect(self) -> None:
        """The connection stands again."""
        if self._severed:
            return
        self._connected = True
        unsent, self._unsent = self._unsent, []
        for operation in unsent:
            self._up.carry(0.0, self._at_broker(operation))
        self._listening = list(self._subscriptions)
        self.receive("recover", "", self._recover)

    def _recover(self) -> None:
        """As a client does after a reconnect: ask again for work, and tell who wants to know."""
        for puller in self._pullers:
            puller.forget()
        for callback in list(self._callbacks):
            self.spawn(callback())

    def sever(self) -> None:
        """The process is gone: nothing goes out and nothing comes in any more. What was sent arrives."""
        self._severed = True
        self.broker.detach(self)

    async def close(self) -> None:
        """Flushes what it can and closes."""
        for puller in self._pullers:
            await puller.close()
        with contextlib.suppress(BusUnavailable):
            await self.flush()
        self.sever()


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is one of a pattern's: * is one token, > is the rest."""
    if pattern == subject:
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(found) >= len(wanted) and all(w in ("*", f) for w, f in zip(wanted[:-1], found, strict=False))
    return len(wanted) == len(found) and all(w in ("*", f) for w, f in zip(wanted, found, strict=True))
