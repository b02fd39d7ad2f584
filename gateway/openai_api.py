"""POST /v1/chat/completions and /v1/completions, GET /v1/models: OpenAI's shapes over an Answer.

The status line waits for the first piece, keepalive_s at most: a request that fails before its first token gets a
proper HTTP status. After that the stream is open, a silence is bridged by comments, and an error comes in band. A
client that goes away is noticed in both modes.

A call that repeats an earlier one gets the earlier one's answer: with the same Idempotency-Key from its beginning, with
Last-Event-ID from where its stream broke off.
"""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from gateway import last_event
from gateway.admission import Call, Door
from gateway.answer import Answer, Piece
from gateway.auth import authenticate
from gateway.bodies import loads, read_body
from gateway.chunks import KEEPALIVE, Chunks, headrace_part, whole_body
from gateway.ownership import Kind
from gateway.responses import EventStream, JsonResponse, error_response, request_id
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Logprob, Tokens
from schemas.requests import ChatCompletionRequest, CompletionRequest, checked_idempotency_key, parse

KEY = "Idempotency-Key"

Asked = ChatCompletionRequest | CompletionRequest

MODELS: dict[Kind, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "chat": ChatCompletionRequest,
    "completion": CompletionRequest,
}


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _complete(request, "chat")


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await _complete(request, "completion")


async def models(request: Request) -> Response:
    """GET /v1/models: what live engines serve."""
    authenticate(request.headers)
    door: Door = request.app.state.door
    cards = [
        {
            "id": card.id,
            "object": "model",
            "created": 0,
            "owned_by": "headrace",
            "max_model_len": card.context_tokens,
            "precision": card.precision,
        }
        for card in door.fleet.models()
    ]
    return JsonResponse({"object": "list", "data": cards})


async def _complete(request: Request, kind: Kind) -> Response:
    door: Door = request.app.state.door
    arrived_us = door.bus.clock.now_us()
    principal = authenticate(request.headers)
    body = await read_body(request.stream(), request.headers.get("content-length"))
    asked: Asked = parse(MODELS[kind], loads(body))
    call = Call(asked, kind, principal, request_id(request), arrived_us, _key(request))
    last = request.headers.get(last_event.HEADER)
    answer = await (door.admit(call) if last is None else _resume(door, call, last))
    request.state.request_id = answer.request
    watch = watch_client(request.receive, answer)
    try:
        if asked.stream:
            return await _streamed(door, asked, answer, watch)
        return await _whole(answer)
    finally:
        if not asked.stream:
            watch.cancel()
            await answer.close()


def _key(request: Request) -> str | None:
    keys = request.headers.getlist(KEY)
    if len(keys) > 1:
        raise HeadraceError("invalid_value", f"{KEY}: it is there {len(keys)} times", KEY)
    return checked_idempotency_key(keys[0], KEY) if keys else None


async def _resume(door: Door, call: Call, last: str) -> Answer:
    """The rest of the stream that this call's body began."""
    if not call.asked.stream:
        raise HeadraceError("invalid_value", f"{last_event.HEADER}: only a stream has events; set stream to true", "stream")
    request, start = last_event.parse(last)
    return await door.resume(call.principal, request, start, call.fingerprint)


def watch_client(receive: Receive, answer: Answer) -> asyncio.Task[None]:
    """Notices that the client goes away, and tells the answer."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.disconnected()

    return asyncio.create_task(watch(), name="watch-client")


async def _whole(answer: Answer) -> Response:
    texts: list[str] = []
    logprobs: list[Logprob | None] = []
    while True:
        for piece in await answer.next(60.0):
            if isinstance(piece, Tokens):
                texts += piece.texts
                logprobs += piece.logprobs
            elif isinstance(piece, Finished):
                return JsonResponse(whole_body(answer.record.ownership, "".join(texts), piece, logprobs))
            else:
                return failure(answer, piece)


def failure(answer: Answer, failed: Failed) -> Response:
    """An end without an answer, before anything was sent."""
    error = HeadraceError(failed.code, failed.message, failed.param)
    return error_response(error, headrace_part(answer.request, failed, answer.record.ownership.timings))


async def _streamed(door: Door, asked: Asked, answer: Answer, watch: asyncio.Task[None]) -> Response:
    async def close() -> None:
        watch.cancel()
        await answer.close()

    keepalive_s = door.settings.keepalive_s
    try:
        first = await answer.next(keepalive_s)
    except BaseException:
        await close()
        raise
    resumed = answer.start > 0
    if first and isinstance(first[0], Failed) and (answer.follow.ended_here or not resumed):
        await close()
        return failure(answer, first[0])
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    chunks = Chunks(answer.record.ownership, include_usage)
    events = _events(answer, chunks, first, b"" if resumed else chunks.opening(), keepalive_s)
    return EventStream(events, chunks.fault(), close, answer.too_slow)


async def _events(
    answer: Answer, chunks: Chunks, first: list[Piece], opening: bytes, keepalive_s: float
) -> AsyncIterator[bytes]:
    """SSE bytes: what came together goes out together."""
    pieces = first
    while True:
        parts = [opening] if pieces else [opening, KEEPALIVE]
        opening = b""
        for piece in pieces:
            if isinstance(piece, Tokens):
                parts.append(chunks.tokens(piece))
            else:
                parts.append(chunks.ending(piece) if isinstance(piece, Finished) else chunks.error(piece))
                yield b"".join(parts)
                return
        part = b"".join(parts)
        if part:
            yield part
        pieces = await answer.next(keepalive_s)
