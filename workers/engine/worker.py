"""The engine as a stage: takes generation work, publishes tokens as they come, and continues what another engine began.

On a second attempt the log of the first tells which tokens were already published; generation goes on from there, and because
noise is keyed by (seed, position) the rest is what it would have been.
"""

import asyncio
import dataclasses
import time

import structlog

from runtime.clock import Clock
from runtime.following import NOTHING_BEFORE, emitted_before
from runtime.nats_bus import NatsBus
from runtime.presence import Beacon
from runtime.publishing import Publisher
from runtime.settings import Settings
from runtime.stage import Lane, StageLoop, Work, worker_name
from schemas import limits, subjects
from schemas.envelope import ChatInput, Envelope, TextInput, TokensInput
from schemas.errors import HeadraceError
from schemas.events import Finished, Tokens, Usage
from schemas.presence import ModelCard, Presence
from schemas.subjects import Priority
from workers.engine.engine import Engine, GenerationRequest, Output
from workers.engine.runner import ModelRunner
from workers.engine.scheduler import Scheduler, SchedulerStatistics
from workers.engine.thread import EngineThread, Stream
from workers.engine.tokenizer import ModelTokenizer

log = structlog.get_logger()


class EngineWorker:
    """Turns envelopes into token events by way of one engine thread."""

    def __init__(self, bus: NatsBus, clock: Clock, tokenizer: ModelTokenizer, thread: EngineThread) -> None:
        self._bus = bus
        self._clock = clock
        self._tokenizer = tokenizer
        self._thread = thread

    async def handle(self, work: Work) -> None:
        """Generates one answer: Tokens events, then Finished, confirmed."""
        subject = work.envelope.events_subject
        before = NOTHING_BEFORE
        if work.epoch > 1:
            before = emitted_before(await self._bus.read_log(subject))
            if before.ended:
                return
            work.epoch = max(work.epoch, before.epoch + 1)
        emitted = tuple(token for token in before.ids if token is not None)
        assert len(emitted) == len(before.ids), "a rail changed tokens on the subject that the engine publishes to"
        prompt = await asyncio.to_thread(self._prompt, work.envelope)
        work.index = len(emitted)
        work.usage = Usage(len(prompt), len(emitted))
        publisher = Publisher(self._bus, subject, work.epoch, before.said)
        stream = self._thread.add(_generation(work.envelope, prompt, emitted))
        try:
            await self._forward(work, publisher, stream)
        finally:
            publisher.close()
            self._thread.drop(stream)

    async def _forward(self, work: Work, publisher: Publisher, stream: Stream) -> None:
        while True:
            output = await stream.get()
            if isinstance(output, HeadraceError):
                raise output
            if output.ids:
                await publisher.tokens(Tokens(work.epoch, output.index, output.ids, output.texts, output.logprobs))
                work.index = publisher.index
            if output.account is not None:
                work.usage = output.account.usage
            if output.failure is not None:
                raise output.failure
            if output.finish is not None:
                await self._finish(work, publisher, output)
                return

    async def _finish(self, work: Work, publisher: Publisher, output: Output) -> None:
        assert output.finish is not None
        assert output.account is not None
        envelope, account = work.envelope, output.account
        timeline = envelope.timeline
        for name, end_us in (("engine.wait", account.scheduled_us), ("engine.prefill", account.first_token_us)):
            if end_us is not None:
                timeline = timeline.mark(name, end_us)
        timeline = timeline.mark("engine.decode", self._clock.now_us())
        usage = output.finish.usage
        finished = Finished(work.epoch, work.index, output.finish.reason, usage, timeline, envelope.passages, envelope.verdicts)
        await publisher.end(finished)
        spans = {f"{name}_us": value for name, value in timeline.spans_us().items()}
        log.info(
            "finished",
            stage="engine",
            request=work.request,
            tenant=envelope.tenant,
            epoch=work.epoch,
            reason=output.finish.reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            preemptions=account.preemptions,
            tokens_recomputed=account.tokens_recomputed,
            **spans,
        )

    def _prompt(self, envelope: Envelope) -> list[int]:
        match envelope.input:
            case ChatInput(messages=messages):
                return self._tokenizer.encode_chat(messages, envelope.timeline.start_us)
            case TextInput(prompt=prompt):
                return self._tokenizer.encode_text(prompt)
            case TokensInput(ids=ids):
                return list(ids)


