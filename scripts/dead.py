"""headrace dead: work that failed its last attempt. Looked at here, and sent again under a new request id.

A replayed request is a new one: its old stream has ended with an error, and a stream ends once.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from gateway import ownership
from gateway.ownership import Ownership
from runtime.bus import BusError
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from schemas import subjects
from schemas.codec import CodecError
from schemas.dead_letter import DeadLetter
from schemas.envelope import ChatInput, Envelope
from schemas.timeline import Timeline
from scripts.up import running_nats_url


def list_letters(settings: Settings, as_json: bool) -> int:
    """One line a letter: number, stage, request, tenant, attempts, cause."""
    return _run(settings, lambda bus: _list(bus, as_json))


def show_letter(settings: Settings, number: int) -> int:
    """The letter as JSON, with its whole input: prompts too."""
    return _run(settings, lambda bus: _show(bus, number))


def replay_letter(settings: Settings, number: int) -> int:
    """Sends the letter's request again, with as much time as it had; prints the new request id."""
    return _run(settings, lambda bus: _replay(bus, number))


def _run(settings: Settings, work: Callable[[NatsBus], Awaitable[int]]) -> int:
    async def connected() -> int:
        bus = await NatsBus.connect(running_nats_url(settings.home) or settings.nats_url, "dead")
        try:
            return await work(bus)
        finally:
            await bus.close()

    try:
        return asyncio.run(connected())
    except (BusError, CodecError) as error:
        where = (
            "" if running_nats_url(settings.home) else f"; no headrace runs on {settings.home} (HEADRACE_HOME names another)"
        )
        print(f"headrace dead: {error}{where}", file=sys.stderr)
        return 1


async def _list(bus: NatsBus, as_json: bool) -> int:
    rows = [_row(message.sequence or 0, DeadLetter.decode(message.data)) for message in await bus.read_dead()]
    if as_json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(f"{row['number']}\t{row['stage']}\t{row['request']}\t{row['tenant']}\t{row['attempts']}\t{row['cause']}")
    if not rows:
        print("no dead letters", file=sys.stderr)
    return 0


def _row(number: int, letter: DeadLetter) -> dict[str, Any]:
    try:
        envelope = Envelope.decode(letter.input)
        request, tenant = envelope.request, envelope.tenant
    except CodecError:
        request = tenant = "?"
    common = {"number": number, "stage": letter.stage, "request": request, "tenant": tenant}
    return common | {"attempts": letter.attempts, "cause": letter.cause}


async def _find(bus: NatsBus, number: int) -> DeadLetter | None:
    for message in await bus.read_dead(number - 1):
        if message.sequence == number:
            return DeadLetter.decode(message.data)
    print(f"headrace dead: there is no letter {number}; headrace dead list shows them", file=sys.stderr)
    return None


async def _show(bus: NatsBus, number: int) -> int:
    letter = await _find(bus, number)
    if letter is None:
        return 1
    try:
        held: object = Envelope.decode(letter.input).model_dump(mode="json")
    except CodecError as error:
        held = {"undecodable": str(error), "bytes": letter.input.hex()}
    print(json.dumps(_row(number, letter) | {"input": held}, indent=1))
    return 0


async def _replay(bus: NatsBus, number: int) -> int:
    letter = await _find(bus, number)
    if letter is None:
        return 1
    dead = Envelope.decode(letter.input)
    again = renewed(dead, bus.clock.now_us())
    data = again.encode()
    await ownership.write(bus, await _owned(bus, dead, again))
    # What comes after the rails needs its guard published with it, as the rails stage would have done.
    if letter.stage != "rails" and again.rails.guards_output:
        await bus.publish_confirmed(subjects.work("guard"), data, f"{again.request}:guard")
    await bus.publish_confirmed(again.next_subject, data, f"{again.request}:{again.slip[0]}")
    print(again.request)
    return 0


def renewed(envelope: Envelope, now_us: int) -> Envelope:
    """The same request under a new id, as if it was asked now."""
    patience_us = envelope.deadline_us - envelope.timeline.start_us
    changes = {"request": subjects.new_request_id(), "deadline_us": now_us + patience_us, "timeline": Timeline(now_us)}
    return envelope.model_copy(update=changes)


async def _owned(bus: NatsBus, dead: Envelope, again: Envelope) -> Ownership:
    """Whose the new request is: the same tenant's, who may ask for it by its id. Nobody listens yet, so it is kept."""
    first = await ownership.read(bus, dead.request)
    return Ownership(
        request=again.request,
        tenant=again.tenant,
        model=again.model,
        kind="chat" if isinstance(again.input, ChatInput) else "completion",
        created_us=again.timeline.start_us,
        deadline_us=again.deadline_us,
        fingerprint=first.fingerprint if first else "",
        on_disconnect="keep",
        timings=first.timings if first else False,
    )
