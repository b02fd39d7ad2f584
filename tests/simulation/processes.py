"""The processes of the system, made of the real parts: only the torch engine and HTTP are left out."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway.admission import Call, Door
from gateway.answer import Answer, Piece
from gateway.auth import Principal
from runtime.memory_broker import MemoryBroker
from runtime.memory_bus import MemoryBus
from runtime.settings import Settings
from runtime.stage import Lane, StageLoop, simple_lane
from schemas import subjects
from schemas.errors import HeadraceError
from schemas.events import Tokens
from schemas.presence import ModelCard, Presence
from schemas.requests import CompletionRequest, GuardrailExtras, HeadraceExtras, RailExtras
from schemas.subjects import Stage
from tests.simulation.faults import FaultyNetwork
from tests.simulation.model import FakeThread, FakeTokenizer
from tests.simulation.plan import Ask, Kind
from tests.simulation.virtual_time import Process, VirtualTimeLoop
from workers.engine.worker import EngineWorker
from workers.guardrail.worker import GuardStage, RailsStage

MODEL = "hash"
SLOTS = 4
DRAIN_S = 1.0
PIPE_PIECES = 2
PRINCIPAL = Principal("default")
SETTINGS = Settings(home=Path("unused"), rails_output={}, model=MODEL)


class Gone(Exception):
    """The other end of the pipe is no more."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The request was taken in, or found; its answer follows."""

    request: str


Told = Taken | Piece | HeadraceError
Begin = Callable[[Door], Coroutine[Any, Any, Answer]]


class Pipe:
    """A client's connection to its gateway: what was written is read in order; a writer waits for a slow reader."""

    def __init__(self) -> None:
        self.left = asyncio.Event()  # the client closed it
        self._pieces: asyncio.Queue[Told | None] = asyncio.Queue(PIPE_PIECES)

    async def write(self, piece: Told) -> None:
        """Writes one piece, when there is room."""
        await self._pieces.put(piece)

    async def read(self) -> Told:
        """The next piece; Gone when the gateway died."""
        piece = await self._pieces.get()
        if piece is None:
            raise Gone
        return piece

    def cut(self) -> None:
        """The gateway died: what was under way is lost."""
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(None)


class Running(Protocol):
    """One process of the system: its connection, and how it is told to stop."""

    process: Process
    bus: MemoryBus

    def stop(self) -> None:
        """Asks for a drain."""
        ...


