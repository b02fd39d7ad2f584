"""The door: what is taken in, and in which order. Record whose it is, listen, then publish: no event can be missed, and
no work is anonymous.

    stopped                     shutting_down        a stage without a worker    stage_unavailable
    requests_max in flight      overloaded           a model nobody has          model_not_found
    over the broker's limit     payload_too_large    no broker                   stage_unavailable

To drain: wait until no stream runs and nobody has come for a moment, refuse new requests, end what remains with shutting_down.

A client that leaves cancels its request (unless it was to be kept) once nobody else reads it at the gateway that took
it. Readers at other gateways come and go without that effect.
"""

import asyncio
import secrets
from dataclasses import dataclass, replace
from functools import cached_property

import structlog

from gateway.answer import Answer
from gateway.auth import Principal
from gateway.endings import Endings
from gateway.envelopes import Stamp, stamp
from gateway.fleet import Fleet
from gateway.idempotency import Claim, Claims, Held, conflict, fingerprint
from gateway.metrics import Metrics
from gateway.ownership import Kind, Ownership, write
from gateway.resume import Record, Registry, locate, patient_snapshot, refuse_unless_held
from gateway.retry_after import DrainRate, retry_after_s
from runtime.bus import Bus, BusRefused, BusUnavailable
from runtime.following import Follow
from runtime.settings import Settings
from schemas import subjects
from schemas.codec import CodecError
from schemas.envelope import Envelope
from schemas.errors import HeadraceError
from schemas.events import Terminal
from schemas.requests import ChatCompletionRequest, CompletionRequest

log = structlog.get_logger()

LINGER_S = 0.25  # of a gateway that stops, for those who are connected and have not asked yet
CLAIM_TRIES = 8  # of one call, while others take the same key from under it


