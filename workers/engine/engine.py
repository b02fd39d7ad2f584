"""The engine's shell around the pure parts: requests in, steps of the runner, shown tokens and endings out.

Synchronous and single-threaded: one thread calls everything. It knows no queue, no broker and no tensors; a failing
runner is reported, and what becomes of the running requests is the caller's decision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from schemas.envelope import Sampling
from schemas.errors import HeadraceError
from schemas.events import Likely, Logprob, Usage
from schemas.subjects import Priority
from workers.engine import request as requests
from workers.engine.detokenizer import Detokenizer
from workers.engine.finish import Emission, Emitter, EndReason
from workers.engine.plan import StepPlan, StepResult
from workers.engine.scheduler import Advance, Scheduler, SchedulerStatistics


class EngineFault(Exception):
    """The runner failed in a step. Nothing of the step is booked: step() may be tried again, or drain_all() called."""


class Runner(Protocol):
    """Carries out a step plan."""

    def run(self, plan: StepPlan) -> StepResult:
        """The tokens drawn for the chunks that sample."""
        ...


class Vocabulary(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def token_bytes_table(self) -> Sequence[bytes]:
        """The bytes of each id's text; none for control tokens."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Ids are in [0, vocabulary_size)."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to generate: emitted_ids were sent by an earlier attempt, prompt_param is the field with the prompt."""

    request: str
    tenant: str
    priority: Priority
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    deadline_us: int
    emitted_ids: tuple[int, ...] = ()
    prompt_param: Literal["messages", "prompt"] = "messages"


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is whole."""

    reason: EndReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Account:
    """What one ended request took here: instants of the engine's clock in microseconds (None: it never came so far), tokens.

    queue: [queued_us, scheduled_us), prefill: [scheduled_us, first_token_us), decode: from there to the end.
    preemptions_by_class: those of the preemptions that let a higher class start; there is a cap on them.
    """

    queued_us: int
    scheduled_us: int | None
    first_token_us: int | None
    usage: Usage
    preemptions: int
    preemptions_by_class: int
    tokens_recomputed: int


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought one request: tokens [index, index + len(ids)) with aligned texts (and logprobs, if asked
    for), and its end, if it ended.

    The last output of a request has either finish or failure, and an account.
    """

    request: str
    index: int
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    finish: Finish | None = None
    failure: HeadraceError | None = None
    account: Account | None = None
    logprobs: tuple[Logprob | None, ...] = ()


@dataclass(slots=True)
class _Live:
    sequence: requests.Sequence
    emitter: Emitter

    def account(self) -> Account:
        sequence = self.sequence
        return Account(
            queued_us=sequence.queued_us,
            scheduled_us=sequence.scheduled_us,
            first_token_us=sequence.first_token_us,
            usage=Usage(len(sequence.prompt_ids), self.emitter.drawn, sequence.cached_tokens),
            preemptions=sequence.preemptions,
            preemptions_by_class=sequence.preemptions_by_class,
            tokens_recomputed=sequence.tokens_recomputed,
        )

    def output(self, index: int, emission: Emission) -> Output:
        account = None if emission.reason is None else self.account()
        return Output(
            request=self.sequence.request,
            index=index,
            ids=emission.ids,
            texts=emission.texts,
            finish=Finish(emission.reason, account.usage) if emission.reason and account else None,
            account=account,
            logprobs=emission.logprobs,
        )

    def failed(self, code: str, message: str) -> Output:
        error = HeadraceError(code, message)
        return Output(self.sequence.request, self.emitter.shown, failure=error, account=self.account())


