"""One run: the system on a memory bus, its clients, the faults of the plan, and the wait until everything has come to rest."""

import asyncio
import contextlib
import random
from collections.abc import Iterator

from runtime import following
from runtime.memory_broker import Entry, MemoryBroker
from runtime.memory_bus import MemoryBus
from schemas import subjects
from tests.simulation import faults
from tests.simulation.checkers import Checkers
from tests.simulation.clients import Client
from tests.simulation.model import FakeThread, Script, encode
from tests.simulation.plan import KINDS, Fault, Kind, Plan
from tests.simulation.processes import Factory, Gateway, Running, Worker, presences
from tests.simulation.virtual_time import Process, VirtualTimeLoop
from workers.engine.engine import GenerationRequest

START_US = 1_700_000_000_000_000
REPLICAS = 2
HARM_S = 12.0  # after that no new harm is done, so that everything must come to rest
REST_S = 200.0
QUEUE_MESSAGES_MAX = 3  # so that a slow client's queue is full soon


class World:
    """Everything in one run."""

    def __init__(self, plan: Plan, loop: VirtualTimeLoop) -> None:
        self.plan = plan
        self.loop = loop
        self.rng = random.Random(f"world {plan.seed}")
        self.checkers = Checkers(plan)
        self.broker = MemoryBroker(START_US, self._watch)
        self.checkers.broker = self.broker
        self.networks: list[faults.FaultyNetwork] = []
        self.scripts: dict[tuple[int, ...], Script] = {encode(ask.prompt): ask.script for ask in plan.asks}
        self.failed: dict[tuple[int, ...], int] = {}
        self.factory = Factory(loop, self.broker, self._network, self._thread, self._ended)
        self.running: dict[Kind, list[Gateway | Worker]] = {
            kind: [self.factory.start(kind) for _ in range(REPLICAS)] for kind in KINDS
        }
        self.clients = [self._client(number) for number in range(len(plan.asks))]
        self.calm = False

    def _client(self, number: int) -> Client:
        rng = random.Random(f"client {self.plan.seed} {number}")
        return Client(self.plan.asks[number], lambda: self._any_gateway(rng), rng, self.broker.clock.now_us)

    def _any_gateway(self, rng: random.Random) -> Gateway:
        gateway = rng.choice(self.running["gateway"])
        assert isinstance(gateway, Gateway)
        return gateway

    def _network(self, process: Process) -> faults.FaultyNetwork:
        network = faults.FaultyNetwork(self.plan.lossy, process, random.Random(f"net {self.plan.seed} {process.name}"))
        self.networks.append(network)
        return network

    def _thread(self, process: Process) -> FakeThread:
        def on_tokens(request: GenerationRequest) -> None:
            self.checkers.on_tokens(process, request, self.broker.clock.now_us())

        rng = random.Random(f"thread {self.plan.seed} {process.name}")
        return FakeThread(self.scripts.__getitem__, self.broker.clock.now_us, rng, on_tokens, self.failed)

    def _watch(self, entry: Entry) -> None:
        self.checkers.on_entry(entry)

    def _ended(self, gone: Running) -> None:
        """A process died or was drained: another one comes."""
        self.loop.call_later(0.2 + self.rng.random(), self._replace, gone, context=self.broker.context)

    def _replace(self, gone: Running) -> None:
        if isinstance(gone, Worker) and gone.drained_s is not None:
            self.checkers.on_drained(gone)
        gone.process.kill()
        for kind, replicas in self.running.items():
            if gone in replicas:
                replicas[replicas.index(gone)] = self.factory.start(kind)

    async def run(self) -> None:
        """Until every client has its end and no work is left; then everything is looked at."""
        telling = asyncio.create_task(self._tell())
        harming = [asyncio.create_task(self._harm(fault)) for fault in self.plan.faults]
        calming = self.loop.call_later(HARM_S, self._calm)
        asking = [asyncio.create_task(client.run()) for client in self.clients]
        await asyncio.wait(asking)
        await asyncio.wait(harming) if harming else None
        for task in asking + harming:
            task.result()
        calming.cancel()
        self._calm()
        await self._rest()
        telling.cancel()
        reader = MemoryBus(self.broker, "reader")
        await self.checkers.at_rest(self.clients, reader)

    def _calm(self) -> None:
        for network in self.networks:
            network.calm = True

    async def _rest(self) -> None:
        give_up = self.loop.time() + REST_S
        while self.broker.work and self.loop.time() < give_up:  # noqa: ASYNC110 - virtual time, and a deadline
            await asyncio.sleep(0.5)
        await asyncio.sleep(4.0)  # ends that gateways write themselves

    async def _tell(self) -> None:
        """The workers' presence, as long as it can matter."""
        await asyncio.sleep(0.05)  # gateways listen by then
        while True:
            for presence in presences():
                if self.broker.up:
                    self.broker.publish(subjects.alive(presence.stage, presence.worker), presence.encode())
            await asyncio.sleep(1.5)

    async def _harm(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        victim = self.running[fault.kind][fault.replica]
        match fault.name:
            case "crash":
                victim.process.kill()
            case "stale_wake_up":
                self.checkers.stalled.add(victim.process.name)
                await faults.stale_wake_up(victim.process, fault.for_s, self.rng.random() < 0.5)
            case "drain":
                victim.stop()
            case "disconnect":
                await faults.disconnect(victim.bus, fault.for_s)
            case "full_store":
                await faults.full_store(self.broker, fault.for_s)
            case "broker_death":
                await faults.broker_death(self.broker, fault.for_s)


@contextlib.contextmanager
def _small_and_seeded(seed: int) -> Iterator[None]:
    """Small queues, and the same chance for what draws from the common source."""
    state, most = random.getstate(), following.QUEUE_MESSAGES_MAX
    random.seed(seed)
    following.QUEUE_MESSAGES_MAX = QUEUE_MESSAGES_MAX
    try:
        yield
    finally:
        random.setstate(state)
        following.QUEUE_MESSAGES_MAX = most


def simulate(plan: Plan) -> Checkers:
    """Carries out one plan and returns what was found."""
    loop = VirtualTimeLoop()
    with _small_and_seeded(plan.seed):
        world: list[World] = []

        async def main() -> None:
            world.append(World(plan, loop))
            await world[0].run()

        try:
            loop.run_until_complete(main())
        finally:
            errors = [str(error.get("exception") or error.get("message")) for error in loop.errors]
            loop.finish()
        world[0].checkers.violations += [f"unhandled: {error}" for error in errors]
    return world[0].checkers