@dataclass(frozen=True)
class Call:
    """One call for an answer. request is the id that it gets if it is the first with its key, or has none."""

    asked: ChatCompletionRequest | CompletionRequest
    kind: Kind
    principal: Principal
    request: str
    arrived_us: int
    key: str | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The digest of what is asked."""
        return fingerprint(self.kind, self.asked)


class Door:
    """One gateway's requests: those taken in, those followed, and those remembered."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self.settings = settings
        self.bus = bus
        self.fleet = Fleet(bus)
        self.metrics = Metrics(self.fleet)
        self.registry = Registry()
        self.draining = False
        self._stopped = False
        self._claims = Claims(bus)
        self._endings = Endings(bus)
        self._rate = DrainRate()
        self._answers: set[Answer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._left_at = 0.0  # the loop's time at which the last answer was closed
        self._opened = False

    async def open(self) -> None:
        """Starts listening to the workers; idempotent."""
        if not self._opened:
            self._opened = True
            await self.fleet.open()

    async def drain(self, seconds: float) -> None:
        """Waits for the running requests, then refuses new ones and ends the rest with shutting_down.

        Who is connected may be about to ask, so whoever comes meanwhile is served.
        """
        self.draining = True
        log.info("drain", held=len(self._answers), seconds=seconds)
        quiet = await self._quiet_within(seconds)
        self._stopped = True
        if not quiet:
            for answer in list(self._answers):
                answer.end(HeadraceError("shutting_down", "the gateway stops; resume at another one"))
            await self._idle_within(2.0)
        await self._endings.finish(2.0)

    async def _quiet_within(self, seconds: float) -> bool:
        """Whether for LINGER_S no request was here, before the seconds were over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while await self._idle_within(began + seconds - loop.time()):
            lingers = max(began, self._left_at) + LINGER_S - loop.time()
            if lingers <= 0:
                return True
            await asyncio.sleep(lingers)
        return False

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def admit(self, call: Call) -> Answer:
        """Queues the request and returns its answer, listening; HeadraceError when it is not taken.

        With a key that stands for a request already, the answer is that request's, from its beginning.
        """
        self._refuse_if_full()
        try:
            if call.key is None:
                return await self._begin(call, self._envelope(call))
            return await self._begin_or_attach(call, call.key)
        except BusUnavailable as error:
            raise no_broker(error) from error
        except BusRefused as error:
            raise HeadraceError("overloaded", "the broker takes no more work") from error

    async def resume(self, principal: Principal, request: str, start: int, body: str | None = None) -> Answer:
        """An answer of a request that any gateway took, from token index start.

        body is the fingerprint that the request must have, if it must. HeadraceError: not_found, idempotency_conflict,
        replay_expired, or invalid_value for a start that never will be there.
        """
        self._refuse_if_full()
        try:
            record = await locate(self.bus, self.registry, principal, request)
            if body is not None and body != record.ownership.fingerprint:
                raise HeadraceError("idempotency_conflict", f"request {request} was made with another body")
            seen = await patient_snapshot(self.bus, request, start)
            refuse_unless_held(record, seen, start, self.bus.clock.now_us())
            answer = self._answer(record, start, log_first=True)
            try:
                await answer.open()
            except BaseException:
                await answer.close()
                raise
        except BusUnavailable as error:
            raise no_broker(error) from error
        answer.watch_deadline()
        return answer

    async def cancel(self, record: Record) -> "asyncio.Task[Terminal | None]":
        """Stops a request everywhere; the task gives its end. HeadraceError without a broker."""
        try:
            return await self._endings.cancel(record)
        except BusUnavailable as error:
            raise no_broker(error) from error

    def retry_after_s(self, code: str) -> int:
        """Seconds after which a refused call may be worth another try."""
        return retry_after_s(code, self._rate.per_second(asyncio.get_running_loop().time()), self.fleet.waiting())

    def client_left(self, answer: Answer) -> None:
        """The last reader here of a request that was taken here decides what becomes of it."""
        record = answer.record
        if not record.taken_here or record.read_by_others(answer):
            return
        if record.ownership.on_disconnect == "cancel":
            self._endings.abandon(record)
        else:
            self._endings.watch(record)

    def deadline_passed(self, answer: Answer) -> None:
        """Nobody has ended the request in time: it is done here."""
        self._endings.expire(answer.record)

    def closed(self, answer: Answer) -> None:
        """One stream less."""
        self._left_at = asyncio.get_running_loop().time()
        if answer.ended:
            self._rate.note(self._left_at)
        self._answers.discard(answer)
        if not self._answers:
            self._idle.set()

    def refuse_without_broker(self) -> None:
        """HeadraceError stage_unavailable at once, where asking would only take longer."""
        if not self.bus.connected:
            raise HeadraceError("stage_unavailable", "the message broker does not answer")

    def _refuse_if_full(self) -> None:
        if self._stopped:
            raise HeadraceError("shutting_down", "the gateway stops; ask another one")
        if len(self._answers) >= self.settings.requests_max:
            raise HeadraceError("overloaded", f"{self.settings.requests_max} requests are in flight, and no more fit")
        self.refuse_without_broker()

    def _envelope(self, call: Call, first: Claim | None = None) -> Envelope:
        """The envelope of the call: of its own, or of the first call with the same key and body."""
        of = first or Claim(call.request, call.fingerprint, call.arrived_us, 0, secrets.randbelow(2**63))
        envelope = stamp(call.asked, Stamp(of.request, call.principal.tenant, of.arrived_us, of.seed), self.settings)
        self.fleet.check(envelope)
        return envelope

    async def _begin_or_attach(self, call: Call, key: str) -> Answer:
        for _ in range(CLAIM_TRIES):
            held = await self._claims.find(call.principal.tenant, key)
            answer = await (self._claim(call, key, None) if held is None else self._join(call, key, held))
            if answer is not None:
                return answer
        raise HeadraceError("overloaded", f"many calls with the Idempotency-Key {key!r} at once")

    async def _join(self, call: Call, key: str, held: Held) -> Answer | None:
        """The answer of the request that the key stands for; None when the key was taken meanwhile."""
        if held.claim.fingerprint != call.fingerprint:
            raise conflict(key, held.claim, call.fingerprint)
        fate = await self._claims.fate(held.claim, self.bus.clock.now_us())
        if fate == "begin_anew":
            return await self._claim(call, key, held)
        if fate == "queue_again" and self.registry.get(held.claim.request) is None:
            return await self._begin(call, self._envelope(call, held.claim), key)
        return await self.resume(call.principal, held.claim.request, 0)

    async def _claim(self, call: Call, key: str, over: Held | None) -> Answer | None:
        """The answer of a new request for this key; None when the key was taken meanwhile."""
        envelope = self._envelope(call, replace(over.claim, request=call.request, arrived_us=call.arrived_us) if over else None)
        self._encoded(envelope)  # what cannot be queued claims nothing
        if not await self._claims.take(call.principal.tenant, key, _claim(call, envelope), over):
            return None
        return await self._begin(call, envelope, key)

    async def _begin(self, call: Call, envelope: Envelope, key: str | None = None) -> Answer:
        """Queues the work."""
        record = Record(_ownership(call, envelope), taken_here=True)
        answer = self._answer(record, 0, log_first=envelope.request != call.request)
        self.registry.add(record)
        try:
            await self._queue(envelope, answer, keyed=key is not None)
        except BaseException:
            self._untaken(record)
            await answer.close()
            raise
        if key is not None:
            self._endings.spawn(self._claims.queued(call.principal.tenant, key, _claim(call, envelope)))
        answer.watch_deadline()
        return answer

    async def _queue(self, envelope: Envelope, answer: Answer, keyed: bool) -> None:
        data = self._encoded(envelope)
        subject, message_id = envelope.next_subject, f"{envelope.request}:{envelope.slip[0]}:0"
        await answer.open()
        first = await write(self.bus, answer.record.ownership)
        answer.record.taken_here = first or not keyed  # of two gateways that queue the same work, one has taken it
        try:
            await self.bus.publish_confirmed(subject, data, message_id)
        except BusUnavailable:
            # It may be queued all the same. A retry with the key will find it; without a key, nobody will.
            if not keyed:
                self._endings.untake(envelope.request)
            raise

    def _encoded(self, envelope: Envelope) -> bytes:
        timeline = envelope.timeline.mark("gateway.accept", self.bus.clock.now_us())
        try:
            return envelope.model_copy(update={"timeline": timeline}).encode()
        except CodecError as error:
            raise HeadraceError("payload_too_large", f"the request is too large for the broker: {error}") from error

    def _untaken(self, record: Record) -> None:
        """Who attached meanwhile is told, too."""
        self.registry.remove(record)
        for reader in list(record.readers):
            reader.end(HeadraceError("stage_unavailable", "the request could not be queued"))

    def _answer(self, record: Record, start: int, log_first: bool) -> Answer:
        follow = Follow(self.bus, subjects.reply(record.request), record.timeline, start, log_first)
        answer = Answer(record, follow, self.bus.clock, self.metrics, self)
        self._answers.add(answer)
        self._idle.clear()
        return answer


def _claim(call: Call, envelope: Envelope) -> Claim:
    began_us = envelope.timeline.start_us
    return Claim(envelope.request, call.fingerprint, began_us, envelope.deadline_us, envelope.sampling.seed)


def _ownership(call: Call, envelope: Envelope) -> Ownership:
    extras = call.asked.headrace
    return Ownership(
        request=envelope.request,
        tenant=envelope.tenant,
        model=envelope.model,
        kind=call.kind,
        created_us=envelope.timeline.start_us,
        deadline_us=envelope.deadline_us,
        fingerprint=call.fingerprint,
        on_disconnect=extras.on_disconnect,
        timings=extras.timings,
    )


def no_broker(error: BusUnavailable) -> HeadraceError:
    """What a client sees of a broker that is away."""
    return HeadraceError("stage_unavailable", f"the message broker does not answer: {error}")
