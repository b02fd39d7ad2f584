"""What each step computes, and for whom: pure decisions over numbers, no tensors, no clock.

Each step lets computed tokens catch up with known ones under a token budget. A new prompt, the next chunk of a long
one, a decode, a sequence that was preempted: all are the same thing, a sequence with tokens missing. The order: who
decodes goes first (one token each, so that a long prompt never stops a stream), then the others share what is left of
the budget in order of rank and arrival.

Why everything ends: the running sequence that is first in order is never preempted for blocks, may preempt all
others, and fits alone, since no admitted sequence can outgrow the cache. Order changes at most twice a sequence
(waiting.py), and no later arrival comes before one that has aged to rank 0.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from schemas.envelope import Sampling
from schemas.errors import HeadraceError
from schemas.subjects import Priority
from workers.engine.blocks import BlockPool
from workers.engine.plan import Chunk, StepPlan, StepResult
from workers.engine.request import Sequence
from workers.engine.waiting import WaitingQueue

WAITING_MAX = 1024
PREEMPTIONS_BY_CLASS_MAX = 3
AGE_US = 30_000_000
DEADLINES_SPARE = 64


@dataclass(frozen=True, slots=True)
class Advance:
    """One more known token of a sequence."""

    sequence: Sequence
    token_id: int


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A snapshot. Counters (prefixes, tokens, preemptions) grow from the scheduler's start.

    prefix_hits: starts that found computed blocks in the cache; prefix_tokens: positions that they did not compute.
    """

    waiting: dict[Priority, int]
    running: int
    slots: int
    blocks: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    prefix_hits: int
    prefix_tokens: int
    tokens_computed: int
    tokens_drawn: int
    tokens_recomputed: int
    preemptions: int


@dataclass(slots=True)
class _Step:
    """A step being planned: budget left, and the half-open range of positions that each request gets computed."""

    budget: int
    ranges: dict[str, tuple[int, int]]

    def give(self, sequence: Sequence, tokens: int) -> None:
        start = sequence.tokens_computed
        self.ranges[sequence.request] = (start, start + tokens)
        self.budget -= tokens

    def take_back(self, sequence: Sequence) -> None:
        start, end = self.ranges.pop(sequence.request, (0, 0))
        self.budget += end - start


