"""The door: what is taken in, and in which order. Listen first, then publish, so that no event can be missed.

    draining                    shutting_down        a stage without a worker    stage_unavailable
    requests_max in flight      overloaded           a model nobody has          model_not_found
    over the broker's limit     payload_too_large    no broker                   stage_unavailable

To drain: refuse new requests, wait for the running streams, end those that remain with shutting_down.
"""

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any

import structlog

from gateway.answer import Answer, tell_cancelled
from gateway.auth import Principal
from gateway.envelopes import Stamp, stamp
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.resume import Record, Registry, locate
from runtime.bus import Bus, BusRefused, BusUnavailable
from runtime.following import Follow
from runtime.settings import Settings
from schemas import subjects
from schemas.codec import CodecError
from schemas.envelope import Envelope
from schemas.errors import HeadraceError
from schemas.requests import ChatCompletionRequest, CompletionRequest
from schemas.timeline import Timeline

log = structlog.get_logger()


class Door:
    """One gateway's requests: those taken in, those followed, and those remembered."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self.settings = settings
        self.bus = bus
        self.fleet = Fleet(bus)
        self.metrics = Metrics(self.fleet)
        self.registry = Registry()
        self.draining = False
        self._answers: set[Answer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = False

    async def open(self) -> None:
        """Starts listening to the workers; idempotent."""
        if not self._opened:
            self._opened = True
            await self.fleet.open()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for the running ones, then ends the rest with shutting_down."""
        self.draining = True
        log.info("drain", held=len(self._answers), seconds=seconds)
        if not await self._idle_within(seconds):
            for answer in list(self._answers):
                answer.end(HeadraceError("shutting_down", "the gateway stops; resume at another one"))
            await self._idle_within(2.0)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=2.0)

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def admit(
        self,
        asked: ChatCompletionRequest | CompletionRequest,
        principal: Principal,
        request: str,
        arrived_us: int,
    ) -> Answer:
        """Queues the request and returns its answer, listening; HeadraceError when it is not taken."""
        self._refuse_if_full()
        envelope = stamp(asked, Stamp(request, principal.tenant, arrived_us, secrets.randbelow(2**63)), self.settings)
        self.fleet.check(envelope)
        extras = asked.headrace
        record = Record(
            request,
            principal.tenant,
            envelope.timeline,
            envelope.model,
            envelope.deadline_us,
            extras.on_disconnect,
            extras.timings,
        )
        answer = self._answer(record, Follow(self.bus, subjects.reply(request), envelope.timeline), owner=True)
        try:
            await self._queue(envelope, answer)
        except BaseException:
            await answer.close()
            raise
        self.registry.add(record)
        answer.watch_deadline()
        return answer

    async def resume(self, principal: Principal, request: str, start: int) -> Answer:
        """An answer of a request that is known here or in the log, from token index start; HeadraceError not_found."""
        if self.draining:
            raise HeadraceError("shutting_down", "the gateway stops; ask another one")
        try:
            record = await locate(self.bus, self.registry, principal, request)
            timeline = record.timeline if record.timeline.start_us else Timeline(self.bus.clock.now_us())
            answer = self._answer(
                record, Follow(self.bus, subjects.reply(request), timeline, start, log_first=True), owner=False
            )
            try:
                await answer.open()
            except BaseException:
                await answer.close()
                raise
        except BusUnavailable as error:
            raise no_broker(error) from error
        answer.watch_deadline()
        return answer

    async def cancel(self, record: Record) -> None:
        """Stops a request everywhere, and ends every stream of it here at once; HeadraceError without a broker."""
        record.cancelled = True
        for reader in list(record.readers):
            reader.end(HeadraceError("cancelled", "the request was cancelled"))
        try:
            await self.bus.mark_cancelled(record.request)
        except BusUnavailable as error:
            raise no_broker(error) from error

    def _refuse_if_full(self) -> None:
        if self.draining:
            raise HeadraceError("shutting_down", "the gateway stops; ask another one")
        if len(self._answers) >= self.settings.requests_max:
            raise HeadraceError("overloaded", f"{self.settings.requests_max} requests are in flight, and no more fit")
        if not self.bus.connected:
            raise HeadraceError("stage_unavailable", "the message broker does not answer")

    async def _queue(self, envelope: Envelope, answer: Answer) -> None:
        timeline = envelope.timeline.mark("gateway.accept", self.bus.clock.now_us())
        envelope = envelope.model_copy(update={"timeline": timeline})
        try:
            data = envelope.encode()
        except CodecError as error:
            raise HeadraceError("payload_too_large", f"the request is too large for the broker: {error}") from error
        subject, message_id = envelope.next_subject, f"{envelope.request}:{envelope.slip[0]}:0"
        try:
            await answer.open()
            await self.bus.publish_confirmed(subject, data, message_id)
        except BusUnavailable as error:
            self._spawn(tell_cancelled(self.bus, envelope.request))  # it may be queued all the same
            raise no_broker(error) from error
        except BusRefused as error:
            raise HeadraceError("overloaded", "the work queue takes no more") from error

    def _answer(self, record: Record, follow: Follow, owner: bool) -> Answer:
        answer = Answer(record, follow, self.bus, self.metrics, self._spawn, self._closed, owner)
        self._answers.add(answer)
        self._idle.clear()
        return answer

    def _closed(self, answer: Answer) -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._idle.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def no_broker(error: BusUnavailable) -> HeadraceError:
    """What a client sees of a broker that is away."""
    return HeadraceError("stage_unavailable", f"the message broker does not answer: {error}")
