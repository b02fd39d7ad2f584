"""The only wrapper of nats-py: the bus of bus.py on a real NATS server.

It never gives up reconnecting; if the connection is closed all the same, `closed` is set and the process ends loudly.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import ConnectionClosedError, Error, NoRespondersError
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.errors import APIError, KeyNotFoundError, NoStreamResponseError, NotFoundError
from nats.js.kv import KeyValue

from runtime import streams
from runtime.bus import BusError, BusRefused, BusUnavailable, Entry, Message, OnDelivery, OnMessage
from runtime.clock import BrokerClock
from schemas import events, limits, subjects

log = structlog.get_logger()

Answer = TypeVar("Answer")

PULL_EXPIRES_S = 4.0  # below the ack wait: a stopped process has no pull left by the time its work is delivered again
PULL_BEAT_S = 1.0
assert PULL_EXPIRES_S < limits.ACK_WAIT_S
CONFIRM_TIMEOUT_S = 2.0
CONFIRM_TRIES = 4
READ_TIMEOUT_S = 1.0
LOG_BATCH = 512
WRONG_LAST_SEQUENCE = 10071  # the broker's error code
CLOCK_S = 30.0


def backoff_s(failures: int, base: float = 0.05, most: float = 2.0) -> float:
    """Seconds to wait after that many failures in a row (from 1): doubling, capped, with full jitter above a half."""
    return min(most, base * 2.0 ** (failures - 1)) * (0.5 + random.random() / 2)


class _Changed(Exception):
    """A key has another revision than the one that was to be replaced."""


class NatsDelivery:
    """One work item held under its lease."""

    def __init__(self, message: Msg) -> None:
        metadata = message.metadata
        self._message = message
        self.data = message.data
        self.subject = message.subject
        self.attempt = metadata.num_delivered or 1
        self.published_us = int(metadata.timestamp.timestamp() * 1_000_000)
        self.sequence = metadata.sequence.stream

    async def ack(self) -> None:
        """Acknowledges and waits for the broker's word; BusUnavailable without it (the item may come again)."""
        try:
            await self._message.ack_sync(timeout=CONFIRM_TIMEOUT_S)
        except (TimeoutError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"acknowledgement not confirmed: {error!r}") from error

    async def nak(self, delay_s: float) -> None:
        """Gives the item back, to be delivered again after delay_s."""
        await _best_effort(self._message.nak(delay=max(delay_s, 0.001)))

    async def beat(self) -> None:
        """Renews the lease."""
        await _best_effort(self._message.in_progress())


async def _best_effort(operation: Awaitable[None]) -> None:
    """A lease that cannot be renewed or given back runs out by itself: nothing is lost if the broker is away."""
    try:
        await operation
    except Error as error:
        log.debug("lease", error=repr(error))


