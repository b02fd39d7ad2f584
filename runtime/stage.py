"""The loop that every worker runs: take work under a lease, keep the lease, settle it, whatever happens.

It knows nothing of what a stage does: a handler gets a Work and returns when its results are published and confirmed. It asks
the broker only for what the stage has room for, so the backlog stays with the broker and movable.

Drain, in order: stop taking; keep the leases; wait until the held work is done or the drain time is over; hand back the rest.
"""

import asyncio
import os
import secrets
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from runtime import delivery as deliveries
from runtime.bus import Bus, BusError, Delivery, Message, Puller
from runtime.clock import Clock
from runtime.delivery import Acknowledge, Answer, Broken, Bury, Done, GiveBack, HandedBack, Lost
from runtime.following import emitted_before
from runtime.presence import Beacon
from runtime.publishing import Publisher
from runtime.settings import Settings
from schemas import events, limits, subjects
from schemas.codec import CodecError
from schemas.dead_letter import DeadLetter
from schemas.envelope import Envelope
from schemas.errors import HeadraceError
from schemas.events import Usage
from schemas.presence import Presence
from schemas.subjects import Stage

log = structlog.get_logger()


@dataclass(slots=True)
class Work:
    """One request in this stage's hands. epoch is the attempt; the handler keeps index and usage true for a failure's sake."""

    envelope: Envelope
    epoch: int
    index: int = 0
    usage: Usage | None = None

    @property
    def request(self) -> str:
        """The request's id."""
        return self.envelope.request


