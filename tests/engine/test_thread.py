"""The engine's thread: commands take effect within a step, and a fault reaches whoever waits."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.errors import HeadraceError
from tests.engine.fakes import FakeRunner, FakeVocabulary, sampling
from tests.support.waiting import until
from workers.engine.engine import Engine, GenerationRequest
from workers.engine.plan import StepPlan, StepResult
from workers.engine.scheduler import Scheduler
from workers.engine.thread import EngineThread

pytestmark = pytest.mark.anyio

BUDGET = 16


class GatedRunner(FakeRunner):
    """Waits before each step until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(block_tokens=4, budget_tokens=BUDGET, blocks=64)
        self.gate = threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        """Carries out one plan, once it may."""
        self.plans.append(plan)
        self.gate.acquire(timeout=10)
        result = super().run(plan)
        self.plans.pop()  # the step was noted on its way in
        return result


@pytest.fixture
async def running(anyio_backend: str) -> AsyncIterator[tuple[EngineThread, GatedRunner]]:
    runner = GatedRunner()
    scheduler = Scheduler(blocks=64, block_tokens=4, budget_tokens=BUDGET, slots=4, context_tokens=256)
    thread = EngineThread(Engine(runner, FakeVocabulary(), scheduler, lambda: 0))
    thread.start()
    yield thread, runner
    runner.gate.release(100)
    await thread.stop()


def request(name: str, tokens: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(name, "t", "standard", tuple([3] * tokens), sampling(**options), 10**18)


async def test_a_prefill_of_eight_chunks_that_is_cancelled_frees_its_slot_within_two_steps(
    running: tuple[EngineThread, GatedRunner],
) -> None:
    thread, runner = running
    stream = thread.add(request("long", 8 * BUDGET))
    await until(lambda: len(runner.plans) == 1, "the first chunk")
    thread.drop(stream)
    runner.gate.release()
    await until(lambda: thread.statistics.running == 0, "the slot is free")
    assert len(runner.plans) == 1  # the chunk that was being computed, and no other
    assert thread.statistics.blocks_owned == 0


async def test_the_next_attempt_at_a_request_hears_nothing_of_the_one_before(
    running: tuple[EngineThread, GatedRunner],
) -> None:
    """A step is computed for the first attempt when it is dropped and the second begins, with no token in its log."""
    thread, runner = running
    first = thread.add(request("a", 3, max_tokens=4, ignore_eos=True))
    await until(lambda: len(runner.plans) == 1, "a step of the first attempt")
    thread.drop(first)
    second = thread.add(request("a", 3, max_tokens=4, ignore_eos=True))
    runner.gate.release(100)
    index, ended = 0, False
    while not ended:
        output = await second.get()
        assert not isinstance(output, HeadraceError)
        assert output.index == index
        index, ended = index + len(output.ids), output.finish is not None
    assert index == 4
    assert first.empty()
    await until(lambda: thread.statistics.running == 0, "both slots are free")


async def test_an_admission_that_breaks_is_told_and_the_thread_lives_on(
    running: tuple[EngineThread, GatedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, runner = running
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add", lambda self, request: 1 / 0)
        told = await thread.add(request("a", 3)).get()
    assert isinstance(told, HeadraceError)
    assert told.code == "internal"
    runner.gate.release(100)
    assert not isinstance(await thread.add(request("b", 3, max_tokens=1, ignore_eos=True)).get(), HeadraceError)


async def test_a_fault_is_told_to_every_request_and_the_thread_lives_on(running: tuple[EngineThread, GatedRunner]) -> None:
    thread, runner = running
    first = thread.add(request("a", 3, max_tokens=4))
    runner.fault = RuntimeError("no memory")
    runner.gate.release(100)
    told = await first.get()
    assert isinstance(told, HeadraceError)
    assert told.code == "internal"
    runner.fault = None
    second = thread.add(request("b", 3, max_tokens=2, ignore_eos=True))
    outputs = [await second.get()]
    while not isinstance(outputs[-1], HeadraceError) and outputs[-1].finish is None:
        outputs.append(await second.get())
    assert not isinstance(outputs[-1], HeadraceError)


async def test_what_is_refused_at_admission_is_told_on_its_stream(running: tuple[EngineThread, GatedRunner]) -> None:
    thread, _ = running
    told = await thread.add(request("big", 300)).get()
    assert isinstance(told, HeadraceError)
    assert told.code == "context_length_exceeded"
