"""Who is there: the workers that said so lately. It decides whether a request could be served at all, before it is
queued. A stage that is only being restarted counts as there: its work waits in the queue.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import structlog

from runtime.bus import Bus, Message, Subscription
from schemas import subjects
from schemas.codec import CodecError
from schemas.envelope import ChatInput, Envelope, TextInput, TokensInput
from schemas.errors import HeadraceError
from schemas.limits import PRESENCE_S, PRESENCE_TIMEOUT_S, SUCCESSION_S
from schemas.presence import ModelCard, Presence
from schemas.subjects import Stage

log = structlog.get_logger()

MODELS_SEEN_MAX = 1000


@dataclass(frozen=True, slots=True)
class _Seen:
    presence: Presence
    at: float  # the loop's time


class Fleet:
    """The registry of workers, kept by their broadcasts. A silent worker is gone after PRESENCE_TIMEOUT_S."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._models_seen: set[str] = set()
        self._ready_at: dict[tuple[Stage, str | None], float] = {}  # by stage and model, the loop's time; bounded as models
        self._told = asyncio.Event()
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Listens to broadcasts and calls the roll."""
        self._subscription = await self._bus.subscribe(subjects.ALIVE_ALL, self._on_presence)
        await self._bus.publish(subjects.ROLLCALL, b"")

    async def settle(self, stages: tuple[Stage, ...]) -> None:
        """Returns when every one of the stages has a ready worker, or when all workers have had the time to say so."""

        async def until_there() -> None:
            while self.missing(stages):
                self._told.clear()
                await self._told.wait()

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until_there(), 2 * PRESENCE_S)

    async def close(self) -> None:
        """Stops listening."""
        if self._subscription is not None:
            try:
                await self._subscription.unsubscribe()
            except Exception as error:  # a connection that is gone has no subscriptions either
                log.debug("unsubscribe", error=repr(error))

    async def _on_presence(self, message: Message) -> None:
        try:
            presence = Presence.decode(message.data)
        except CodecError as error:
            log.warning("presence_undecodable", error=str(error))
            return
        now = asyncio.get_running_loop().time()
        model = None if presence.model is None else presence.model.id
        self._seen[presence.stage, presence.worker] = _Seen(presence, now)
        if model is not None and len(self._models_seen) < MODELS_SEEN_MAX:
            self._models_seen.add(model)
        if presence.ready and (model is None or model in self._models_seen):
            self._ready_at[presence.stage, model] = now
        self._told.set()

    def alive(self) -> list[Presence]:
        """Every worker that is there, ready or not."""
        oldest = asyncio.get_running_loop().time() - PRESENCE_TIMEOUT_S
        self._seen = {key: seen for key, seen in self._seen.items() if seen.at >= oldest}
        return [seen.presence for seen in self._seen.values()]

    def models(self) -> list[ModelCard]:
        """The models that live engines serve, by id; of engines that differ, the smallest context."""
        cards: dict[str, ModelCard] = {}
        for presence in self.alive():
            card = presence.model
            if card is not None and (card.id not in cards or card.context_tokens < cards[card.id].context_tokens):
                cards[card.id] = card
        return [cards[name] for name in sorted(cards)]

    def waiting(self) -> int:
        """Requests that live engines hold in their own queues, as they tell."""
        return sum(
            int(value)
            for presence in self.alive()
            if presence.stage == "engine"
            for gauge, value in presence.gauges.items()
            if gauge.startswith("waiting")
        )

    def missing(self, stages: tuple[Stage, ...], model: str | None = None) -> dict[Stage, str]:
        """Stages without a live, ready worker (for the engine: one with that model), each with the reason."""
        alive = self.alive()
        return {stage: reason for stage in stages if (reason := _lack(alive, stage, model)) is not None}

    def check(self, envelope: Envelope) -> None:
        """HeadraceError model_not_found or stage_unavailable when the envelope could not be served now."""
        known = [card.id for card in self.models()]
        if known and envelope.model not in known and envelope.model not in self._models_seen:
            message = f"no engine serves the model {envelope.model!r}; there are: {', '.join(known)}"
            raise HeadraceError("model_not_found", message, "model")
        stages: tuple[Stage, ...] = (*envelope.slip, "guard") if envelope.rails.guards_output else envelope.slip
        missing = {
            stage: reason
            for stage, reason in self.missing(stages, envelope.model).items()
            if not self._succeeds(stage, envelope.model)
        }
        if missing:
            reasons = "; ".join(f"{stage}: {reason}" for stage, reason in missing.items())
            raise HeadraceError("stage_unavailable", f"this request cannot be served now: {reasons}")
        for card in self.models():
            if card.id == envelope.model:
                _refuse_what_cannot_fit(card, envelope)

    def _succeeds(self, stage: Stage, model: str) -> bool:
        """Whether the stage was ready so lately that somebody will take over what it is given."""
        ready_at = self._ready_at.get((stage, model if stage == "engine" else None))
        return ready_at is not None and asyncio.get_running_loop().time() - ready_at < SUCCESSION_S


def _lack(alive: list[Presence], stage: Stage, model: str | None) -> str | None:
    """Why the stage cannot take work; None when it can."""
    workers = [presence for presence in alive if presence.stage == stage]
    if stage == "engine" and model is not None:
        workers = [presence for presence in workers if presence.model is not None and presence.model.id == model]
    if any(presence.ready for presence in workers):
        return None
    named = f" with the model {model}" if stage == "engine" and model is not None else ""
    if not workers:
        return f"no worker is alive{named}"
    return f"no worker{named} is ready ({workers[0].reason or 'it does not say why'})"


def _refuse_what_cannot_fit(card: ModelCard, envelope: Envelope) -> None:
    """HeadraceError for a prompt that is too long by its bytes alone: counting its tokens would take seconds."""
    match envelope.input:
        case TokensInput(ids=ids):
            param, least = "prompt", len(ids)
        case TextInput(prompt=prompt):
            param, least = "prompt", len(prompt.encode()) // card.token_bytes_max
        case ChatInput(messages=messages):
            param, least = "messages", sum(len(message.content.encode()) for message in messages) // card.token_bytes_max
    if least > card.context_tokens:
        message = f"the prompt has at least {least} tokens, this model's context holds {card.context_tokens}"
        raise HeadraceError("context_length_exceeded", message, param)
