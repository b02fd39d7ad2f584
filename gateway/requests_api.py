"""GET /v1/requests/{id}, its events, and DELETE: any request that is known here or that the log holds, for its owner
alone.

Events are the WebSocket's frames as server-sent events: replayed from the log from token index `from` (or after Last-
Event-ID), then followed.
"""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.admission import Door, no_broker
from gateway.answer import Answer, Piece
from gateway.auth import Principal, authenticate
from gateway.chunks import KEEPALIVE, error_body, timings_body, usage_body
from gateway.openai_api import failure, watch_client
from gateway.responses import EventStream, JsonResponse
from gateway.resume import Record, Snapshot, locate, not_found, snapshot, state_of
from gateway.socket_frames import FrameWriter, error_frame
from runtime.bus import BusUnavailable
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Tokens


async def show(request: Request) -> Response:
    """GET /v1/requests/{id}: state, counts, and timings once it has ended."""
    door: Door = request.app.state.door
    principal, name = authenticate(request.headers), request.path_params["request"]
    try:
        record = await locate(door.bus, door.registry, principal, name)
        seen = await snapshot(door.bus, name)
    except BusUnavailable as error:
        raise no_broker(error) from error
    return JsonResponse(_state_body(record, seen))


def _state_body(record: Record, seen: Snapshot) -> dict[str, Any]:
    terminal = record.terminal or seen.terminal
    body: dict[str, Any] = {
        "id": record.request,
        "object": "headrace.request",
        "status": state_of(record, seen),
        "model": record.model,
        "created": record.created_s if record.model else None,
        "tokens": max(seen.tokens, terminal.index if terminal else 0),
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
    principal, name = authenticate(request.headers), request.path_params["request"]
    record = door.registry.find(principal, name)
    if record is None:
        raise not_found(name)
    if record.terminal is None:
        await door.cancel(record)
    state = state_of(record, Snapshot(0, record.terminal))
    return JsonResponse({"id": name, "object": "headrace.request", "status": state})


async def events(request: Request) -> Response:
    """GET /v1/requests/{id}/events?from=N."""
    door: Door = request.app.state.door
    principal: Principal = authenticate(request.headers)
    name = request.path_params["request"]
    answer = await door.resume(principal, name, _start(request, name))
    watch = watch_client(request.receive, answer)

    async def close() -> None:
        watch.cancel()
        await answer.close()

    try:
        first = await answer.next(door.settings.keepalive_s)
    except BaseException:
        await close()
        raise
    if first and isinstance(first[0], Failed) and first[0].code == "replay_expired":
        await close()
        return failure(answer, first[0])
    fault = error_frame(HeadraceError("internal", "the gateway failed in the middle"), None, name)
    frames = _frames(answer, first, door.settings.keepalive_s)
    stream = EventStream(frames, f"data: {fault}\n\n".encode(), close)
    stream.headers["X-Request-Id"] = name
    return stream


def _start(request: Request, name: str) -> int:
    """The first token wanted: `from`, or what Last-Event-ID says, or 0."""
    last = request.headers.get("last-event-id", "")
    param = "Last-Event-ID" if last else "from"
    text = last.removeprefix(f"{name}:") if last else request.query_params.get("from", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise HeadraceError("invalid_value", f"{param}: a token index is wanted, got {text[:64]!r}", param)
    return int(text)


async def _frames(answer: Answer, first: list[Piece], keepalive_s: float) -> AsyncIterator[bytes]:
    writer = FrameWriter(answer.request, None, answer.record.timings)
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
