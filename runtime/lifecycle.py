"""A process from its first line to its exit status: logs, signals, the bus, and a loud end when the bus is gone for good.

SIGTERM and SIGINT ask for a drain; a second one ends the process at once. Exit status: 0 drained, 1 failed, 2 misconfigured.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import structlog
import uvloop

from runtime import logs
from runtime.bus import BusError, BusUnavailable
from runtime.nats_bus import NatsBus
from runtime.patience import backoff_s
from runtime.settings import Settings

log = structlog.get_logger()

Serve = Callable[[Settings, NatsBus, asyncio.Event], Awaitable[None]]

CONNECT_PATIENCE_S = 30.0


def run(process: str, settings: Settings, serve: Serve) -> int:
    """Runs one process of the pipeline and returns its exit status."""
    logs.configure(settings.log_level, settings.log_format, process)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(process, settings, serve))
    except BusError as error:
        print(f"headrace {process}: {error}", file=sys.stderr)
        return 1


async def _run(process: str, settings: Settings, serve: Serve) -> int:
    stop = asyncio.Event()
    _listen_for_signals(stop)
    bus = await connect_patiently(settings.nats_url, process)
    serving = asyncio.create_task(_serve(serve, settings, bus, stop))
    gone = asyncio.create_task(bus.closed.wait())
    await asyncio.wait((serving, gone), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        log.error("bus_gone", what="the connection to NATS is closed for good")
        return 1
    gone.cancel()
    await bus.close()
    serving.result()
    return 0


async def _serve(serve: Serve, settings: Settings, bus: NatsBus, stop: asyncio.Event) -> None:
    await serve(settings, bus, stop)


async def connect_patiently(url: str, process: str) -> NatsBus:
    """Connects, waiting up to CONNECT_PATIENCE_S for a broker that is still starting; BusUnavailable after that."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + CONNECT_PATIENCE_S
    failures = 0
    while True:
        try:
            return await NatsBus.connect(url, process)
        except BusUnavailable:
            failures += 1
            if loop.time() > give_up:
                raise
            await asyncio.sleep(backoff_s(failures))


def _listen_for_signals(stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