class NatsPuller:
    """Pull requests to one durable consumer, with a watchdog: a pull that the broker forgot is asked again.

    outstanding counts what was asked for and has neither come nor been declined. A pull request ends when its items came,
    when the broker declines the rest (408 expired, 409 leadership change, 503 no responders), or when the broker's idle
    heartbeats stop.
    """

    def __init__(self, bus: "NatsBus", consumer: str, on_delivery: OnDelivery, on_room: Callable[[], None]) -> None:
        self._bus = bus
        self._on_delivery = on_delivery
        self._on_room = on_room
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.WORK_STREAM}.{consumer}"
        self._inbox = bus.client.new_inbox()
        self._pulls: dict[str, int] = {}  # reply subject -> items still to come, oldest first
        self._heard = asyncio.get_running_loop().time()
        self._subscription: NatsSubscription | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Items asked for that have neither come nor been declined."""
        return sum(self._pulls.values())

    async def open(self) -> None:
        """Subscribes to the inbox and starts the watchdog."""
        self._subscription = await self._bus.client.subscribe(self._inbox + ".*", cb=self._on_message)
        self._watchdog = asyncio.create_task(self._watch(), name="pull-watchdog")

    async def ask(self, count: int) -> None:
        """Asks for count more items."""
        if self._closed or count <= 0:
            return
        self._heard = asyncio.get_running_loop().time()
        reply = f"{self._inbox}.{random.getrandbits(48):x}"
        self._pulls[reply] = count
        body = {"batch": count, "expires": int(PULL_EXPIRES_S * 1e9), "idle_heartbeat": int(PULL_BEAT_S * 1e9)}
        try:
            await self._bus.client.publish(self._next, json.dumps(body).encode(), reply=reply)
        except Error as error:
            log.debug("pull", error=repr(error))  # the watchdog asks again

    async def close(self) -> None:
        """Stops taking: the broker forgets our pulls once nobody listens; items on their way are given back as they come."""
        if self._closed:
            return
        self._closed = True
        self._pulls.clear()
        if self._watchdog:
            self._watchdog.cancel()
        if self._subscription:
            try:
                await self._subscription.drain()  # type: ignore[no-untyped-call]  # nats-py leaves its result untyped
            except Error as error:
                log.debug("pull_close", error=repr(error))  # no connection: no pulls either

    async def _on_message(self, message: Msg) -> None:
        self._heard = asyncio.get_running_loop().time()
        status = (message.headers or {}).get("Status")
        if status is None:
            await self._on_item(message)
        elif status != "100":  # 100 is the idle heartbeat
            self._pulls.pop(message.subject, None)
            self._on_room()

    async def _on_item(self, message: Msg) -> None:
        if self._closed:
            await _best_effort(message.nak(delay=0.001))
            return
        oldest = next(iter(self._pulls), None)
        if oldest is not None:
            self._pulls[oldest] -= 1
            if self._pulls[oldest] == 0:
                del self._pulls[oldest]
        await self._on_delivery(NatsDelivery(message))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PULL_BEAT_S)
            silent = asyncio.get_running_loop().time() - self._heard
            if self._pulls and silent > 3 * PULL_BEAT_S:
                log.warning("pull_silent", seconds=round(silent, 1))
                self.forget()

    def forget(self) -> None:
        """Declares every outstanding pull dead, so that the owner asks again."""
        self._heard = asyncio.get_running_loop().time()
        self._pulls.clear()
        self._on_room()


class NatsBus:
    """One process's connection. Make it with connect()."""

    def __init__(self, client: Client, clock: BrokerClock, log_bytes: int) -> None:
        self.client = client
        self.clock = clock
        self.closed = asyncio.Event()
        self._log_bytes = log_bytes
        self._js: JetStreamContext = client.jetstream(timeout=CONFIRM_TIMEOUT_S)
        self._consumers: dict[str, str] = {}  # consumer -> subject
        self._pullers: list[NatsPuller] = []
        self._cancelled: KeyValue | None = None
        self._closing = False
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls, url: str, name: str, clock: BrokerClock | None = None, log_bytes: int = limits.LOG_BYTES_MAX
    ) -> "NatsBus":
        """Connects, declares the streams and measures the clock; BusUnavailable when nobody answers within 3 s."""
        bus: NatsBus
        client = Client()

        async def on_closed() -> None:
            if not bus._closing:
                log.error("bus_closed")
            bus.closed.set()

        async def on_disconnected() -> None:
            if not bus._closing:
                log.warning("bus_disconnected")

        async def on_reconnected() -> None:
            log.warning("bus_reconnected")
            bus._spawn(bus._recover())

        async def on_error(error: Exception) -> None:
            log.warning("bus_error", error=repr(error))

        bus = cls(client, clock or BrokerClock(), log_bytes)
        try:
            await asyncio.wait_for(
                client.connect(
                    url,
                    name=name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]  # it only sleeps for it
                    connect_timeout=2,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=32 * 1024 * 1024,
                    closed_cb=on_closed,
                    disconnected_cb=on_disconnected,
                    reconnected_cb=on_reconnected,
                    error_cb=on_error,
                ),
                timeout=3,
            )
        except (TimeoutError, OSError, Error, nats.errors.NoServersError) as error:
            bus._closing = True
            await client.close()
            raise BusUnavailable(f"no NATS server answers at {url}: {error!r}") from error
        await bus._declare()
        bus._spawn(bus._keep_clock())
        return bus

    @property
    def connected(self) -> bool:
        """Whether the connection stands at this moment."""
        return bool(self.client.is_connected)

    @property
    def payload_bytes_max(self) -> int:
        """The largest message that the broker takes."""
        return int(self.client.max_payload)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _declare(self) -> None:
        try:
            await streams.declare(self._js, self._log_bytes)
            self._cancelled = await self._js.key_value(subjects.CANCEL_BUCKET)
            for consumer, subject in self._consumers.items():
                await streams.declare_consumer(self._js, subject, consumer)
            await self._measure_clock()
        except APIError as error:
            raise BusRefused(f"the broker refuses our streams: {error}") from error
        except (TimeoutError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"JetStream does not answer: {error!r}") from error

    async def _recover(self) -> None:
        """After a reconnect: everything that must exist is checked, and every pull is asked again."""
        failures = 0
        while self.client.is_connected:
            try:
                await self._declare()
                break
            except BusError as error:
                failures += 1
                log.warning("bus_recover", error=str(error))
                await asyncio.sleep(backoff_s(failures))
        for puller in self._pullers:
            puller.forget()
        for callback in list(self._reconnect_callbacks):
            self._spawn(callback())

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Calls back after every reconnect; returns what stops that."""
        self._reconnect_callbacks.append(callback)
        return lambda: self._reconnect_callbacks.remove(callback)

    async def _keep_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_S)
            try:
                await self._measure_clock()
            except (TimeoutError, Error, NatsTimeout, KeyError, ValueError) as error:
                log.debug("clock", error=repr(error))

    async def _measure_clock(self) -> None:
        local = BrokerClock()
        sent = local.now_us()
        answer = await self.client.request(f"$JS.API.STREAM.INFO.{subjects.WORK_STREAM}", b"", timeout=CONFIRM_TIMEOUT_S)
        received = local.now_us()
        stamp = json.loads(answer.data).get("ts")
        if stamp:
            self.clock.learn(sent, received, int(datetime.fromisoformat(stamp).timestamp() * 1_000_000))

    async def publish(self, subject: str, data: bytes) -> None:
        """Core publish; buffered while the connection is away."""
        try:
            await self.client.publish(subject, data)
        except Error as error:
            raise BusUnavailable(f"cannot publish: {error!r}") from error

    async def publish_confirmed(self, subject: str, data: bytes, message_id: str) -> None:
        """Publishes to a stream and waits until it is stored; tried again under the same message id, so stored once."""
        await self._publish_patiently(subject, data, {"Nats-Msg-Id": message_id})

    async def _publish_patiently(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        failures = 0
        while True:
            try:
                await self._js.publish(subject, data, headers=headers, timeout=CONFIRM_TIMEOUT_S)
                return
            except APIError as error:
                if error.err_code == WRONG_LAST_SEQUENCE:
                    raise _Changed from error
                raise BusRefused(f"the broker refuses {subject}: {error.description}") from error
            except (TimeoutError, NoStreamResponseError, NoRespondersError, NatsTimeout, Error) as error:
                failures += 1
                if failures >= CONFIRM_TRIES or isinstance(error, ConnectionClosedError):
                    raise BusUnavailable(f"{subject} was not confirmed after {failures} tries: {error!r}") from error
                await asyncio.sleep(backoff_s(failures))

    async def subscribe(self, subject: str, on_message: OnMessage) -> NatsSubscription:
        """Live messages of a subject."""

        async def on_nats(message: Msg) -> None:
            await on_message(Message(message.subject, message.data, message.reply))

        try:
            return await self.client.subscribe(subject, cb=on_nats)
        except Error as error:
            raise BusUnavailable(f"cannot subscribe: {error!r}") from error

    async def pull(self, subject: str, consumer: str, on_delivery: OnDelivery, on_room: Callable[[], None]) -> NatsPuller:
        """Declares the durable consumer, waiting for a broker that is just coming back, and opens a puller on it."""
        failures = 0
        while True:
            try:
                await streams.declare_consumer(self._js, subject, consumer)
                break
            except (TimeoutError, APIError, Error, NatsTimeout) as error:
                failures += 1
                if failures >= CONFIRM_TRIES or isinstance(error, ConnectionClosedError):
                    raise BusUnavailable(f"cannot make consumer {consumer}: {error!r}") from error
                await asyncio.sleep(backoff_s(failures))
        self._consumers[consumer] = subject
        puller = NatsPuller(self, consumer, on_delivery, on_room)
        await puller.open()
        self._pullers.append(puller)
        return puller

    async def read_log(self, subject: str, after: int = 0) -> list[Message]:
        """Everything that the log stream still holds of one subject after a sequence, by batched direct gets."""
        return await self._patiently(lambda: self._read_log(subject, after))

    async def _patiently(self, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        """An operation that changes nothing, tried a few times: a broker that is just back needs a moment."""
        failures = 0
        while True:
            try:
                return await operation()
            except BusUnavailable:
                failures += 1
                if failures >= CONFIRM_TRIES or self.client.is_closed:
                    raise
                await asyncio.sleep(backoff_s(failures))

    async def _read_log(self, subject: str, after: int) -> list[Message]:
        stream = subjects.RAW_STREAM if subject.startswith("hr.raw.") else subjects.REPLY_STREAM
        found = await self._read_stream(stream, subject, after)
        kept = await self._read_stream(subjects.END_STREAM, subjects.end(subject), 0)
        return found + [Message(subject, data) for data in events.decode_end(message.data for message in kept)]

    async def _read_stream(self, stream: str, subject: str, after: int) -> list[Message]:
        """Everything of a subject after a sequence: the broker ends a batch at LOG_BATCH messages, or at some bytes."""
        found: list[Message] = []
        pending = True
        while pending:
            batch, pending = await self._read_batch(stream, subject, after)
            found += batch
            after = batch[-1].sequence or after if batch else after
        return found

    async def _read_batch(self, stream: str, subject: str, after: int) -> tuple[list[Message], bool]:
        inbox = self.client.new_inbox()
        answers = await self.client.subscribe(inbox)
        body = {"batch": LOG_BATCH, "next_by_subj": subject, "seq": after + 1}
        found: list[Message] = []
        try:
            await self.client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), reply=inbox)
            while True:
                message = await answers.next_msg(timeout=READ_TIMEOUT_S)
                headers = message.headers or {}
                status = headers.get("Status")
                if status == "503":
                    raise BusUnavailable("the log does not answer")
                if status is not None:  # 204 ends the batch, 404 says that there is nothing
                    return found, bool(found) and int(headers.get("Nats-Num-Pending", "0")) > 0
                found.append(Message(headers["Nats-Subject"], message.data, "", int(headers["Nats-Sequence"])))
        except (TimeoutError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"the log does not answer: {error!r}") from error
        finally:
            await _best_effort(answers.unsubscribe())

    async def read_dead(self, after: int = 0) -> list[Message]:
        """The dead letters, oldest first."""
        return await self._patiently(lambda: self._read_stream(subjects.DEAD_STREAM, subjects.DEAD_ALL, after))

    async def kv_create(self, bucket: str, key: str, data: bytes) -> bool:
        """Puts data under a new key, atomically; False when it is there."""
        return await self.kv_update(bucket, key, data, 0)

    async def kv_update(self, bucket: str, key: str, data: bytes, revision: int) -> bool:
        """Puts data in place of that revision, atomically; False when it is no longer the newest."""
        try:
            await self._publish_patiently(f"$KV.{bucket}.{key}", data, {"Nats-Expected-Last-Subject-Sequence": str(revision)})
        except _Changed:
            return False
        return True

    async def kv_get(self, bucket: str, key: str) -> Entry | None:
        """What is under the key; None when there is nothing."""
        found, _ = await self._patiently(lambda: self._read_batch(f"KV_{bucket}", f"$KV.{bucket}.{key}", 0))
        if not found:
            return None
        assert found[-1].sequence is not None, "what a stream holds has a sequence"
        return Entry(found[-1].data, found[-1].sequence)

    async def kv_note(self, bucket: str, key: str, data: bytes) -> None:
        """Puts data under a key, unconfirmed."""
        await self.publish(f"$KV.{bucket}.{key}", data)

    async def mark_cancelled(self, request: str) -> None:
        """Leaves the mark first, then tells everybody: whoever dequeues between the two sees the mark."""
        assert self._cancelled is not None
        try:
            await self._cancelled.put(request, b"")
        except (TimeoutError, APIError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"cancel mark not stored: {error!r}") from error
        finally:
            await self.publish(subjects.cancel(request), b"")

    async def is_cancelled(self, request: str) -> bool:
        """Whether the request was cancelled."""
        return await self._patiently(lambda: self._is_cancelled(request))

    async def _is_cancelled(self, request: str) -> bool:
        assert self._cancelled is not None
        try:
            await self._cancelled.get(request)
        except (KeyNotFoundError, NotFoundError):
            return False
        except (TimeoutError, APIError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"cancel mark not readable: {error!r}") from error
        return True

    async def backlog(self, subject: str, consumer: str) -> int | None:
        """Work items that wait for, or are held by, the consumer."""
        try:
            info = await self._js.consumer_info(subjects.WORK_STREAM, consumer)
        except NotFoundError:
            return None
        except (TimeoutError, APIError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"backlog of {subject} unknown: {error!r}") from error
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def flush(self) -> None:
        """Returns when the broker has everything that was published."""
        try:
            await self.client.flush(timeout=int(CONFIRM_TIMEOUT_S))
        except (TimeoutError, Error, NatsTimeout) as error:
            raise BusUnavailable(f"flush: {error!r}") from error

    async def close(self) -> None:
        """Flushes what it can and closes."""
        self._closing = True
        for puller in self._pullers:
            await puller.close()
        for task in list(self._tasks):
            task.cancel()
        try:
            await self.flush()
        except BusUnavailable:
            log.warning("bus_close_unflushed")
        try:
            await self.client.close()
        except (Error, OSError, RuntimeError) as error:  # the broker went first
            log.debug("bus_close", error=repr(error))
