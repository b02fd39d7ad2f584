"""The wrapper of nats-py, with nats_pull.py: the bus of bus.py on a real NATS server.

It never gives up reconnecting; if the connection is closed all the same, `closed` is set and the process ends loudly.
"""

import asyncio
import json
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
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from runtime import streams
from runtime.bus import BusError, BusRefused, BusUnavailable, Entry, Message, OnDelivery, OnMessage
from runtime.clock import BrokerClock
from runtime.nats_pull import NatsPuller, best_effort
from runtime.patience import CONFIRM_TIMEOUT_S, CONFIRM_TRIES, READ_TIMEOUT_S, backoff_s
from schemas import events, limits, subjects

log = structlog.get_logger()

Answer = TypeVar("Answer")

LOG_BATCH = 512
WRONG_LAST_SEQUENCE = 10071  # the broker's error code
CLOCK_S = 30.0


class _Changed(Exception):
    """A key has another revision than the one that was to be replaced."""


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
            for consumer, subject in list(self._consumers.items()):  # a stage may open meanwhile
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
        puller = NatsPuller(self.client, consumer, on_delivery, on_room)
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
            await best_effort(answers.unsubscribe())

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
        try:
            await self._publish_patiently(f"$KV.{subjects.CANCEL_BUCKET}.{request}", b"", {})
        finally:
            await self.publish(subjects.cancel(request), b"")

    async def is_cancelled(self, request: str) -> bool:
        """Whether the request was cancelled."""
        return await self.kv_get(subjects.CANCEL_BUCKET, request) is not None

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
