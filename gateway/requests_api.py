"""GET /v1/requests/{id}, its events, and DELETE: any request that is known here or that the log holds, for its owner
alone.

Events are the WebSocket's frames as server-sent events: replayed from the log from token index `from` (or after Last-
Event-ID), then followed.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway import last_event
from gateway.admission import Door, no_broker
from gateway.answer import Answer, Piece
from gateway.auth import Principal, authenticate
from gateway.chunks import KEEPALIVE, error_body, timings_body, usage_body
from gateway.openai_api import failure, watch_client
from gateway.responses import EventStream, JsonResponse
from gateway.resume import Record, Snapshot, locate, lost, snapshot, state_of
from gateway.socket_frames import FrameWriter, error_frame
from runtime.bus import BusUnavailable
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Tokens


async def show(request: Request) -> Response:
    """GET /v1/requests/{id}: state, counts, and timings once it has ended."""
    record, seen = await _known(request)
    return JsonResponse(_state_body(record, seen))


async def _known(request: Request) -> tuple[Record, Snapshot]:
    """The request of this path as its owner may know it; HeadraceError not_found, or replay_expired when it is over."""
    door: Door = request.app.state.door
    principal, name = authenticate(request.headers), request.path_params["request"]
    door.refuse_without_broker()
    try:
        record = await locate(door.bus, door.registry, principal, name)
        seen = await snapshot(door.bus, name)
    except BusUnavailable as error:
        raise no_broker(error) from error
    if seen.empty and record.terminal is None and lost(record, seen, door.bus.clock.now_us()):
        raise HeadraceError("replay_expired", f"the log no longer holds request {name}")
    return record, seen


def _state_body(record: Record, seen: Snapshot) -> dict[str, Any]:
    terminal = record.terminal or seen.terminal
    body: dict[str, Any] = {
        "id": record.request,
        "object": "headrace.request",
        "status": state_of(record, seen),
        "model": record.ownership.model,
        "created": record.ownership.created_us // 1_000_000,
        "tokens": max(seen.end, terminal.index if terminal else 0),
        "finish_reason": terminal.reason if isinstance(terminal, Finished) else None,
        "usage": usage_body(terminal.usage) if terminal and terminal.usage else None,
        "error": None,
        "timings": timings_body(terminal.timeline) if terminal else None,
    }
    if isinstance(terminal, Failed):
        body |= error_body(HeadraceError(terminal.code, terminal.message, terminal.param))
    return body


async def cancel(request: Request) -> Response:
    """DELETE /v1/requests/{id}: stops it everywhere; a request that has ended stays as it is."""
    door: Door = request.app.state.door
    record, seen = await _known(request)
    if record.terminal is None and seen.terminal is None:
        seen = replace(seen, terminal=await (await door.cancel(record)))
    return JsonResponse(_state_body(record, seen))


async def events(request: Request) -> Response:
    """GET /v1/requests/{id}/events?from=N."""
    door: Door = request.app.state.door
    principal: Principal = authenticate(request.headers)
    name = request.path_params["request"]
    answer = await door.resume(principal, name, _start(request, name))
    request.state.request_id = name
    watch = watch_client(request.receive, answer)

    async def close() -> None:
        watch.cancel()
        await answer.close()

    try:
        first = await answer.next(door.settings.keepalive_s)
    except BaseException:
        await close()
        raise
    if first and isinstance(first[0], Failed) and answer.follow.ended_here:
        await close()
        return failure(answer, first[0])
    fault = error_frame(HeadraceError("internal", "the gateway failed in the middle"), None, name)
    frames = _frames(answer, first, door.settings.keepalive_s)
    return EventStream(frames, f"data: {fault}\n\n".encode(), close, answer.too_slow)


def _start(request: Request, name: str) -> int:
    """The first token wanted: `from`, or what Last-Event-ID says, or 0."""
    last = request.headers.get(last_event.HEADER)
    if last:
        return last_event.token_index(last.removeprefix(f"{name}:"), last_event.HEADER)
    return last_event.token_index(request.query_params.get("from", "0"), "from")


async def _frames(answer: Answer, first: list[Piece], keepalive_s: float) -> AsyncIterator[bytes]:
    writer = FrameWriter(answer.request, None, answer.record.ownership.timings)
    pieces = first
    while True:
        parts = [] if pieces else [KEEPALIVE]
        for piece in pieces:
            end = piece.end if isinstance(piece, Tokens) else piece.index
            text = writer.piece(piece)
            if text:
                parts.append(f"id: {answer.request}:{end}\ndata: {text}\n\n".encode())
            if not isinstance(piece, Tokens):
                yield b"".join(parts)
                return
        if parts:
            yield b"".join(parts)
        pieces = await answer.next(keepalive_s)
