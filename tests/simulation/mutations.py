"""Planted bugs: what the simulation must find. Each one replaces a part of the pipeline by a version that is wrong in one
way."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime import delivery as deliveries
from runtime import stage
from runtime.bus import Message
from runtime.following import NOTHING_BEFORE
from runtime.memory_bus import MemoryBus
from runtime.sequencer import Action, Deliver, Sequencer
from runtime.stage import StageLoop, Work
from schemas import subjects
from schemas.errors import HeadraceError
from schemas.events import Event, Tokens
from workers.guardrail.worker import RailsStage

Plant = Callable[[pytest.MonkeyPatch], None]

MUTATIONS: dict[str, Plant] = {}


def planted(plant: Plant) -> Plant:
    """Adds one to the table."""
    MUTATIONS[plant.__name__] = plant
    return plant


@planted
def acknowledge_before_publish(patch: pytest.MonkeyPatch) -> None:
    """Work is acknowledged when it comes, not when it is done."""
    attempt = StageLoop._attempt

    async def hasty(self: StageLoop, held: Any) -> Any:
        await held.delivery.ack()
        return await attempt(self, held)

    patch.setattr(StageLoop, "_attempt", hasty)


@planted
def no_fencing(patch: pytest.MonkeyPatch) -> None:
    """Events of an older attempt are taken like any other."""

    def take(self: Sequencer, event: Event) -> list[Action]:
        return [] if self.ended else self._consider(event)

    patch.setattr(Sequencer, "take", take)
    patch.setattr(Sequencer, "take_log", take)


@planted
def no_deduplication_of_work(patch: pytest.MonkeyPatch) -> None:
    """A message id that is new with every attempt."""

    async def handle(self: RailsStage, work: Work) -> None:
        onward = work.envelope.passed("rails")
        if onward.rails.guards_output:
            await self._bus.publish_confirmed(subjects.work("guard"), onward.encode(), f"{work.request}:guard:{work.epoch}")
        await self._bus.publish_confirmed(onward.next_subject, onward.encode(), f"{work.request}:engine:{work.epoch}")

    patch.setattr(RailsStage, "handle", handle)


@planted
def no_deduplication_of_tokens(patch: pytest.MonkeyPatch) -> None:
    """What comes again is delivered again."""
    consider = Sequencer._consider_tokens

    def repeat(self: Sequencer, event: Tokens) -> list[Action]:
        return [Deliver(event)] if event.texts and event.end <= self.index else consider(self, event)

    patch.setattr(Sequencer, "_consider_tokens", repeat)


@planted
def cancel_by_the_wrong_id(patch: pytest.MonkeyPatch) -> None:
    """A cancel ends whatever this stage holds first."""

    async def on_cancel(self: StageLoop, message: Message) -> None:
        for held in list(self._held.values())[:1]:
            held.end(HeadraceError("cancelled", "the request was cancelled"))

    patch.setattr(StageLoop, "_on_cancel", on_cancel)


@planted
def deadlines_are_not_watched(patch: pytest.MonkeyPatch) -> None:
    """Expired work is worked on."""
    arrive = deliveries.arrive
    patch.setattr(deliveries, "arrive", lambda fruitless, cancelled, expired: arrive(fruitless, cancelled, False))

    async def attempt(self: StageLoop, held: Any) -> Any:
        held.working = True
        try:
            await self._handler(held.work)
            return deliveries.Done()
        except HeadraceError as error:
            return deliveries.Broken(error)

    patch.setattr(StageLoop, "_attempt", attempt)


@planted
def poison_is_not_buried(patch: pytest.MonkeyPatch) -> None:
    """The last failure is answered and acknowledged, without a dead letter."""

    async def bury(self: StageLoop, delivery: Any, cause: str) -> None:
        pass

    patch.setattr(StageLoop, "_bury", bury)


@planted
def a_drain_drops_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    """Work that a drain could not finish is acknowledged."""
    settle = deliveries.settle

    def drop(outcome: deliveries.Outcome, attempt: int) -> tuple[deliveries.Action, ...]:
        return settle(deliveries.Done() if isinstance(outcome, deliveries.HandedBack) else outcome, attempt)

    patch.setattr(deliveries, "settle", drop)


@planted
def the_end_is_published_once_and_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    """Whether the broker has the result is not asked."""
    confirmed = MemoryBus.publish_confirmed

    async def publish(self: MemoryBus, subject: str, data: bytes, message_id: str) -> None:
        if subject.startswith("hr.work."):
            await confirmed(self, subject, data, message_id)
        else:
            self.send("confirm", subject, lambda: self.broker.store(subject, data, message_id, self.name))

    patch.setattr(MemoryBus, "publish_confirmed", publish)


@planted
def an_ended_request_is_ended_again(patch: pytest.MonkeyPatch) -> None:
    """A redelivery after the end (its acknowledgement was lost) is answered without a look at the log."""
    patch.setattr(stage, "emitted_before", lambda log: NOTHING_BEFORE)


@planted
def a_fenced_end_counts_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A stale holder's finished answer is ignored, although it acknowledged the work with it."""
    patch.setattr(Sequencer, "take_file", Sequencer.take_log)


@planted
def holes_are_not_filled(patch: pytest.MonkeyPatch) -> None:
    """What the live subject lost is skipped."""

    def consider(self: Sequencer, event: Tokens) -> list[Action]:
        if event.end <= self.index:
            return []
        self.index = max(self.index, event.index)
        return [Deliver(event.since(self.index))]

    patch.setattr(Sequencer, "_consider_tokens", consider)
