"""What must hold in every run, whatever the faults: the invariants of delivery, each with its number in the design.

They look at the broker's journal while it is written, at what clients were told, and at the logs when everything is at
rest. They read the logs with a reader of their own, not with the pipeline's.
"""

from dataclasses import dataclass
from typing import Any

from runtime.following import Follow
from runtime.memory_broker import Entry, MemoryBroker
from runtime.memory_bus import MemoryBus
from runtime.sequencer import Deliver
from schemas import events, limits, subjects
from schemas.dead_letter import DeadLetter
from schemas.envelope import Envelope
from schemas.errors import HeadraceError
from schemas.events import Event, Failed, Finished, Terminal, Tokens
from schemas.timeline import Timeline
from tests.simulation import model
from tests.simulation.clients import Client
from tests.simulation.plan import Ask, Plan
from tests.simulation.virtual_time import Process
from workers.engine.engine import GenerationRequest
from workers.guardrail.rails import find_all, rail_for, redact

GRACE_US = 8_000_000  # a deadline's word comes to the client within that


@dataclass(frozen=True, slots=True)
class Told:
    """A log as the simplest reader sees it: stale epochs left out, up to the first end."""

    texts: tuple[str, ...]
    end: Terminal | None
    late_ends: tuple[Terminal, ...]  # that came after it, of the same or a later epoch


def fold(log: list[bytes]) -> Told:
    """Reads a log."""
    texts: list[str] = []
    epoch, end, late = 0, None, []
    for data in log:
        event = events.decode(data)
        if event.epoch < epoch:
            continue
        epoch = event.epoch
        if isinstance(event, Tokens):
            if end is None and event.index <= len(texts):
                texts += event.texts[len(texts) - event.index :]
        elif end is None:
            end = event if event.index <= len(texts) or isinstance(event, Failed) else None
        else:
            late.append(event)
    return Told(tuple(texts), end, tuple(late))