class Worker:
    """Stage loops in one process. drained_s is how long the drain took, once it is over."""

    def __init__(self, process: Process, bus: MemoryBus, loops: list[StageLoop], on_end: Callable[["Worker"], None]) -> None:
        self.process = process
        self.bus = bus
        self.loops = loops
        self.drained_s: float | None = None
        self._stop = asyncio.Event()
        self._on_end = on_end
        self._running = process.spawn(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for loop in self.loops:
                group.create_task(loop.run(self._stop, DRAIN_S))
            await self._stop.wait()
            asked = self.bus.loop.time()
        self.drained_s = self.bus.loop.time() - asked
        self._on_end(self)

    def stop(self) -> None:
        """Asks for a drain."""
        self._stop.set()


class Gateway:
    """One door, and a session for each client that comes."""

    def __init__(self, process: Process, bus: MemoryBus, on_end: Callable[["Gateway"], None]) -> None:
        self.process = process
        self.bus = bus
        self._on_end = on_end
        self.door = Door(SETTINGS, bus)
        self.answers: dict[str, Answer] = {}
        self._pipes: set[Pipe] = set()
        process.on_kill.append(self._cut)
        process.spawn(self.door.open())

    def _cut(self) -> None:
        for pipe in self._pipes:
            pipe.cut()

    def stop(self) -> None:
        """Asks for a drain."""
        self.process.spawn(self._drain())

    async def _drain(self) -> None:
        await self.door.drain(DRAIN_S)
        self._on_end(self)

    def cancel(self, request: str) -> None:
        """A client asks for a cancel."""
        if request in self.answers:
            self.process.spawn(self._cancel(self.answers[request]))

    async def _cancel(self, answer: Answer) -> None:
        with contextlib.suppress(HeadraceError):
            await self.door.cancel(answer.record)

    def session(self, begin: Begin) -> Pipe:
        """A client's connection: the answer that begin(door) gives is written to its pipe."""
        pipe = Pipe()
        if self.process.state == "dead":
            pipe.cut()
        else:
            self._pipes.add(pipe)
            self.process.spawn(self._session(begin, pipe))
        return pipe

    async def _session(self, begin: Begin, pipe: Pipe) -> None:
        try:
            answer = await begin(self.door)
        except HeadraceError as error:
            await pipe.write(error)
            return
        self.answers[answer.request] = answer
        watching = asyncio.create_task(self._watch(pipe, answer))
        try:
            await pipe.write(Taken(answer.request))
            await self._pump(answer, pipe)
        finally:
            watching.cancel()
            await answer.close()
            self._pipes.discard(pipe)

    async def _pump(self, answer: Answer, pipe: Pipe) -> None:
        while True:
            for piece in await answer.next(5.0):
                await pipe.write(piece)
                if not isinstance(piece, Tokens):
                    return

    async def _watch(self, pipe: Pipe, answer: Answer) -> None:
        await pipe.left.wait()
        answer.disconnected()


def call_for(ask: Ask, request: str, now_us: int) -> Call:
    """What a client's request is after HTTP, under the id that its gateway gives it."""
    extras = HeadraceExtras(
        guardrails=GuardrailExtras(output=RailExtras(personal=None if ask.personal == "off" else ask.personal)),
        deadline_ms=ask.deadline_ms,
        on_disconnect="keep" if ask.keeps else "cancel",
    )
    asked = CompletionRequest(model=MODEL, prompt=ask.prompt, seed=ask.seed, max_tokens=ask.script.tokens, headrace=extras)
    return Call(asked, "completion", PRINCIPAL, request, now_us, ask.key)


class Factory:
    """Starts processes, each on a connection of its own."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        broker: MemoryBroker,
        network: Callable[[Process], FaultyNetwork],
        thread: Callable[[Process], FakeThread],
        on_end: Callable[[Running], None],
    ) -> None:
        self._loop = loop
        self._broker = broker
        self._network = network
        self._thread = thread
        self._on_end = on_end
        self._count = 0

    def start(self, kind: Kind) -> Gateway | Worker:
        """A new process of that kind."""
        self._count += 1
        process = Process(self._loop, f"{kind}-{self._count}")
        made: Gateway | Worker = process.call(self._start, process, kind)
        process.on_kill.append(made.bus.sever)
        process.on_kill.append(lambda: self._on_end(made))
        return made

    def _start(self, process: Process, kind: Kind) -> Gateway | Worker:
        bus = MemoryBus(self._broker, process.name, self._network(process))
        if kind == "gateway":
            return Gateway(process, bus, self._on_end)
        loops = self._guardrail(bus) if kind == "guardrail" else [self._engine(bus, self._thread(process))]
        return Worker(process, bus, loops, self._on_end)

    def _guardrail(self, bus: MemoryBus) -> list[StageLoop]:
        rails, guard = RailsStage(bus, bus.clock), GuardStage(bus, bus.clock)
        return [
            StageLoop(bus, bus.clock, "rails", _lanes("rails"), rails.handle),
            StageLoop(bus, bus.clock, "guard", _lanes("guard"), guard.handle),
        ]

    def _engine(self, bus: MemoryBus, thread: FakeThread) -> StageLoop:
        worker = EngineWorker(bus, bus.clock, FakeTokenizer(), thread)  # type: ignore[arg-type]
        subject, consumer = subjects.work("engine", MODEL, "standard"), subjects.work_consumer("engine", MODEL, "standard")
        return StageLoop(
            bus,
            bus.clock,
            "engine",
            lambda loop: [Lane(subject, consumer, lambda: SLOTS - loop.held)],
            worker.handle,
            ends_on=lambda envelope: envelope.events_subject,
        )


def _lanes(stage: Stage) -> Callable[[StageLoop], list[Lane]]:
    return lambda loop: [simple_lane(stage, loop, SLOTS)]


def presences() -> list[Presence]:
    """What the workers would tell: that every stage is there."""
    card = ModelCard(id=MODEL, context_tokens=1000, precision="fp32")
    stages: tuple[Stage, ...] = ("rails", "guard", "engine")
    return [
        Presence(stage=stage, worker=stage, ready=True, model=card if stage == "engine" else None, slots=SLOTS)
        for stage in stages
    ]