def _generation(envelope: Envelope, prompt: list[int], emitted: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(
        request=envelope.request,
        tenant=envelope.tenant,
        priority=envelope.priority,
        prompt_ids=tuple(prompt),
        sampling=envelope.sampling,
        deadline_us=envelope.deadline_us,
        emitted_ids=emitted,
        prompt_param="messages" if isinstance(envelope.input, ChatInput) else "prompt",
    )


def _gauges(statistics: SchedulerStatistics) -> dict[str, float]:
    """The scheduler's snapshot as numbers for the operator."""
    gauges: dict[str, float] = {f"waiting_{name}": count for name, count in statistics.waiting.items()}
    for field in dataclasses.fields(statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, int):
            gauges[field.name] = value
    return gauges


def load(settings: Settings, clock: Clock) -> tuple[Engine, ModelTokenizer, ModelCard]:
    """Loads the model and makes the engine; takes seconds, tells its progress."""
    from runtime.model_files import default_chat_model

    began = time.monotonic()
    path = settings.model_path or default_chat_model()
    block_tokens = 16
    runner = ModelRunner(
        path,
        precision=settings.precision,
        cache_blocks=settings.cache_tokens // block_tokens,
        block_tokens=block_tokens,
        threads=settings.threads,
        progress=lambda share, what: log.info("loading", percent=round(100 * share), what=what),
    )
    runner.warm_up()
    tokenizer = ModelTokenizer(runner.tokenizer_fields)
    context_tokens = min(runner.config.context_tokens, settings.cache_tokens)
    scheduler = Scheduler(
        blocks=settings.cache_tokens // block_tokens,
        block_tokens=block_tokens,
        budget_tokens=settings.step_tokens,
        slots=settings.slots,
        context_tokens=context_tokens,
        waiting_max=settings.slots + INTERACTIVE_EXTRA,
    )
    log.info("loaded", seconds=round(time.monotonic() - began, 1), model=settings.model, **runner.describe().numbers())
    longest = max(len(text) for text in tokenizer.token_bytes_table)
    card = ModelCard(
        id=settings.model, context_tokens=context_tokens, precision=runner.precision, token_bytes_max=max(1, longest)
    )
    return Engine(runner, tokenizer, scheduler, clock.now_us), tokenizer, card


async def serve(settings: Settings, bus: NatsBus, stop: asyncio.Event) -> None:
    """Runs an engine worker until stop is set, then drains it."""
    engine, tokenizer, card = await asyncio.to_thread(load, settings, bus.clock)
    thread = EngineThread(engine)
    thread.start()
    worker = EngineWorker(bus, bus.clock, tokenizer, thread)
    loop = StageLoop(
        bus,
        bus.clock,
        "engine",
        lambda loop: [_lane(loop, settings, priority) for priority in subjects.PRIORITIES],
        worker.handle,
        ends_on=lambda envelope: envelope.events_subject,
        healthy=lambda: not thread.frozen,
    )
    name = worker_name()

    def snapshot() -> Presence:
        return Presence(
            stage="engine",
            worker=name,
            ready=not stop.is_set() and not thread.frozen,
            reason="stopping" if stop.is_set() else "no step for too long" if thread.frozen else "",
            model=card,
            slots=settings.slots,
            running=loop.held,
            gauges=_gauges(thread.statistics),
        )

    beacon = Beacon(bus, snapshot)
    await beacon.start()
    await loop.run(stop, settings.drain_s)
    await beacon.stop()
    await thread.stop()


def _lane(loop: StageLoop, settings: Settings, priority: Priority) -> Lane:
    """An interactive request may come when every slot is taken (it preempts); the others wait in the broker."""

    def room() -> int:
        if priority == "interactive":
            return settings.slots + INTERACTIVE_EXTRA - loop.held
        return settings.slots - loop.held

    return Lane(
        subjects.work("engine", settings.model, priority),
        subjects.work_consumer("engine", settings.model, priority),
        room,
    )


INTERACTIVE_EXTRA = 8  # interactive requests that an engine takes beyond its slots, to preempt lower-class work
assert limits.ACK_PENDING_MAX > 1024 + INTERACTIVE_EXTRA
