"""Which request an Idempotency-Key stands for: one bucket, compare-and-set, so that of two gateways one is first.

    the key is                                   a call with it
    ──────────────────────────────────────       ────────────────────────────────────────────────────
    free                                         claims it and begins
    of another body                              idempotency_conflict
    of a request that ended cancelled, or in     claims it anew and begins again, with the same seed:
      a failure that may pass (retryable)          that was no answer
    of one whose work may never have been        queues the same work again (the broker keeps one):
      queued (its gateway died just then)          a request is a replayable value
    of any other                                 attaches: replays what there is, then follows

A claim holds what, with the same body, makes the same envelope: so whoever comes later can queue the same work.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

import structlog

from gateway.ownership import Kind
from gateway.resume import snapshot
from runtime.bus import Bus, BusError
from schemas import codec, subjects
from schemas.codec import CodecError
from schemas.errors import MEANINGS, HeadraceError
from schemas.events import Failed
from schemas.requests import ChatCompletionRequest, CompletionRequest

log = structlog.get_logger()

Fate = Literal["attach", "queue_again", "begin_anew"]


def fingerprint(kind: Kind, asked: ChatCompletionRequest | CompletionRequest) -> str:
    """The digest of what was asked; how the answer is to come (streamed or not) is no part of it."""
    body = asked.model_dump(mode="json", exclude={"stream", "stream_options"})
    return hashlib.sha256(f"{kind}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a key stands for: all that makes the same envelope of the same body again. queued: its work was confirmed."""

    request: str
    fingerprint: str
    arrived_us: int
    deadline_us: int
    seed: int
    queued: bool = False

    def encode(self) -> bytes:
        """As bytes for the broker."""
        return codec.pack(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The claim in these bytes; CodecError when they hold none."""
        try:
            return cls(**codec.unpack(data))
        except TypeError as error:
            raise CodecError(f"not a claim: {error}") from error


@dataclass(frozen=True, slots=True)
class Held:
    """A claim as the bucket holds it at that revision."""

    claim: Claim
    revision: int


class Claims:
    """The keys of all tenants. Every operation: BusUnavailable or BusRefused."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def find(self, tenant: str, key: str) -> Held | None:
        """What the key stands for; None when it is free."""
        entry = await self._bus.kv_get(subjects.IDEMPOTENCY_BUCKET, subjects.idempotency(tenant, key))
        return Held(Claim.decode(entry.data), entry.revision) if entry is not None else None

    async def take(self, tenant: str, key: str, claim: Claim, over: Held | None) -> bool:
        """Claims a free key, or one that is still held as `over` says; False when somebody else was quicker."""
        place = subjects.IDEMPOTENCY_BUCKET, subjects.idempotency(tenant, key)
        if over is None:
            return await self._bus.kv_create(*place, claim.encode())
        return await self._bus.kv_update(*place, claim.encode(), over.revision)

    async def queued(self, tenant: str, key: str, claim: Claim) -> None:
        """The work of the claim is in the queue. Untold, a call with the key queues it again, which the broker takes once."""
        try:
            held = await self.find(tenant, key)
            if held is not None and held.claim == claim:
                await self.take(tenant, key, replace(claim, queued=True), held)
        except BusError as error:
            log.debug("queued_untold", request=claim.request, error=str(error))

    async def fate(self, claim: Claim, now_us: int) -> Fate:
        """What a call with the same key and body does."""
        terminal = (await snapshot(self._bus, claim.request)).terminal
        if terminal is not None:
            return "begin_anew" if isinstance(terminal, Failed) and _may_pass(terminal) else "attach"
        if await self._bus.is_cancelled(claim.request):
            return "begin_anew"
        if claim.queued:
            return "attach"
        return "queue_again" if now_us < claim.deadline_us else "begin_anew"


def _may_pass(failed: Failed) -> bool:
    return failed.code == "cancelled" or MEANINGS[failed.code].retryable


def conflict(key: str, first: Claim, second: str) -> HeadraceError:
    """The same key for two bodies; both are named by the start of their digests."""
    message = (
        f"Idempotency-Key {key!r} stands for request {first.request} with body {first.fingerprint[:12]}; "
        f"this body is {second[:12]}"
    )
    return HeadraceError("idempotency_conflict", message, "Idempotency-Key")
