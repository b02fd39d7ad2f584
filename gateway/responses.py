"""HTTP answers that are not OpenAI's: errors in OpenAI's shape, the event stream, and the guard around every route.

Every route goes through guarded(): a typed error becomes its status, anything else is ours: logged, and answered 500.
"""

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.admission import Door
from gateway.chunks import error_body
from schemas import limits
from schemas.errors import HeadraceError
from schemas.subjects import new_request_id

log = structlog.get_logger()

RETRIED = (429, 503)  # statuses that carry Retry-After
AS_OFTEN_AS_PAYS = ("deadline_exceeded", "attempts_exhausted")  # a client's blind retry would only spend as much again

Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """A JSON body."""

    def __init__(self, body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(json.dumps(body).encode(), status, headers, "application/json")


class ErrorResponse(JsonResponse):
    """A typed error; the guard adds Retry-After. OpenAI's clients ask 408, 409 and 5xx again unless x-should-retry says no."""

    def __init__(self, error: HeadraceError, part: dict[str, Any]) -> None:
        super().__init__(error_body(error) | part, error.meaning.status)
        self.code = error.code
        if not error.meaning.retryable or error.code in AS_OFTEN_AS_PAYS:
            self.headers["x-should-retry"] = "false"


def error_response(error: HeadraceError, part: dict[str, Any] | None = None) -> ErrorResponse:
    """A typed error as an HTTP answer; part is our `headrace` part, if there is any."""
    return ErrorResponse(error, part or {})


class EventStream(Response):
    """Server-sent events, sent as they come. close is awaited however the stream ends.

    fault is what a client gets when we fail in the middle: no stream ends silently. too_slow is called when the client
    takes nothing for SLOW_READER_S; parts then says so and ends, and the client has GIVEN_UP_S to read on.
    """

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        fault: bytes,
        close: Callable[[], Awaitable[None]],
        too_slow: Callable[[], None],
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._parts = parts
        self._fault = fault
        self._close = close
        self._too_slow = too_slow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers, every part, and the end."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self._parts_or_fault():
                await self._deliver(send, {"type": "http.response.body", "body": part, "more_body": True})
            await self._deliver(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client is gone, or reads nothing; whoever watches it has cancelled the request
            log.debug("stream_unsent")
        finally:
            await self._close()

    async def _deliver(self, send: Send, message: Message) -> None:
        """Waits for room in the client's bounded buffer, not for ever: TimeoutError, which is an OSError."""
        try:
            async with asyncio.timeout(limits.SLOW_READER_S):
                await send(message)
                return
        except TimeoutError:
            self._too_slow()
        async with asyncio.timeout(limits.GIVEN_UP_S):
            await send(message)

    async def _parts_or_fault(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._parts:
                yield part
        except Exception:
            log.error("unexpected", request=self.headers.get("x-request-id"), error=traceback.format_exc())
            yield self._fault


def request_id(request: Request) -> str:
    """The id that this call's request gets if it is accepted; X-Request-Id of every answer."""
    found: str = request.state.request_id
    return found


def guarded(route: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint with its errors typed, its status counted, and X-Request-Id on its answer."""

    async def call(request: Request) -> Response:
        request.state.request_id = new_request_id()
        response = await _answered(endpoint, request)
        response.headers.setdefault("X-Request-Id", request_id(request))
        door: Door = request.app.state.door
        if isinstance(response, ErrorResponse) and response.status_code in RETRIED:
            response.headers["Retry-After"] = str(door.retry_after_s(response.code))
        door.metrics.requests.labels(route, str(response.status_code)).inc()
        return response

    return call


async def _answered(endpoint: Endpoint, request: Request) -> Response:
    try:
        return await endpoint(request)
    except HeadraceError as error:
        return error_response(error)
    except ClientDisconnect:
        return error_response(HeadraceError("cancelled", "the client went away"))
    except Exception:
        log.error("unexpected", request=request_id(request), path=request.url.path, error=traceback.format_exc())
        return error_response(HeadraceError("internal", "the gateway failed; the request's id leads to its log line"))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses (404, 405), in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed here; allowed: {allowed}"
        response = error_response(HeadraceError("method_not_allowed", message))
        response.headers["Allow"] = allowed
        return response
    return error_response(HeadraceError("not_found", f"there is nothing at {request.url.path[:200]}"))
