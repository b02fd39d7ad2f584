"""Work items as nats-py brings them: pulled from a durable consumer, each held under a lease."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error
from nats.errors import TimeoutError as NatsTimeout

from runtime.bus import BusUnavailable, OnDelivery
from runtime.patience import CONFIRM_TIMEOUT_S, PULL_BEAT_S, PULL_EXPIRES_S
from schemas import subjects

log = structlog.get_logger()


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
        await best_effort(self._message.nak(delay=max(delay_s, 0.001)))

    async def beat(self) -> None:
        """Renews the lease."""
        await best_effort(self._message.in_progress())


async def best_effort(operation: Awaitable[None]) -> None:
    """Does without what fails: a lease that is not renewed or given back runs out by itself, so nothing is lost."""
    try:
        await operation
    except Error as error:
        log.debug("best_effort", error=repr(error))


class NatsPuller:
    """Pull requests to one durable consumer, with a watchdog: a pull that the broker forgot is asked again.

    outstanding counts what was asked for and has neither come nor been declined. A pull request ends when its items came,
    when the broker declines the rest (408 expired, 409 leadership change, 503 no responders), or when the broker's idle
    heartbeats stop.
    """

    def __init__(self, client: Client, consumer: str, on_delivery: OnDelivery, on_room: Callable[[], None]) -> None:
        self._client = client
        self._on_delivery = on_delivery
        self._on_room = on_room
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.WORK_STREAM}.{consumer}"
        self._inbox = client.new_inbox()
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
        self._subscription = await self._client.subscribe(self._inbox + ".*", cb=self._on_message)
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
            await self._client.publish(self._next, json.dumps(body).encode(), reply=reply)
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
            await best_effort(message.nak(delay=0.001))
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