class Engine:
    """Generates answers for many requests at once. clock gives microseconds, in the time that deadlines are in."""

    def __init__(self, runner: Runner, tokenizer: Vocabulary, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self._runner = runner
        self._token_bytes = tokenizer.token_bytes_table
        self._eos_ids = tokenizer.eos_ids
        self._vocabulary_size = tokenizer.vocabulary_size
        self._scheduler = scheduler
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._ready: list[Output] = []  # outputs for the next step() to return; they survive a fault

    def __contains__(self, request: str) -> bool:
        """Whether a request of this id waits or runs here."""
        return request in self._live

    @property
    def idle(self) -> bool:
        """Whether step() has nothing to do and nothing to say."""
        return self._scheduler.idle and not self._ready

    def add(self, request: GenerationRequest) -> None:
        """Queues a request whose id is not here.

        HeadraceError: invalid_value (empty prompt, token ids out of range, an empty stop string),
        context_length_exceeded, overloaded; then nothing of it is kept. A resumed request whose emitted ids were all
        of its answer ends at once.
        """
        assert request.request not in self._live, f"{request.request} is here already"
        self._validate(request)
        live = self._begin(request)
        if live.emitter.ended is not None:
            self._ready.append(live.output(live.emitter.shown, Emission(reason=live.emitter.ended)))
            return
        self._scheduler.add(live.sequence, request.prompt_param)
        self._live[request.request] = live

    def cancel(self, request: str) -> Output | None:
        """Stops a request in whatever state, and returns its last output, a failure of code cancelled; None: not here."""
        live = self._live.pop(request, None)
        if live is None:
            return None
        self._scheduler.cancel(request)
        return live.failed("cancelled", "the request was cancelled")

    def step(self) -> list[Output]:
        """Computes one step; at most one output a request. EngineFault when the runner fails."""
        now_us = self._clock()
        for sequence in self._scheduler.expire(now_us):
            self._ready.append(self._live.pop(sequence.request).failed("deadline_exceeded", "the deadline has passed"))
        plan = self._scheduler.plan(now_us)
        if plan is not None:
            result = self._run(plan)
            for advance in self._scheduler.commit(plan, result, self._clock()):
                self._advance(advance, result)
        ready, self._ready = self._ready, []
        return ready

    def drain_all(self) -> list[str]:
        """Drops all requests that wait or run, blocks and all, and returns their ids by arrival: the caller has them again.

        The prefix cache goes too: it may hold what a failing runner computed.
        """
        dropped = self._scheduler.requests()
        for request in dropped:
            self._scheduler.cancel(request)
        self._live.clear()
        self._scheduler.forget_prefixes()
        self._scheduler.check()
        return dropped

    def statistics(self) -> SchedulerStatistics:
        """A snapshot for gauges and counters."""
        return self._scheduler.statistics()

    def _validate(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise HeadraceError("invalid_value", "the prompt has no tokens", request.prompt_param)
        prompt = request.prompt_ids
        named: list[tuple[int, str]] = [(min(prompt), request.prompt_param), (max(prompt), request.prompt_param)]
        named += [(token_id, "logit_bias") for token_id, _ in request.sampling.logit_bias]
        for token_id, param in named:
            if not 0 <= token_id < self._vocabulary_size:
                message = f"token id {token_id} is not in this model's vocabulary, 0 to {self._vocabulary_size - 1}"
                raise HeadraceError("invalid_value", message, param)
        if not all(request.sampling.stop):
            raise HeadraceError("invalid_value", "a stop string is empty", "stop")

    def _begin(self, request: GenerationRequest) -> _Live:
        room = self._scheduler.answer_tokens_max(len(request.prompt_ids), request.sampling, request.prompt_param)
        sequence = requests.Sequence(
            request=request.request,
            tenant=request.tenant,
            priority=request.priority,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            queued_us=self._clock(),
            deadline_us=request.deadline_us,
            output_ids=list(request.emitted_ids),
        )
        detokenizer = Detokenizer(self._token_bytes)
        return _Live(sequence, Emitter(request.sampling, self._eos_ids, room, detokenizer, request.emitted_ids))

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self._runner.run(plan)
        except Exception as error:
            size = f"{plan.tokens} tokens for {len(plan.chunks)} requests"
            raise EngineFault(f"a step of {size} failed: {error!r}") from error

    def _advance(self, advance: Advance, result: StepResult) -> None:
        request = advance.sequence.request
        live = self._live[request]
        index = live.emitter.shown
        emission = live.emitter.push(advance.token_id, self._logprob(result.logprobs.get(request)))
        if emission.ids or emission.reason:
            self._ready.append(live.output(index, emission))
        if emission.reason:
            self._scheduler.cancel(request)
            del self._live[request]

    def _logprob(self, numbers: tuple[tuple[int, float], ...] | None) -> Logprob | None:
        """What the runner tells of one drawn token, with bytes."""
        if numbers is None:
            return None
        token, *top = (Likely(token_id, self._bytes(token_id), logprob) for token_id, logprob in numbers)
        return Logprob(token, tuple(top))

    def _bytes(self, token_id: int) -> bytes:
        """None for ids past the tokenizer's table, which a padded output layer has."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