Handler = Callable[[Work], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Lane:
    """One durable consumer to take from; room tells how many more items it may hold at this moment."""

    subject: str
    consumer: str
    room: Callable[[], int]


@dataclass(slots=True)
class _Held:
    delivery: Delivery
    work: Work
    task: asyncio.Task[None] | None = None
    working: bool = False  # the handler has it: only then may the task be cancelled
    ending: HeadraceError | None = None  # why the loop itself ends the work
    lost: bool = False  # the lease ran out: whatever becomes of the work is not ours to say

    def end(self, error: HeadraceError) -> None:
        """Ends the work with this error; before the handler has it, the error waits there."""
        if self.ending is None:
            self.ending = error
            self.take_away()

    def lose(self) -> None:
        """The lease ran out."""
        self.lost = True
        self.take_away()

    def take_away(self) -> None:
        """Stops the handler, if it has the work."""
        if self.working and self.task is not None:
            self.task.cancel()


class StageLoop:
    """Runs one stage of one process.

    ends_on gives the subject that the stage publishes on, also its terminal event when the work fails: hr.reply, or hr.raw
    where a guard listens. healthy says whether the worker gets anywhere at all: one that does not takes nothing and lets its
    leases run out, so that its work moves.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        stage: Stage,
        lanes: Callable[["StageLoop"], list[Lane]],
        handler: Handler,
        ends_on: Callable[[Envelope], str] = lambda envelope: subjects.reply(envelope.request),
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._stage = stage
        self._lanes = lanes(self)
        self._handler = handler
        self._ends_on = ends_on
        self._healthy = healthy
        self._held: dict[int, _Held] = {}  # by sequence in the work stream
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def held(self) -> int:
        """Requests in this stage's hands."""
        return len(self._held)

    def room_changed(self) -> None:
        """Tells the loop that a lane may take more."""
        self._room.set()

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Works until stop is set, then drains within drain_s."""
        listening = await self._bus.subscribe(subjects.CANCEL_ALL, self._on_cancel)
        pullers = [
            (lane, await self._bus.pull(lane.subject, lane.consumer, self._on_delivery, self._room.set)) for lane in self._lanes
        ]
        beating = asyncio.create_task(self._beat(), name=f"{self._stage}-beat")
        forget = self._bus.on_reconnect(self._look_for_marks)
        try:
            await self._take(pullers, stop)
            await self._drain([puller for _, puller in pullers], drain_s)
        finally:
            beating.cancel()
            forget()
            await listening.unsubscribe()

    async def _take(self, pullers: list[tuple[Lane, Puller]], stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                self._room.clear()
                if self._healthy():
                    for lane, puller in pullers:
                        await puller.ask(lane.room() - puller.outstanding)
                waiting = asyncio.create_task(self._room.wait())
                await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        finally:
            stopping.cancel()

    async def _drain(self, pullers: list[Puller], drain_s: float) -> None:
        self._draining = True
        for puller in pullers:
            await puller.close()
        log.info("drain", stage=self._stage, held=self.held, seconds=drain_s)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=drain_s)
        for held in list(self._held.values()):
            held.take_away()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limits.ACK_WAIT_S)
        await self._bus.flush()

    async def _beat(self) -> None:
        """Renews the leases. One that could not be renewed for the ack wait is lost: the broker gives the work to another.

        That is so after the process was stopped, after the broker was away, and while the worker is not healthy.
        """
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.sleep(limits.BEAT_S)
            if loop.time() - renewed > limits.ACK_WAIT_S and self._held:
                log.warning("leases_lost", stage=self._stage, held=self.held)
                for held in list(self._held.values()):
                    held.lose()
            if self._bus.connected and self._healthy():
                for held in list(self._held.values()):
                    await held.delivery.beat()
                renewed = loop.time()
                self._room.set()  # whoever was not healthy may take work again

    async def _on_cancel(self, message: Message) -> None:
        only = message.data.decode(errors="replace")  # a cancel may be meant for one stage alone
        if only and only != self._stage:
            return
        request = subjects.last_token(message.subject)
        for held in self._held.values():
            if held.work.request == request:
                held.end(HeadraceError("cancelled", "the request was cancelled"))

    async def _look_for_marks(self) -> None:
        """After a reconnect: a cancel may have been told while nobody could hear it, but it has left its mark."""
        for held in list(self._held.values()):
            try:
                if await self._bus.is_cancelled(held.work.request):
                    held.end(HeadraceError("cancelled", "the request was cancelled"))
            except BusError as error:
                log.debug("marks_unread", stage=self._stage, error=str(error))  # the next reconnect looks again
                return

    async def _on_delivery(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._process(delivery), name=f"{self._stage}-{delivery.sequence}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _process(self, delivery: Delivery) -> None:
        """One delivery from arrival to settlement."""
        received_us = self._clock.now_us()
        try:
            envelope = Envelope.decode(delivery.data)
        except CodecError as error:
            log.error("undecodable", stage=self._stage, error=str(error))
            await self._bury(delivery, str(error))
            await delivery.ack()
            return
        timeline = envelope.timeline.mark(f"{self._stage}.queue", received_us)
        work = Work(envelope.model_copy(update={"timeline": timeline}), delivery.attempt)
        previous = self._held.get(delivery.sequence)
        if previous is not None and previous.task is not None:  # our lease ran out, and the item came back to us
            previous.lose()
            await asyncio.wait({previous.task})
        held = _Held(delivery, work, asyncio.current_task())
        self._held[delivery.sequence] = held
        try:
            await self._work_and_settle(held, received_us)
        finally:
            del self._held[delivery.sequence]
            self._room.set()

    async def _work_and_settle(self, held: _Held, received_us: int) -> None:
        envelope = held.work.envelope
        try:
            cancelled = await self._bus.is_cancelled(envelope.request)
            fruitless = await self._fruitless(held)
            actions = deliveries.arrive(fruitless, cancelled, received_us >= envelope.deadline_us)
            if not actions:
                outcome = await self._attempt(held)
                actions = deliveries.settle(outcome, await self._failures(held, outcome))
            await self._carry_out(held, actions)
        except BusError as error:
            # Nothing is settled: the lease runs out and the item comes again, here or elsewhere.
            log.warning("unsettled", stage=self._stage, request=envelope.request, error=str(error))

    async def _fruitless(self, held: _Held) -> int:
        """Deliveries before this one since the last that brought the request forward, as log and note tell.

        They are asked only when it matters.
        """
        before = held.delivery.attempt - 1
        if before < limits.DELIVERIES_MAX:
            return before
        subject = self._ends_on(held.work.envelope)
        logged = emitted_before(await self._bus.read_log(subject)).epoch
        noted = await self._bus.kv_get(subjects.PROGRESS_BUCKET, subjects.progress(subject))
        return before - max(logged, int(noted.data) if noted is not None else 0)

    async def _failures(self, held: _Held, outcome: deliveries.Outcome) -> int:
        """Failures of this work that were told, this one with them; the count is noted on file."""
        if not (isinstance(outcome, Broken) and outcome.error.meaning.whose == "fault"):
            return 0
        key = subjects.failures(self._stage, held.work.request)
        noted = await self._bus.kv_get(subjects.PROGRESS_BUCKET, key) if held.delivery.attempt > 1 else None
        failures = 1 if noted is None else int(noted.data) + 1
        await self._bus.kv_note(subjects.PROGRESS_BUCKET, key, str(failures).encode())
        return failures

    async def _attempt(self, held: _Held) -> deliveries.Outcome:
        work = held.work
        remaining_s = (work.envelope.deadline_us - self._clock.now_us()) / 1e6
        timer = asyncio.get_running_loop().call_later(
            max(0.0, remaining_s), held.end, HeadraceError("deadline_exceeded", "the deadline passed")
        )
        try:
            held.working = True
            if held.lost:
                return Lost()
            if held.ending is not None:  # cancelled while we looked for its mark
                return Broken(held.ending)
            await self._handler(work)
            return Done()
        except HeadraceError as error:
            return Broken(error)
        except BusError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()
            if held.lost:
                return Lost()
            return Broken(held.ending) if held.ending else HandedBack()
        except Exception as error:
            log.error("handler", stage=self._stage, request=work.request, error=traceback.format_exc())
            return Broken(HeadraceError("internal", f"the {self._stage} stage failed: {type(error).__name__}"))
        finally:
            held.working = False
            timer.cancel()

    async def _carry_out(self, held: _Held, actions: tuple[deliveries.Action, ...]) -> None:
        for action in actions:
            match action:
                case Answer(error):
                    await self._answer(held.work, error)
                case Bury(cause):
                    await self._bury(held.delivery, cause)
                case Acknowledge():
                    await held.delivery.ack()
                case GiveBack(delay_s):
                    log.info("given_back", stage=self._stage, request=held.work.request, delay_s=delay_s)
                    await held.delivery.nak(delay_s)

    async def _answer(self, work: Work, error: HeadraceError) -> None:
        """Ends the request with this error, after what was said; one that has ended (an acknowledgement was lost) stays so."""
        subject = self._ends_on(work.envelope)
        before = emitted_before(await self._bus.read_log(subject))
        if before.ended:
            return
        work.epoch, work.index = max(work.epoch, before.epoch), len(before.ids)
        timeline = work.envelope.timeline.mark(f"{self._stage}.work", self._clock.now_us())
        event = events.Failed(
            work.epoch, work.index, error.code, error.message, timeline, error.param, work.usage, work.envelope.verdicts
        )
        publisher = Publisher(self._bus, subject, work.epoch, before.said)
        publisher.close()
        await publisher.end(event)
        log.info("failed", stage=self._stage, request=work.request, code=error.code, epoch=work.epoch)

    async def _bury(self, delivery: Delivery, cause: str) -> None:
        letter = DeadLetter(self._stage, cause, delivery.attempt, delivery.data).encode()
        message_id = f"dead:{self._stage}:{delivery.sequence}"
        await self._bus.publish_confirmed(subjects.dead(self._stage), letter, message_id)
        log.error("dead_letter", stage=self._stage, cause=cause)


def simple_lane(stage: Stage, loop: StageLoop, slots: int) -> Lane:
    """The one lane of a stage that is not divided by model or class."""
    return Lane(subjects.work(stage), subjects.work_consumer(stage), lambda: slots - loop.held)


async def serve_stage(stage: Stage, loop: StageLoop, settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Runs a stage that is ready as soon as it takes work, with its beacon, until it is drained."""
    worker = worker_name()

    def snapshot() -> Presence:
        stopping = stop.is_set()
        return Presence(
            stage=stage,
            worker=worker,
            ready=not stopping,
            reason="stopping" if stopping else "",
            slots=settings.worker_slots,
            running=loop.held,
        )

    beacon = Beacon(bus, snapshot)
    await beacon.start()
    await loop.run(stop, settings.drain_s)
    await beacon.stop()


def worker_name() -> str:
    """A name for this process that no other has."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"
