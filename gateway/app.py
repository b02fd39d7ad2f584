"""The gateway as a process: routes, the listener, and the way it stops.

It stops in this order: /readyz says no, and each answer closes its connection; a listener that a supervisor keeps is
left to the successor; running streams finish, drain_s at most; new requests are refused, and streams that remain end
with shutting_down; the listener closes; the bus is closed by whoever opened it (runtime/lifecycle.py).
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import openai_api, requests_api
from gateway.admission import Door
from gateway.listener import StartError, inherit, listen
from gateway.responses import Endpoint, JsonResponse, guarded, on_http_exception
from gateway.websocket_api import FRAME_BYTES_MAX, websocket
from runtime import lifecycle
from runtime.bus import Bus
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from schemas.limits import PAYLOAD_BYTES_MAX
from schemas.subjects import Stage

log = structlog.get_logger()

PLAYGROUND = Path(__file__).parent / "playground" / "index.html"
CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
CLOSE_S = 3  # for connections that are still open once every stream has ended

OnReady = Callable[[str], None]


def create_app(settings: Settings, bus: Bus) -> Starlette:
    """The gateway's routes over a connected bus; its Door is app.state.door. Call it inside a running loop."""
    door = Door(settings, bus)
    page = PLAYGROUND.read_bytes()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await door.open()
        yield

    async def playground(_: Request) -> Response:
        headers = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}
        return Response(page, headers=headers, media_type="text/html")

    app = Starlette(
        routes=[
            Route("/", guarded("/", playground), methods=["GET"]),
            _route("GET", "/", playground),
            _route("POST", "/v1/chat/completions", openai_api.chat_completions),
            _route("POST", "/v1/completions", openai_api.completions),
            _route("GET", "/v1/models", openai_api.models),
            Route("/v1/requests/{request}", guarded("/v1/requests/{request}", _request), methods=["GET", "DELETE"]),
            _route("GET", "/v1/requests/{request}/events", requests_api.events),
            _route("GET", "/healthz", _healthz),
            _route("GET", "/readyz", _readyz),
            _route("GET", "/metrics", _metrics),
            WebSocketRoute("/v1/ws", websocket),
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.door = door
    return app


def _route(method: str, path: str, endpoint: Endpoint) -> Route:
    return Route(path, guarded(path, endpoint), methods=[method])


async def _request(request: Request) -> Response:
    """One path, two methods: a wrong one must learn of both."""
    return await (requests_api.cancel(request) if request.method == "DELETE" else requests_api.show(request))


async def _healthz(_: Request) -> Response:
    """Live: this loop runs."""
    return JsonResponse({"status": "live"})


async def _readyz(request: Request) -> Response:
    """Ready: every stage that a plain request needs by the server's policy has a worker; else the reasons."""
    door: Door = request.app.state.door
    missing = door.fleet.missing(_stages_needed(door.settings))
    reasons = {str(stage): reason for stage, reason in missing.items()}
    if not door.bus.connected:
        reasons["broker"] = "the message broker does not answer"
    if door.draining:
        reasons["gateway"] = "it stops"
    body = {"ready": not reasons, "missing": list(reasons), "reasons": reasons}
    return JsonResponse(body, 503 if reasons else 200)


def _stages_needed(settings: Settings) -> tuple[Stage, ...]:
    output = any(action != "off" for action in settings.rails_output.values())
    rails = output or any(action != "off" for action in settings.rails_input.values())
    needed: dict[Stage, bool] = {"rails": rails, "engine": True, "guard": output}
    return tuple(stage for stage, wanted in needed.items() if wanted)


async def _metrics(request: Request) -> Response:
    door: Door = request.app.state.door
    return Response(door.metrics.text(), media_type="text/plain; version=0.0.4")


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process's life is runtime/lifecycle.py's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def check_broker(bus: Bus) -> None:
    """StartError when the broker takes less than what a request may need."""
    if bus.payload_bytes_max < PAYLOAD_BYTES_MAX:
        raise StartError(
            f"the broker takes messages of {bus.payload_bytes_max} bytes at most, and a request may need "
            f"{PAYLOAD_BYTES_MAX}; set max_payload: {PAYLOAD_BYTES_MAX} in the broker's configuration",
            2,
        )


async def serve(settings: Settings, bus: NatsBus, stop: asyncio.Event, on_ready: OnReady | None = None) -> None:
    """Serves until stop is set, then drains; on_ready gets the URL once requests are answered. StartError."""
    check_broker(bus)
    listener = listen(settings.host, settings.port) if settings.listen_fd is None else inherit(settings.listen_fd)
    app = create_app(settings, bus)
    door: Door = app.state.door
    await door.open()
    if settings.listen_fd is not None:  # clients may be waiting for us
        await door.fleet.settle(_stages_needed(settings))
    server = _Server(_config(_CloseWhileDraining(app, door)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = (f"[{settings.host}]" if ":" in settings.host else settings.host), listener.getsockname()[1]
    url = f"http://{host}:{port}"
    log.info("ready", url=url)
    if on_ready is not None:
        on_ready(url)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if settings.listen_fd is not None:
        for accepting in server.servers:
            accepting.close()
    await door.drain(settings.drain_s)
    server.should_exit = True
    await serving
    await door.fleet.close()


class _CloseWhileDraining:
    """Tells HTTP clients of a gateway that stops to come back on a new connection."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and self._door.draining:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, tell)


def _not_the_clients(record: logging.LogRecord) -> bool:
    """False for what any client can make the server say with a traceback: text that is no UTF-8, which it is told of."""
    return not record.getMessage().startswith("Invalid UTF-8")


def _config(app: ASGIApp) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").addFilter(_not_the_clients)
    return uvicorn.Config(
        app,
        http="httptools",
        ws="websockets-sansio",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        ws_max_size=2 * FRAME_BYTES_MAX,  # beyond FRAME_BYTES_MAX a frame is refused by name, beyond this the socket closes
        ws_per_message_deflate=False,  # one token a frame: nothing to compress, and it costs more than all else
        timeout_graceful_shutdown=CLOSE_S,
        backlog=2048,
    )


def run(settings: Settings, on_ready: OnReady | None = None) -> int:
    """The whole gateway process; returns its exit status, having printed one line if it could not start."""

    async def serve_ready(settings: Settings, bus: NatsBus, stop: asyncio.Event) -> None:
        await serve(settings, bus, stop, on_ready)

    try:
        _check_listener(settings)  # before the broker is waited for
        return lifecycle.run("gateway", settings, serve_ready)
    except StartError as error:
        print(f"headrace gateway: {error}", file=sys.stderr)
        return error.status


def _check_listener(settings: Settings) -> None:
    if settings.listen_fd is None:
        listen(settings.host, settings.port).close()
    else:
        inherit(settings.listen_fd).detach()
