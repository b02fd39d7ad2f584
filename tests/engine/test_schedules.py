"""Whatever the schedule, the text is the same, all blocks come home and everything ends: random schedules, seed printed."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from schemas.subjects import PRIORITIES
from tests.engine.fakes import TOKEN_BYTES, FakeRunner, FakeVocabulary, reference, sampling
from workers.engine.engine import Engine, EngineFault, GenerationRequest, Output
from workers.engine.scheduler import Scheduler

SCHEDULES = 600
STEPS_MAX = 5000
STOPS = [(), (), ("STOP",), (" a", "STO"), ("😀",), ("é", "xyx")]


class _Schedule:
    """One random life of an engine: small caches, all classes, cancels, faults, hand-overs to a new engine."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_tokens = self.random.choice([1, 2, 4, 16])
        self.blocks = max(3, self.random.randint(10, 80) // self.block_tokens)
        self.slots = self.random.randint(1, 6)
        self.budget = self.slots + self.random.choice([0, 1, 3, 12])
        self.context = self.random.choice([3, 20, 40, 80])
        self.now_us = 0
        self.requests: dict[str, GenerationRequest] = {}
        self.shown: dict[str, list[tuple[int, str]]] = {}
        self.ends: dict[str, Output] = {}
        self.cancelled: set[str] = set()
        self.preemptions = 0
        self.engine = self._new_engine()

    def _new_engine(self) -> Engine:
        age_us = self.random.choice([50, 1000, 10**9])
        self.scheduler = Scheduler(
            self.blocks, self.block_tokens, self.budget, self.slots, self.context, waiting_max=99, age_us=age_us
        )
        self.runner = FakeRunner(self.block_tokens, self.budget, self.blocks)
        return Engine(self.runner, FakeVocabulary(), self.scheduler, lambda: self.now_us)

    def run(self) -> None:
        arrivals = list(self._arrivals())
        for _ in range(STEPS_MAX):
            if not arrivals and self.engine.idle:
                return
            while arrivals and self.random.random() < 0.3:
                self._arrive(arrivals.pop())
            self._disturb()
            self._step()
        raise AssertionError(f"not over after {STEPS_MAX} steps: {self.engine.statistics()}")

    def _arrivals(self) -> Iterator[GenerationRequest]:
        longest = self.scheduler.context_tokens - 1
        for number in range(self.random.randint(1, 16)):
            size = self.random.randint(1, min(longest, self.random.choice([3, 10, 99])))
            prompt = tuple(self.random.randrange(1, len(TOKEN_BYTES)) for _ in range(size))
            options: dict[str, Any] = {
                "max_tokens": self.random.choice([None, None, 1, 5, 30]),
                "min_tokens": self.random.choice([0, 0, 3]),
                "stop": self.random.choice(STOPS),
                "ignore_eos": self.random.random() < 0.2,
            }
            drawing = sampling(self.random.randrange(1000), **options)
            yield GenerationRequest(str(number), "t", self.random.choice(PRIORITIES), prompt, drawing, 10**15)

    def _arrive(self, request: GenerationRequest) -> None:
        self.requests[request.request] = request
        self.shown[request.request] = []
        self.engine.add(request)

    def _disturb(self) -> None:
        chance = self.random.random()
        live = [name for name in self.requests if name in self.engine]
        if live and chance < 0.02:
            self._cancel(self.random.choice(live))
        elif chance < 0.03:
            self.runner.fault = RuntimeError("planted")
        elif chance < 0.04:
            self._hand_over()

    def _cancel(self, name: str) -> None:
        last = self.engine.cancel(name)
        assert last is not None
        assert last.index == len(self.shown[name])
        self.cancelled.add(name)

    def _hand_over(self) -> None:
        """Another engine takes all requests over, from what was shown."""
        self.preemptions += self.engine.statistics().preemptions
        names = self.engine.drain_all()
        self._take(self.engine.step())  # what was ready before
        assert self.engine.statistics().blocks_owned == 0
        self.engine = self._new_engine()
        for name in names:
            emitted = tuple(token for token, _ in self.shown[name])
            self.engine.add(replace(self.requests[name], emitted_ids=emitted))

    def _step(self) -> None:
        self.now_us += self.random.choice([1, 10, 100])
        try:
            self._take(self.engine.step())
        except EngineFault:
            self.runner.fault = None
        self.scheduler.check()

    def _take(self, outputs: list[Output]) -> None:
        assert len({output.request for output in outputs}) == len(outputs), "two outputs for one request"
        for output in outputs:
            shown = self.shown[output.request]
            assert output.index == len(shown), f"{output} after {len(shown)} tokens"
            assert output.request not in self.ends
            assert output.failure is None
            shown += zip(output.ids, output.texts, strict=True)
            if output.finish:
                self.ends[output.request] = output

    def check(self) -> None:
        assert self.engine.statistics().blocks_owned == 0
        assert set(self.ends) | self.cancelled == set(self.requests)
        for name, request in self.requests.items():
            ids, texts, reason, drawn = reference(request, self.scheduler.context_tokens)
            whole = list(zip(ids, texts, strict=True))
            assert self.shown[name] == whole[: len(self.shown[name])]
            if name in self.ends:
                finish = self.ends[name].finish
                assert finish is not None
                assert (finish.reason, finish.usage.completion_tokens) == (reason, drawn)
                assert self.shown[name] == whole


@pytest.mark.parametrize("start", range(0, SCHEDULES, 100))
def test_every_schedule_gives_the_sequential_text_and_ends_with_all_blocks_home(start: int) -> None:
    preemptions = 0
    for seed in range(start, start + 100):
        schedule = _Schedule(seed)
        try:
            schedule.run()
            schedule.check()
        except Exception as error:
            error.add_note(f"schedule seed {seed}")
            raise
        preemptions += schedule.preemptions + schedule.engine.statistics().preemptions
    assert preemptions > 50, f"{preemptions} preemptions in a hundred schedules: they test nothing"