class Scheduler:
    """Sequences waiting and running over one cache of blocks times block_tokens positions.

    budget_tokens bounds the tokens of a step, slots the sequences that run at once; context_tokens is the longest
    prompt plus answer, cut to what the cache holds. Instants come from outside, in microseconds.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        budget_tokens: int,
        slots: int,
        context_tokens: int,
        *,
        waiting_max: int = WAITING_MAX,
        age_us: int = AGE_US,
    ) -> None:
        if not 0 < slots <= budget_tokens:
            raise ValueError(f"a step of {budget_tokens} tokens cannot let {slots} slots decode")
        self.block_tokens = block_tokens
        self.budget_tokens = budget_tokens
        self.slots = slots
        self.context_tokens = min(context_tokens, blocks * block_tokens)
        self._pool = BlockPool(blocks)
        self._waiting = WaitingQueue(waiting_max, age_us)
        self._running: list[Sequence] = []  # by order, which is fixed while a sequence runs
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: list[tuple[int, int, Sequence]] = []  # heap; most entries of ended sequences are dropped late
        self._arrivals = 0
        self._prefix_hits = self._prefix_tokens = 0
        self._tokens_computed = self._tokens_drawn = self._tokens_recomputed = self._preemptions = 0

    # ---- sequences in and out

    def answer_tokens_max(self, prompt_tokens: int, sampling: Sampling, param: str = "messages") -> int:
        """Tokens that the answer may have; HeadraceError context_length_exceeded when there is no room for one."""
        if prompt_tokens + 1 > self.context_tokens:
            raise HeadraceError(
                "context_length_exceeded",
                f"the prompt has {prompt_tokens} tokens, this model's context holds {self.context_tokens}",
                param,
            )
        room = self.context_tokens - prompt_tokens
        return room if sampling.max_tokens is None else min(sampling.max_tokens, room)

    def add(self, sequence: Sequence, param: str = "messages") -> None:
        """Queues a sequence; HeadraceError context_length_exceeded or overloaded, and then nothing has changed."""
        assert sequence.request not in self._sequences, f"{sequence.request} is here already"
        assert sequence.prompt_ids, f"{sequence.request} has no prompt"
        answer = self.answer_tokens_max(len(sequence.prompt_ids), sequence.sampling, param)
        assert len(sequence.output_ids) < answer, f"{len(sequence.output_ids)} of {answer} tokens: nothing to generate"
        sequence.tokens_max = len(sequence.prompt_ids) + answer
        sequence.arrival = self._arrivals
        self._waiting.put(sequence, sequence.queued_us)
        self._arrivals += 1
        self._sequences[sequence.request] = sequence
        heappush(self._deadlines, (sequence.deadline_us, sequence.arrival, sequence))

    def cancel(self, request: str) -> bool:
        """Takes a sequence out, in whatever state, and its blocks with it; False when it is not here."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return False
        if sequence.waiting_since_us is not None:
            self._waiting.remove(sequence, sequence.waiting_since_us)
        else:
            self._stop(sequence)
        if len(self._deadlines) > 2 * len(self._sequences) + DEADLINES_SPARE:
            self._deadlines = [entry for entry in self._deadlines if self._sequences.get(entry[2].request) is entry[2]]
            heapify(self._deadlines)
        return True

    def expire(self, now_us: int) -> list[Sequence]:
        """Takes out the sequences whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            sequence = heappop(self._deadlines)[2]
            if self._sequences.get(sequence.request) is sequence:
                self.cancel(sequence.request)
                expired.append(sequence)
        return expired

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._pool.forget()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._sequences

    def requests(self) -> list[str]:
        """The requests that wait or run, by arrival."""
        return list(self._sequences)

    # ---- a step

    def plan(self, now_us: int) -> StepPlan | None:
        """The next step, its blocks allocated; None when nothing waits or runs."""
        self._admit(now_us)
        step = _Step(self.budget_tokens, {})
        decodes = [sequence for sequence in self._running if sequence.tokens_missing == 1]
        prefills = [sequence for sequence in self._running if sequence.tokens_missing > 1]
        for sequence in decodes + prefills:
            if sequence.running_since_us is not None:  # not preempted by one before it
                self._catch_up(sequence, step, now_us)
        if not self._running:
            return None
        assert step.ranges, f"{len(self._running)} sequences run and none moves"
        return StepPlan(tuple(self._chunk(request, *span) for request, span in step.ranges.items()))

    def commit(self, plan: StepPlan, result: StepResult, now_us: int) -> list[Advance]:
        """Books a computed step; the sequences that got a token, in the plan's order."""
        advances = []
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.request)
            if sequence is None or sequence.running_since_us is None:
                continue  # cancelled while the step ran
            sequence.tokens_computed = chunk.end
            self._tokens_computed += len(chunk.token_ids)
            self._register(sequence)
            if chunk.samples:
                advances.append(self._draw(sequence, result.drawn[chunk.request], now_us))
        return advances

    # ---- observers

    def statistics(self) -> SchedulerStatistics:
        """A snapshot for gauges and counters."""
        return SchedulerStatistics(
            waiting=self._waiting.waiting(),
            running=len(self._running),
            slots=self.slots,
            blocks=self._pool.blocks,
            blocks_free=self._pool.free,
            blocks_cached=self._pool.cached,
            blocks_owned=self._pool.owned,
            prefix_hits=self._prefix_hits,
            prefix_tokens=self._prefix_tokens,
            tokens_computed=self._tokens_computed,
            tokens_drawn=self._tokens_drawn,
            tokens_recomputed=self._tokens_recomputed,
            preemptions=self._preemptions,
        )

    def check(self) -> None:
        """The invariants that hold after every step; for tests and for an idle engine."""
        self._pool.check(sequence.blocks for sequence in self._running)
        assert len(self._running) <= self.slots, f"{len(self._running)} run in {self.slots} slots"
        assert len(self._running) + len(self._waiting) == len(self._sequences), "a sequence is lost"
        for sequence in self._sequences.values():
            computed, known, most = sequence.tokens_computed, sequence.tokens_known, sequence.tokens_max
            assert computed <= known <= most, f"{sequence.request}: {computed} computed, {known} known, {most} at most"
            covered = len(sequence.blocks) * self.block_tokens
            assert computed <= covered, f"{sequence.request}: {computed} computed, blocks hold {covered}"

    # ---- who runs

    def _admit(self, now_us: int) -> None:
        """Moves waiting sequences to free slots, in order; the first that must wait holds up those behind it."""
        while (candidate := self._waiting.head(now_us)) is not None:
            victims = self._victims(candidate)
            if victims is None:
                return
            for victim in victims:
                self._preempt(victim, None, now_us)
            self._start(candidate, now_us)

    def _victims(self, candidate: Sequence) -> list[Sequence] | None:
        """Whom the candidate's start preempts: nobody when there is room; None when it must wait.

        Only interactive requests preempt, and only sequences of lower rank, last in order first. One that was preempted
        PREEMPTIONS_BY_CLASS_MAX times for a higher class is left alone.
        """
        found = self._cached_blocks(candidate)
        unclaimed = Counter(block for block in found if self._pool.references(block) == 0)
        slots_short = len(self._running) + 1 - self.slots
        blocks_short = self._blocks(candidate.tokens_known + 1) - len(found) + len(unclaimed) - self._blocks_spare()
        victims: list[Sequence] = []
        given_up: Counter[int] = Counter()
        for sequence in reversed(self._running):
            if slots_short <= 0 and blocks_short <= 0:
                break
            if candidate.priority != "interactive" or sequence.rank <= candidate.rank:
                return None
            if sequence.preemptions_by_class >= PREEMPTIONS_BY_CLASS_MAX:
                continue
            victims.append(sequence)
            slots_short -= 1
            blocks_short -= self._promised(sequence) + self._last_references(sequence, given_up, found)
        return victims if slots_short <= 0 and blocks_short <= 0 else None

    def _last_references(self, sequence: Sequence, given_up: Counter[int], wanted: tuple[int, ...]) -> int:
        """Blocks that nobody owns once this sequence, too, has given its up; those that are wanted as they are do not count."""
        given_up.update(sequence.blocks)
        return sum(self._pool.references(block) == given_up[block] and block not in wanted for block in sequence.blocks)

    def _cached_blocks(self, sequence: Sequence) -> tuple[int, ...]:
        """The blocks, from the first on, whose contents are computed already; at least one known token stays to compute."""
        found = []
        for number in range((sequence.tokens_known - 1) // self.block_tokens):
            block = self._pool.lookup(sequence.prefix(number, self.block_tokens))
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def _start(self, sequence: Sequence, now_us: int) -> None:
        self._waiting.remove(sequence, now_us)
        sequence.running_since_us = now_us
        sequence.outputs_at_start = len(sequence.output_ids)
        self._take_cached(sequence)
        if sequence.scheduled_us is None:
            sequence.scheduled_us = now_us
            sequence.cached_tokens = min(sequence.tokens_computed, len(sequence.prompt_ids))
        insort(self._running, sequence, key=lambda other: other.order)

    def _take_cached(self, sequence: Sequence) -> None:
        sequence.blocks = self._cached_blocks(sequence)
        self._pool.share(sequence.blocks)
        sequence.blocks_registered = len(sequence.blocks)
        sequence.tokens_computed = len(sequence.blocks) * self.block_tokens
        self._prefix_hits += sequence.tokens_computed > 0
        self._prefix_tokens += sequence.tokens_computed
        again = max(0, sequence.tokens_lost - sequence.tokens_computed)
        sequence.tokens_lost = 0
        sequence.tokens_recomputed += again
        self._tokens_recomputed += again

    def _register(self, sequence: Sequence) -> None:
        """Names the blocks that are full of computed tokens by now, so that others may read them."""
        for number in range(sequence.blocks_registered, sequence.tokens_computed // self.block_tokens):
            self._pool.register(sequence.blocks[number], sequence.prefix(number, self.block_tokens))
            sequence.blocks_registered += 1

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = ()
        sequence.running_since_us = None

    def _preempt(self, sequence: Sequence, step: _Step | None, now_us: int) -> None:
        """Back to the queue; what is no longer cached then is computed again. A run that brought no token counts as waiting."""
        assert sequence.running_since_us is not None, f"{sequence.request} does not run"
        if len(sequence.output_ids) == sequence.outputs_at_start:
            sequence.waited_us += max(0, now_us - sequence.running_since_us)
        if step is not None:
            step.take_back(sequence)
        self._stop(sequence)
        self._preemptions += 1
        sequence.preemptions += 1
        sequence.preemptions_by_class += step is None
        sequence.tokens_lost = sequence.tokens_computed
        sequence.tokens_computed = 0
        self._waiting.put_back(sequence, now_us)

    # ---- what they compute

    def _catch_up(self, sequence: Sequence, step: _Step, now_us: int) -> None:
        tokens = min(sequence.tokens_missing, step.budget)
        if tokens > 0:
            tokens = self._grow(sequence, tokens, step, now_us)
        if tokens > 0:
            step.give(sequence, tokens)

    def _grow(self, sequence: Sequence, tokens: int, step: _Step, now_us: int) -> int:
        """Allocates blocks for up to tokens more; how many have room.

        Without room for even one, sequences behind this one are preempted; the last in order stands still instead and
        keeps its blocks until somebody needs them.
        """
        while self._room(sequence) + self._pool.available == 0:
            victim = self._running[-1]
            if victim is sequence:
                return 0
            self._preempt(victim, step, now_us)
        missing = self._blocks(sequence.tokens_computed + tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self._pool.allocate(min(missing, self._pool.available))
        return min(tokens, self._room(sequence))

    def _room(self, sequence: Sequence) -> int:
        """Positions in the sequence's own blocks that are not computed yet."""
        return len(sequence.blocks) * self.block_tokens - sequence.tokens_computed

    def _blocks(self, tokens: int) -> int:
        """Blocks that hold positions [0, tokens)."""
        return -(-tokens // self.block_tokens)

    def _promised(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for what it knows already."""
        return self._blocks(sequence.tokens_known) - len(sequence.blocks)

    def _blocks_spare(self) -> int:
        """Available blocks beyond those that are promised; may be negative."""
        return self._pool.available - sum(self._promised(sequence) for sequence in self._running)

    def _chunk(self, request: str, start: int, end: int) -> Chunk:
        sequence = self._sequences[request]
        known, most = sequence.tokens_known, sequence.tokens_max
        assert end <= known < most, f"{request}: {end} to compute, {known} known, {most} at most"
        samples = end == known
        counts = samples and sequence.sampling.counts_outputs
        return Chunk(
            request=request,
            token_ids=sequence.known(start, end),
            start=start,
            block_table=sequence.blocks,
            samples=samples,
            sampling=sequence.sampling,
            prompt_ids=sequence.prompt_ids if counts else (),
            output_ids=tuple(sequence.output_ids) if counts else (),
        )

    def _draw(self, sequence: Sequence, token_id: int, now_us: int) -> Advance:
        sequence.output_ids.append(token_id)
        self._tokens_drawn += 1
        if sequence.first_token_us is None:
            sequence.first_token_us = now_us
        return Advance(sequence, token_id)
