"""/v1/ws: several requests at once on one socket. Frames are in schemas/frames.py.

One task reads the socket, one task writes each answer; they share only the table of names. A socket that reads slowly
holds up its own writers alone, and their queues are bounded; one that takes nothing for SLOW_READER_S loses its
requests (slow_reader), and GIVEN_UP_S later the connection. When the socket closes, each of its requests loses its
client.
"""

import asyncio
import traceback

import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.admission import Call, Door
from gateway.answer import Answer
from gateway.auth import Principal, authenticate
from gateway.bodies import loads, too_large
from gateway.openai_api import MODELS
from gateway.socket_frames import FrameWriter, error_frame
from schemas import limits
from schemas.errors import HeadraceError
from schemas.events import Tokens
from schemas.frames import Accepted, Cancel, Ping, Pong, Resume, Start, parse_frame
from schemas.limits import BODY_BYTES_MAX, SOCKET_REQUESTS_MAX
from schemas.requests import checked_idempotency_key, parse
from schemas.subjects import new_request_id

log = structlog.get_logger()

FRAME_BYTES_MAX = BODY_BYTES_MAX + 4096  # a start frame is a body and its wrapping
QUIET_S = 60.0  # the protocol's own pings keep the socket alive; nothing is sent in a silence


async def websocket(socket: WebSocket) -> None:
    """GET /v1/ws."""
    try:
        principal = authenticate(socket.headers)
    except HeadraceError as error:
        await socket.close(error.meaning.close, error.code)
        return
    await socket.accept()
    await Desk(socket, socket.app.state.door, principal).serve()


class Desk:
    """One socket and its requests, by the client's own names for them."""

    def __init__(self, socket: WebSocket, door: Door, principal: Principal) -> None:
        self._socket = socket
        self._door = door
        self._principal = principal
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, Answer] = {}
        self._cancelled: set[str] = set()  # names that were cancelled before they were admitted
        self._gone = False
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the client takes nothing

    async def serve(self) -> None:
        """Until the socket closes, or is given up; then every request of it has lost its client."""
        reading = asyncio.create_task(self._read(), name="socket-read")
        try:
            await asyncio.wait({reading, self._given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._gone = True
            for answer in self._answers.values():
                answer.disconnected()
            reading.cancel()
            await asyncio.wait({reading, *self._tasks.values()})
            if not reading.cancelled():
                reading.result()

    async def _read(self) -> None:
        try:
            while (message := await self._socket.receive())["type"] != "websocket.disconnect":
                await self._on_text(message.get("text"))
        except WebSocketDisconnect:
            log.debug("socket_unsent")

    async def _on_text(self, text: str | None) -> None:
        """One frame; what is wrong with it is told, and the socket goes on."""
        name: str | None = None
        try:
            if text is None:
                raise HeadraceError("malformed_request", "frames are text")
            if (size := len(text.encode(errors="surrogatepass"))) > FRAME_BYTES_MAX:
                raise too_large(size)
            value = loads(text)
            name = _name_in(value)
            await self._on_frame(parse_frame(value))
        except HeadraceError as error:
            # A refused frame must not look like the end of the request that has this name.
            await self._send(error_frame(error, None if name in self._tasks else name))

    async def _on_frame(self, frame: Start | Cancel | Resume | Ping) -> None:
        match frame:
            case Ping():
                await self._send(Pong().encode())
            case Cancel():
                await self._cancel(frame.id)
            case Start() | Resume():
                self._begin(frame)

    def _begin(self, frame: Start | Resume) -> None:
        if frame.id in self._tasks:
            raise HeadraceError("invalid_value", f"id: {frame.id!r} is in use on this socket", "id")
        if self._door.draining:
            raise HeadraceError("shutting_down", "the gateway stops; connect anew")
        if len(self._tasks) >= SOCKET_REQUESTS_MAX:
            raise HeadraceError("overloaded", f"a socket carries {SOCKET_REQUESTS_MAX} requests at once")
        self._tasks[frame.id] = asyncio.create_task(self._run(frame), name=f"socket-{frame.id}")

    async def _cancel(self, name: str) -> None:
        if name not in self._tasks:
            raise HeadraceError("not_found", f"id: no request {name!r} runs on this socket", "id")
        answer = self._answers.get(name)
        if answer is None:
            self._cancelled.add(name)
        else:
            await self._door.cancel(answer.record)

    async def _run(self, frame: Start | Resume) -> None:
        """One request from its frame to its last frame."""
        try:
            answer = await self._open(frame)
            try:
                await self._pump(frame.id, answer)
            finally:
                await answer.close()
        except HeadraceError as error:
            await self._send(error_frame(error, frame.id))
        except Exception:
            log.error("unexpected", path="/v1/ws", error=traceback.format_exc())
            await self._send(error_frame(HeadraceError("internal", "the gateway failed"), frame.id))
        finally:
            self._tasks.pop(frame.id, None)
            self._answers.pop(frame.id, None)
            self._cancelled.discard(frame.id)

    async def _open(self, frame: Start | Resume) -> Answer:
        if isinstance(frame, Resume):
            return await self._door.resume(self._principal, frame.request, frame.start)
        arrived_us = self._door.bus.clock.now_us()
        key = frame.idempotency_key
        if key is not None:
            key = checked_idempotency_key(key, "idempotency_key")
        asked = parse(MODELS[frame.kind], frame.body)
        return await self._door.admit(Call(asked, frame.kind, self._principal, new_request_id(), arrived_us, key))

    async def _pump(self, name: str, answer: Answer) -> None:
        self._answers[name] = answer
        if self._gone:
            answer.disconnected()
        elif name in self._cancelled:
            await self._door.cancel(answer.record)
        await self._send(Accepted(id=name, request=answer.request).encode())
        writer = FrameWriter(answer.request, name, answer.record.ownership.timings)
        while True:
            for piece in await answer.next(QUIET_S):
                text = writer.piece(piece)
                if text:
                    await self._send(text)
                if not isinstance(piece, Tokens):
                    return

    async def _send(self, text: str) -> None:
        if self._gone:
            return
        try:
            await self._deliver(text)
        except TimeoutError:
            self._give_up()
        except (OSError, RuntimeError, WebSocketDisconnect):  # closed while we wrote; the reading task finds out
            log.debug("frame_unsent")

    async def _deliver(self, text: str) -> None:
        """Waits for room in the client's bounded buffer, not for ever: TimeoutError."""
        message = {"type": "websocket.send", "text": text}
        try:
            async with asyncio.timeout(limits.SLOW_READER_S):
                await self._socket.send(message)
                return
        except TimeoutError:
            for answer in self._answers.values():
                answer.too_slow()
        async with asyncio.timeout(limits.GIVEN_UP_S):
            await self._socket.send(message)

    def _give_up(self) -> None:
        self._gone = True
        if not self._given_up.done():
            self._given_up.set_result(None)


def _name_in(value: object) -> str | None:
    """The client's name for its request, if a frame that is wrong otherwise has one."""
    name = value.get("id") if isinstance(value, dict) else None
    return name if isinstance(name, str) and len(name) <= 128 else None
