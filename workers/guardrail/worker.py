"""Two stages in one process: rails checks a request on its way in, guard holds its answer's stream until it is safe.

Guarding is a work item of its own, published before the request goes on, so that a guard listens before the first token. A
guard keeps nothing that it cannot rebuild: it reads hr.raw from the start, and what an earlier guard already released is on
hr.reply.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import structlog

from runtime.bus import Bus
from runtime.clock import Clock
from runtime.following import NOTHING_BEFORE, Follow, emitted_before
from runtime.nats_bus import NatsBus
from runtime.publishing import Publisher
from runtime.sequencer import Deliver, End
from runtime.settings import Settings
from runtime.stage import Lane, StageLoop, Work, serve_stage, simple_lane
from schemas import subjects
from schemas.errors import HeadraceError
from schemas.events import Finished, Terminal, Tokens, Usage
from schemas.subjects import Stage
from workers.guardrail import input_rails, output_rails
from workers.guardrail.output_rails import OutputRail

log = structlog.get_logger()

LAST_WORD_S = 2.0
PATIENCE_S = 60.0


class RailsStage:
    """Input rails: refuses, redacts or passes on; asks for a guard first when the answer needs one."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def handle(self, work: Work) -> None:
        """Publishes the guard's item, then the request to its next stage, each confirmed."""
        # On a thread: a prompt of megabytes costs seconds, and the leases of this process must be kept meanwhile.
        envelope = await asyncio.to_thread(input_rails.apply, work.envelope)
        timeline = envelope.timeline.mark("rails.check", self._clock.now_us())
        onward = envelope.passed("rails", timeline=timeline)
        data = onward.encode()
        if onward.rails.guards_output:
            await self._bus.publish_confirmed(subjects.work("guard"), data, f"{work.request}:guard")
        await self._bus.publish_confirmed(onward.next_subject, data, f"{work.request}:{onward.slip[0]}")


class GuardStage:
    """Output rails over one stream, from its first token to its terminal event."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def handle(self, work: Work) -> None:
        """Follows hr.raw, releases what is safe on hr.reply, and ends it exactly once."""
        before = NOTHING_BEFORE
        if work.epoch > 1:
            before = emitted_before(await self._bus.read_log(subjects.reply(work.request)))
            if before.ended:
                return
            work.epoch = max(work.epoch, before.epoch + 1)
        publisher = Publisher(self._bus, subjects.reply(work.request), work.epoch, before.said)
        follow = Follow(self._bus, subjects.raw(work.request), work.envelope.timeline, log_first=True)
        await follow.open()
        try:
            terminal = await self._guard(work, follow, publisher)
            await publisher.end(terminal)
        finally:
            publisher.close()
            await follow.close()
        if isinstance(terminal, Finished) and terminal.reason == "content_filter":
            await self._bus.mark_cancelled(work.request)

    async def _guard(self, work: Work, follow: Follow, publisher: Publisher) -> Terminal:
        """Publishes tokens as they become safe; the publisher leaves out those that an earlier attempt released."""
        rail = OutputRail(work.envelope.rails)
        stream = _events(follow)
        async for event in stream:
            safe = rail.feed(event) if isinstance(event, Tokens) else rail.close(event.epoch)
            for tokens in safe:
                await publisher.tokens(tokens)
                work.index = tokens.end
            if rail.blocked is not None:
                last = event if not isinstance(event, Tokens) else await self._stop_engine(work, stream)
                return self._blocked(work, rail, last)
            if not isinstance(event, Tokens):
                return self._ended(work, rail, event)
        raise AssertionError("a stream ends with a terminal event")

    async def _stop_engine(self, work: Work, stream: AsyncIterator[Tokens | Terminal]) -> Terminal | None:
        """Tells the engine to stop and waits a moment for its last word, which has the usage and the timings.

        The stream is the one that was read so far: its last word may have come with the token that was blocked.
        """
        await self._bus.publish(subjects.cancel(work.request), b"engine")
        try:
            async with asyncio.timeout(LAST_WORD_S):
                async for event in stream:
                    if not isinstance(event, Tokens):
                        return event
        except TimeoutError:
            log.warning("no_last_word", request=work.request)
        return None

    def _ended(self, work: Work, rail: OutputRail, terminal: Terminal) -> Terminal:
        timeline = terminal.timeline.mark("rails.output", self._clock.now_us())
        verdicts = work.envelope.verdicts + rail.verdicts
        ended = replace(terminal, epoch=work.epoch, index=work.index, timeline=timeline, verdicts=verdicts)
        if isinstance(ended, Finished):
            return replace(ended, passages=output_rails.clean_passages(work.envelope.rails, ended.passages))
        return ended

    def _blocked(self, work: Work, rail: OutputRail, last: Terminal | None) -> Finished:
        timeline = last.timeline if last else work.envelope.timeline
        usage = (last.usage if last else None) or Usage(0, work.index)
        return Finished(
            work.epoch,
            work.index,
            "content_filter",
            usage,
            timeline.mark("rails.output", self._clock.now_us()),
            output_rails.clean_passages(work.envelope.rails, work.envelope.passages),
            work.envelope.verdicts + rail.verdicts,
        )


async def _events(follow: Follow) -> AsyncIterator[Tokens | Terminal]:
    """Tokens in order, each once, then the terminal event."""
    while True:
        for action in await follow.next(PATIENCE_S):
            yield action.tokens if isinstance(action, Deliver) else _terminal(action)
            if not isinstance(action, Deliver):
                return


def _terminal(end: End) -> Terminal:
    """Follow types what it finds itself, so an end is always an event."""
    assert not isinstance(end.outcome, HeadraceError)
    return end.outcome


async def serve(settings: Settings, bus: NatsBus, stop: asyncio.Event) -> None:
    """Runs both stages until stop is set, then drains them: no new request first, streams in flight last."""
    rails, guard = RailsStage(bus, bus.clock), GuardStage(bus, bus.clock)
    loops: dict[Stage, StageLoop] = {
        "rails": StageLoop(bus, bus.clock, "rails", _lanes("rails", settings), rails.handle),
        "guard": StageLoop(bus, bus.clock, "guard", _lanes("guard", settings), guard.handle),
    }
    await asyncio.gather(*(serve_stage(stage, loop, settings, bus, stop) for stage, loop in loops.items()))


def _lanes(stage: Stage, settings: Settings) -> Callable[[StageLoop], list[Lane]]:
    return lambda loop: [simple_lane(stage, loop, settings.worker_slots)]
