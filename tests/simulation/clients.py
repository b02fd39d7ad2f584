"""A client as a careful program would be: it resumes where it was when its gateway dies or tells it to, and tries again
what was refused for a reason that passes. It keeps all that it saw.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.errors import HeadraceError
from schemas.events import Failed, Terminal, Tokens
from tests.simulation.plan import Ask
from tests.simulation.processes import PRINCIPAL, Gateway, Gone, Pipe, Taken, call_for

RETRY_S = 0.5
TRIES_MAX = 400
PASSING = ("stage_unavailable", "overloaded", "shutting_down")
RESUME_ON = ("shutting_down", "slow_reader")


@dataclass(slots=True)
class Seen:
    """What one connection told: epochs and tokens in order."""

    start: int
    tokens: list[Tokens] = field(default_factory=list)


class Client:
    """One request of one client. Its outcome is terminal (the end it was told), refused, or neither: it left, or lost track."""

    def __init__(self, ask: Ask, gateways: Callable[[], Gateway], rng: random.Random, now_us: Callable[[], int]) -> None:
        self.ask = ask
        self.request: str | None = None
        self.tried: list[str] = []  # ids under which it asked
        self.asked_us = 0  # from here the gateway counts
        self.taken_us = 0
        self.seen: list[Seen] = []
        self.texts: list[str] = []
        self.terminals: list[Terminal] = []
        self.after_end: list[object] = []
        self.refused: HeadraceError | None = None
        self.refusals: list[HeadraceError] = []
        self.cancelled = False
        self.left = False
        self.ended_us = 0
        self._gateways = gateways
        self._gateway: Gateway | None = None
        self._pipe: Pipe | None = None
        self._rng = rng
        self._now_us = now_us

    async def run(self) -> None:
        """Asks, and reads until the end."""
        await asyncio.sleep(self.ask.at_s)
        for _ in range(TRIES_MAX):
            pipe = self._connect()
            try:
                if await self._read(pipe):
                    break
            except Gone:
                if self.request is None and self.ask.key is None:
                    break  # whether it was taken in is not known, and asking again could be asking twice
            if self.left:
                break
            await asyncio.sleep(RETRY_S * (0.5 + self._rng.random()))
        self.ended_us = self._now_us()

    def _connect(self) -> Pipe:
        gateway, self._gateway = self._gateways(), None
        self._gateway = gateway
        self.seen.append(Seen(len(self.texts)))
        if self.request is not None:
            request, start = self.request, len(self.texts)
            pipe = gateway.session(lambda door: door.resume(PRINCIPAL, request, start))
        else:
            request = f"{self._rng.getrandbits(128):032x}"
            self.tried.append(request)
            if self.ask.key is None or len(self.tried) == 1:
                self.asked_us = self._now_us()
            call = call_for(self.ask, request, self._now_us())
            pipe = gateway.session(lambda door: door.admit(call))
        self._pipe = pipe
        return pipe

    async def _read(self, pipe: Pipe) -> bool:
        """Reads one connection; True when there is nothing more to ask for."""
        while True:
            told = await pipe.read()
            if self.left:
                return True
            match told:
                case Taken(request):
                    self._take(request)
                case HeadraceError():
                    return self._refuse(told)
                case Tokens():
                    self.seen[-1].tokens.append(told)
                    self.texts += told.texts
                    if self.ask.slow_s:
                        await asyncio.sleep(self.ask.slow_s)
                case Failed(code=code) if code in RESUME_ON:
                    return False
                case _:
                    self.terminals.append(told)
                    return True

    def _take(self, request: str) -> None:
        if self.request is None:
            self.request, self.taken_us = request, self._now_us()
            if self.ask.going != "reads":
                asyncio.get_running_loop().call_later(self.ask.after_s, self._go)

    def _refuse(self, error: HeadraceError) -> bool:
        self.refusals.append(error)
        if error.code in PASSING:
            return False
        self.refused = error
        return True

    def _go(self) -> None:
        """Cancels, or leaves."""
        if self.terminals or self._gateway is None or self.request is None:
            return
        if self.ask.going == "cancels":
            self.cancelled = True
            self._gateway.cancel(self.request)
        else:
            self.left = True
            if self._pipe is not None:
                self._pipe.left.set()
