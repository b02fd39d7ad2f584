"""An engine without a model: takes real work from the real broker, under its rules, and answers what the test tells
it to.

It is honest: it publishes the terminal event confirmed before it acknowledges, keeps index and epoch true, marks the
timeline, and stops when a request is cancelled: with its last word, which has the usage so far.
"""

import asyncio
from collections.abc import Awaitable, Callable

from runtime.bus import Delivery, Message, Puller
from runtime.nats_bus import NatsBus
from runtime.publishing import Publisher
from schemas import events, subjects
from schemas.envelope import Envelope
from schemas.events import Failed, Finished, Tokens, Usage, Verdict
from schemas.presence import ModelCard, Presence
from schemas.subjects import PRIORITIES, Stage

MODEL = "test-model"


class Job:
    """One request in the fake engine's hands."""

    def __init__(self, bus: NatsBus, envelope: Envelope, epoch: int) -> None:
        self.bus = bus
        self.envelope = envelope
        self.epoch = epoch
        self.index = 0
        self.ended = False
        self.timeline = envelope.timeline
        self.publisher = Publisher(bus, envelope.events_subject, epoch)
        self.mark("engine.queue")

    def mark(self, name: str) -> None:
        self.timeline = self.timeline.mark(name, self.bus.clock.now_us())

    async def say(self, *texts: str) -> None:
        """One token event."""
        event = Tokens(self.epoch, self.index, tuple(range(len(texts))), texts)
        await self.publisher.tokens(event)
        self.index = event.end

    async def finish(self, reason: events.Reason = "stop", verdicts: tuple[Verdict, ...] = ()) -> None:
        self.mark("engine.decode")
        usage = Usage(7, self.index, 3)
        await self.publish(Finished(self.epoch, self.index, reason, usage, self.timeline, (), verdicts))

    async def fail(self, code: str, message: str = "it went wrong") -> None:
        self.mark("engine.decode")
        usage = Usage(7, self.index, 3)
        await self.publish(Failed(self.epoch, self.index, code, message, self.timeline, None, usage))

    async def publish(self, event: Finished | Failed) -> None:
        await self.publisher.end(event)
        self.publisher.close()
        self.ended = True


Behaviour = Callable[[Job], Awaitable[None]]


async def say_hello(job: Job) -> None:
    """Three tokens, and a fourth that brings no text."""
    for text in ("Hel", "lo", " wörld", ""):
        await job.say(text)
    await job.finish()


async def silent(job: Job) -> None:
    """Takes the work and says nothing."""
    await asyncio.Event().wait()


class FakeEngine:
    """Takes work of every class for one model. jobs, cancelled: what it saw."""

    def __init__(self, bus: NatsBus, behave: Behaviour = say_hello, model: str = MODEL) -> None:
        self.bus = bus
        self.behave = behave
        self.model = model
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.presence = Presence(
            stage="engine",
            worker="fake-1",
            ready=True,
            model=ModelCard(id=model, context_tokens=2048, precision="fp32"),
            slots=64,
            gauges={"waiting": 5, "kv_blocks_free": 100},
        )
        self.deaf = False  # hears cancels, and heeds none: as an engine that died
        self._told: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pullers: list[Puller] = []
        self._room = asyncio.Event()
        self._room.set()
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.subscribe(subjects.CANCEL_ALL, self._on_cancel)
        await self._pull()

        async def on_rollcall(_: Message) -> None:
            await self.tell()

        await self.bus.subscribe(subjects.ROLLCALL, on_rollcall)
        await self.bus.flush()  # from here on no roll call is missed
        await self.tell()

    async def _pull(self) -> None:
        for priority in PRIORITIES:
            subject = subjects.work("engine", self.model, priority)
            consumer = subjects.work_consumer("engine", self.model, priority)
            self._pullers.append(await self.bus.pull(subject, consumer, self._on_delivery, self._room.set))
        self._room.set()
        self._asking = asyncio.create_task(self._ask())

    async def tell(self) -> None:
        await tell(self.bus, self.presence)

    async def _ask(self) -> None:
        """Keeps 64 items asked for in every class; a pull that ran out is asked again."""
        while True:
            await self._room.wait()
            self._room.clear()
            for puller in self._pullers:
                await puller.ask(64 - puller.outstanding)

    async def rest(self) -> None:
        """Takes nothing more for now, though it says that it is there."""
        assert self._asking is not None
        self._asking.cancel()
        for puller in self._pullers:
            await puller.close()
        self._pullers.clear()

    async def work_again(self) -> None:
        """Takes work again."""
        await self._pull()

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _on_cancel(self, message: Message) -> None:
        request = subjects.last_token(message.subject)
        self.cancelled.append(request)
        if request in self._tasks and not self.deaf and request not in self._told:
            self._told.add(request)
            self._tasks[request].cancel()

    async def _on_delivery(self, delivery: Delivery) -> None:
        self._room.set()
        job = Job(self.bus, Envelope.decode(delivery.data), delivery.attempt)
        self.jobs.append(job)
        self._tasks[job.envelope.request] = asyncio.create_task(self._work(job, delivery))

    async def _work(self, job: Job, delivery: Delivery) -> None:
        try:
            if not self.deaf and await self.bus.is_cancelled(job.envelope.request):
                await job.fail("cancelled", "the request was cancelled")
            else:
                await self.behave(job)
        except asyncio.CancelledError:
            if job.envelope.request not in self._told:
                raise
            await job.fail("cancelled", "the request was cancelled")
        await delivery.ack()


async def tell(bus: NatsBus, presence: Presence) -> None:
    """Says once that a worker is there."""
    await bus.publish(subjects.alive(presence.stage, presence.worker), presence.encode())


def worker(stage: Stage) -> Presence:
    """A ready worker of a stage that is not the engine."""
    return Presence(stage=stage, worker=f"{stage}-1", ready=True)
