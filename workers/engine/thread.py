"""The engine on a thread of its own: commands go in from the event loop, outputs come back to it once a step.

The event loop keeps leases and the broker alive while torch computes; torch never waits for the network.

Each stream is one attempt at a request, and the engine knows it by a name of its own: what a step still brings an attempt that
was dropped meanwhile finds no stream, and never the next attempt's.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import structlog

from schemas.errors import HeadraceError
from workers.engine.engine import Engine, GenerationRequest, Output
from workers.engine.scheduler import SchedulerStatistics

log = structlog.get_logger()


class Stream(asyncio.Queue[Output | HeadraceError]):
    """One attempt's outputs; name is what the engine calls it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


FROZEN_S = 15.0  # running work and no step for this long: the engine is not ready, and its work moves


class EngineThread:
    """Owns an Engine. All methods are called from the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._streams: dict[str, Stream] = {}  # by name
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stepped_s = time.monotonic()
        self._statistics = engine.statistics()

    def start(self) -> None:
        """Starts stepping."""
        self._thread.start()

    def add(self, request: GenerationRequest) -> Stream:
        """Queues a request; its outputs come on the stream, the last one with finish or failure set, or an error."""
        stream = Stream(f"{request.request}#{next(self._numbers)}")
        self._streams[stream.name] = stream
        self._command(lambda: self._add(replace(request, request=stream.name)))
        return stream

    def drop(self, stream: Stream) -> None:
        """Ends a stream; the engine forgets its attempt before its next step."""
        if self._streams.pop(stream.name, None) is not None:
            self._command(lambda: self._cancel(stream.name))

    @property
    def statistics(self) -> SchedulerStatistics:
        """As of the last step."""
        return self._statistics

    @property
    def frozen(self) -> bool:
        """Whether there is work and no step has ended for FROZEN_S."""
        return bool(self._streams) and time.monotonic() - self._stepped_s > FROZEN_S

    async def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, 10.0)

    def _command(self, command: Callable[[], None]) -> None:
        if len(self._streams) == 1:
            self._stepped_s = time.monotonic()  # an idle engine is not a frozen one
        self._commands.append(command)
        self._wake.set()

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            while self._commands:
                self._commands.popleft()()
            if self._engine.idle:
                self._statistics = self._engine.statistics()
                self._wake.wait()
                continue
            self._step()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:  # a fault of the runner or a bug of ours: the thread lives on, the requests go elsewhere
            log.exception("engine_fault")
            fault = HeadraceError("internal", "the engine failed in a step")
            lost = self._engine.drain_all()
            self._loop.call_soon_threadsafe(self._deliver_fault, lost, fault)
            return
        self._stepped_s = time.monotonic()
        self._statistics = self._engine.statistics()
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _add(self, request: GenerationRequest) -> None:
        try:
            self._engine.add(request)
        except HeadraceError as error:
            self._loop.call_soon_threadsafe(self._deliver_fault, [request.request], error)
        except Exception:  # a bug of ours costs this request, not the thread
            log.exception("admission_fault")
            fault = HeadraceError("internal", "the engine failed to take the request")
            self._loop.call_soon_threadsafe(self._deliver_fault, [request.request], fault)

    def _cancel(self, name: str) -> None:
        self._engine.cancel(name)

    # And this on the event loop again.

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request)
            if stream is None:
                continue
            stream.put_nowait(output)
            if output.finish is not None or output.failure is not None:
                del self._streams[output.request]

    def _deliver_fault(self, names: list[str], error: HeadraceError) -> None:
        for name in names:
            stream = self._streams.pop(name, None)
            if stream is not None:
                stream.put_nowait(error)
