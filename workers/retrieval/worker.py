"""The retrieval stage: finds passages for a request's question and writes them into its prompt."""

import asyncio

import structlog

from runtime.bus import Bus
from runtime.clock import Clock
from runtime.model_files import default_embedder
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from runtime.stage import StageLoop, Work, serve_stage, simple_lane
from workers.retrieval.embedder import Embedder
from workers.retrieval.prompt import query, with_passages
from workers.retrieval.search import Searcher
from workers.retrieval.store_lancedb import LanceStore

log = structlog.get_logger()


class RetrievalStage:
    """Search and prompt building run on threads: both compute."""

    def __init__(self, bus: Bus, clock: Clock, searcher: Searcher) -> None:
        self._bus = bus
        self._clock = clock
        self._searcher = searcher

    async def handle(self, work: Work) -> None:
        """Publishes the request, passages written in, to its next stage."""
        envelope = work.envelope
        assert envelope.retrieval is not None, "retrieval is on the slip, but not asked for"
        question = query(envelope.input)
        passages = await asyncio.to_thread(self._searcher.search, envelope.tenant, envelope.retrieval, question)
        onward = envelope.passed(
            "retrieval",
            input=with_passages(envelope.input, passages),
            passages=passages,
            timeline=envelope.timeline.mark("retrieval.search", self._clock.now_us()),
        )
        await self._bus.publish_confirmed(onward.next_subject, onward.encode(), f"{work.request}:{onward.slip[0]}")


def load(settings: Settings) -> Searcher:
    """Loads the embedder and opens the store."""
    embedder = Embedder(default_embedder(), threads=settings.threads)
    return Searcher(LanceStore(settings.home / "passages"), embedder)


async def serve(settings: Settings, bus: NatsBus, stop: asyncio.Event) -> None:
    """Runs a retrieval worker until stop is set, then drains it."""
    searcher = await asyncio.to_thread(load, settings)
    stage = RetrievalStage(bus, bus.clock, searcher)
    slots = 8  # searches compute; more at once would only share the cores
    loop = StageLoop(
        bus,
        bus.clock,
        "retrieval",
        lambda loop: [simple_lane("retrieval", loop, slots)],
        stage.handle,
        ends_on=lambda envelope: envelope.events_subject,
    )
    await serve_stage("retrieval", loop, settings, bus, stop)