class Checkers:
    """Collects what is wrong in violations."""

    broker: MemoryBroker

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.violations: list[str] = []
        self.outcomes: set[str] = set()
        self.stalled: set[str] = set()
        self._queued: dict[tuple[str, str], int] = {}  # request, stage -> stored
        self._asks = {model.encode(ask.prompt): ask for ask in plan.asks}

    def fail(self, number: int, what: str) -> None:
        """One violation of an invariant."""
        at_s = self.broker.loop.time()
        self.violations.append(f"invariant {number}: {what} (at {at_s:.3f} s)")

    def told(self, subject: str) -> Told:
        """What is in a log, or on file where the log has lost its end."""
        told = fold([message.data for message in self.broker.read(subject, 0)])
        kept = self.broker.read(subjects.end(subject), 0)
        if told.end is None and kept:  # an answer on file ends the request, whoever wrote it
            told = fold(events.decode_end(message.data for message in kept))
        return told

    # while it runs

    def on_entry(self, entry: Entry) -> None:
        """One line of the journal."""
        if not entry.subject.startswith("hr.work."):
            return
        stage = entry.subject.split(".")[2]
        if entry.what == "stored":
            self._on_queued(stage, Envelope.decode(entry.data).request)
        elif entry.what == "acknowledged":
            self._on_acknowledged(stage, Envelope.decode(entry.data), entry)

    def _on_queued(self, stage: str, request: str) -> None:
        count = self._queued[request, stage] = self._queued.get((request, stage), 0) + 1
        if count > 1 and not self.plan.broker_dies:
            self.fail(3, f"{request} was queued {count} times for {stage}")

    def _on_acknowledged(self, stage: str, envelope: Envelope, entry: Entry) -> None:
        """Publish the result, wait for the confirmation, then acknowledge: what an item was for is there when it goes."""
        request = envelope.request
        answered = self.told(subjects.reply(request)).end is not None
        if stage == "rails":
            onward = [("guard", envelope.rails.guards_output), ("engine", True)]
            done = all((request, name) in self._queued for name, needed in onward if needed)
        elif stage == "engine":
            done = self.told(envelope.events_subject).end is not None
        else:
            done = False
        if not (done or answered):
            self.fail(3, f"{entry.who} acknowledged {stage} of {request} before its result was there (attempt {entry.attempt})")

    def on_tokens(self, process: Process, request: GenerationRequest, now_us: int) -> None:
        """An engine computed something."""
        if now_us > request.deadline_us and process.name not in self.stalled:
            self.fail(7, f"{process.name} computed {request.request} {now_us - request.deadline_us} us after its deadline")

    def on_drained(self, worker: Any) -> None:
        """A worker has drained."""
        held = sum(loop.held for loop in worker.loops)
        if held and not self.plan.cuts:  # what the broker cannot be told of runs out by itself
            self.fail(8, f"{worker.process.name} drained and holds {held} items")
        if worker.drained_s > limits.ACK_WAIT_S + 2 and worker.process.name not in self.stalled:
            self.fail(8, f"{worker.process.name} took {worker.drained_s:.1f} s to drain")

    # at the end

    async def at_rest(self, clients: list[Client], bus: MemoryBus) -> None:
        """Everything has come to rest: looks at every request from all sides."""
        for item in self.broker.work:
            self.fail(1, f"work left: {item.subject} {Envelope.decode(item.data).request}")
        for client in clients:
            self.outcomes |= _outcomes(client)
            self._told_in_order(client)
            self._told_one_end(client)
            await self._same_from_the_log(client, bus)
        self._every_work_ended()
        self._letters(clients)

    def _told_in_order(self, client: Client) -> None:
        for seen in client.seen:
            index = seen.start
            for tokens in seen.tokens:
                if tokens.index != index:
                    self.fail(2, f"{client.request}: token {tokens.index} came where {index} was due")
                index = tokens.end
        if self.plan.orderly and client.request is not None and not client.ask.slow_s:
            self._told_nothing_stale(client, subjects.reply(client.request))

    def _told_nothing_stale(self, client: Client, subject: str) -> None:
        """Where live messages come whole and in order, every reader fences as the log does."""
        log = [events.decode(message.data) for message in self.broker.read(subject, 0)]
        told = [tokens for seen in client.seen for tokens in seen.tokens] + client.terminals
        for event in told:
            places = [place for place, logged in enumerate(log) if logged.epoch == event.epoch and _same(logged, event)]
            if places and any(logged.epoch > event.epoch for logged in log[: places[0]]):
                self.fail(2, f"{client.request}: told {event}, which is stale")

    def _told_one_end(self, client: Client) -> None:
        ask = client.ask
        if client.refused is not None:
            self._refused(client, client.refused)
            return
        if client.left or client.request is None:
            return
        if len(client.terminals) != 1:
            self.fail(1, f"{client.request}: {len(client.terminals)} ends: {client.terminals} {client.refusals}")
            return
        [end] = client.terminals
        text, whole = "".join(client.texts), expected(ask)
        if isinstance(end, Finished):
            self._finished(client, end, text, whole)
        else:
            self._failed(client, end)
        if not is_start(text, ask):
            self.fail(2, f"{client.request}: told {text!r}, the answer is {whole!r}")

    def _finished(self, client: Client, end: Finished, text: str, whole: str) -> None:
        blocks = client.ask.personal == "block" and client.ask.script.leaks
        if (end.reason == "content_filter") != blocks:
            self.fail(16, f"{client.request}: ended as {end.reason}")
        if not blocks and text != whole:
            self.fail(2, f"{client.request}: told {text!r}, the answer is {whole!r}")
        if client.ask.script.failures > limits.ATTEMPTS_MAX and not blocks:
            self.fail(5, f"{client.request}: poison was answered")

    def _failed(self, client: Client, end: Failed) -> None:
        ask = client.ask
        match end.code:
            case "cancelled" if client.cancelled:
                pass
            case "cancelled" if self.plan.broker_dies and ask.personal == "block" and ask.script.leaks:
                # A guard blocked it and stopped the engine, then died, and with the broker what it had blocked:
                # the cancel is all that is left.
                pass
            case "deadline_exceeded" if client.ended_us >= client.asked_us + ask.deadline_ms * 1000:
                pass
            case "attempts_exhausted" if ask.script.failures:
                pass
            case _:
                self.fail(6 if end.code == "cancelled" else 1, f"{client.request}: failed as {end.code}: {end.message}")
        due_us = max(client.taken_us, client.asked_us + ask.deadline_ms * 1000) + GRACE_US + int(ask.slow_s * 20e6)
        late_us = client.ended_us - due_us
        if late_us > 0 and not self.stalled and not self.plan.broker_dies:
            self.fail(7, f"{client.request}: told {end.code} {late_us / 1e6:.1f} s too late")

    def _refused(self, client: Client, error: HeadraceError) -> None:
        self.fail(1, f"{client.request or client.tried}: refused as {error.code}: {error.message}")

    async def _same_from_the_log(self, client: Client, bus: MemoryBus) -> None:
        """Whoever resumes later, from the beginning, is told the same."""
        if client.request is None or client.refused is not None:
            return
        follow = Follow(bus, subjects.reply(client.request), Timeline(0), log_first=True)
        await follow.open()
        texts: list[str] = []
        end: Terminal | None = None
        while end is None and (actions := await follow.next(1.0)):
            for action in actions:
                if isinstance(action, Deliver):
                    texts += action.tokens.texts
                elif not isinstance(action.outcome, HeadraceError):
                    end = action.outcome
        await follow.close()
        self._compare(client, "".join(texts), end)

    def _compare(self, client: Client, text: str, end: Terminal | None) -> None:
        if end is None:
            self.fail(1, f"{client.request}: the log has no end")
            return
        if not is_start(text, client.ask):
            self.fail(2, f"{client.request}: the log has {text!r}")
        if client.left or not client.terminals:
            if client.ask.keeps and kind(end) not in ("length", "content_filter", "attempts_exhausted"):
                self.fail(1, f"{client.request}: was to be kept, and ended as {kind(end)}")
            return
        told = kind(client.terminals[0])
        cut_off = told == "deadline_exceeded" and self.plan.cuts  # the gateway could not read the log in time
        if kind(end) != told and not client.cancelled and not cut_off:
            self.fail(1, f"{client.request}: told {told}, the log says {kind(end)}")
        if "".join(client.texts) != text and kind(end) == told == "length":
            self.fail(2, f"{client.request}: told {client.texts}, the log has {text!r}")

    def _every_work_ended(self) -> None:
        """Also of those whose client is gone."""
        for request in {request for request, _ in self._queued}:
            told = self.told(subjects.reply(request))
            if told.end is None:
                self.fail(1, f"{request} was queued and never ended")
            for late in told.late_ends:
                if told.end is not None and kind(late) != kind(told.end):
                    self.fail(1, f"{request} ended as {kind(told.end)}, and then as {kind(late)}")

    def _letters(self, clients: list[Client]) -> None:
        """A dead letter if, and only if, the attempts were exhausted."""
        buried = set()
        for item in self.broker.read_all(subjects.DEAD_STREAM):
            buried.add(Envelope.decode(DeadLetter.decode(item.data).input).request)
        for request in {request for request, _ in self._queued}:
            end = self.told(subjects.reply(request)).end
            exhausted, ended = request in buried, end is not None and kind(end)
            if exhausted != (ended == "attempts_exhausted") and not (exhausted and ended in ("content_filter", "cancelled")):
                self.fail(5, f"{request} ended as {ended}, dead letter: {exhausted}")


def _outcomes(client: Client) -> set[str]:
    """What became of a client's request, in words."""
    words = {kind(end) for end in client.terminals}
    if client.left:
        words.add("left")
    if any(seen.start and seen.tokens for seen in client.seen):
        words.add("resumed")
    return words


def _same(logged: Event, told: Event) -> bool:
    """Whether what was told may be of that event of the log."""
    if isinstance(logged, Tokens) and isinstance(told, Tokens):
        return logged.index <= told.index < logged.end
    return type(logged) is type(told)


def kind(end: Terminal) -> str:
    """The one word for an end."""
    return end.reason if isinstance(end, Finished) else end.code


def expected(ask: Ask, tokens: int | None = None) -> str:
    """The answer, or its first tokens, as the client should get it: its rails applied to the text at once."""
    text = "".join(model.answer(ask.prompt, ask.seed, ask.script)[:tokens])
    rail = rail_for({"personal": ask.personal})
    if rail is None:
        return text
    findings = find_all(rail, text)
    if ask.personal == "block" and findings:
        return text[: findings[0].start]
    return redact(text, findings)


def is_start(text: str, ask: Ask) -> bool:
    """Whether it is a start of the answer, or of an answer that broke off somewhere: half an address is none."""
    return any(expected(ask, tokens).startswith(text) for tokens in range(ask.script.tokens, -1, -1))
