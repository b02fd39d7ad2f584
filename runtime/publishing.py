"""One holder's voice on a request's subject: tokens as they come, and at the end the whole answer.

The logs are in memory and die with the broker. So a publisher remembers what it said: after a reconnect it says all of it again
at once, which readers compare and ignore, or fill their holes from. A finished answer is put on file before its terminal
event is published, since after that nobody is left who could say it again. That a repeated attempt said anything new is
noted on file too: whoever counts attempts that came to nothing needs it, and the log may be gone.
"""

from dataclasses import replace

import structlog

from runtime.bus import Bus, BusError
from schemas import events, subjects
from schemas.events import Terminal, Tokens

log = structlog.get_logger()


class Publisher:
    """Publishes one request's events on one subject under one epoch.

    said is what earlier attempts published, from index 0.
    """

    def __init__(self, bus: Bus, subject: str, epoch: int, said: Tokens | None = None) -> None:
        self._bus = bus
        self._subject = subject
        self._epoch = epoch
        self._said: list[Tokens] = [] if said is None else [said]
        self._noted = epoch == 1  # a first attempt is never counted against anybody
        self._forget = bus.on_reconnect(self._say_again)

    @property
    def index(self) -> int:
        """The index after the last token published."""
        return self._said[-1].end if self._said else 0

    def close(self) -> None:
        """Says nothing more; idempotent."""
        forget, self._forget = self._forget, _nothing
        forget()

    async def tokens(self, tokens: Tokens) -> None:
        """Publishes the part of the event that is new. Unconfirmed: readers see a hole, and the log or we fill it."""
        fresh = tokens.since(self.index)
        if not fresh.ids:
            return
        assert fresh.index == self.index, f"token {fresh.index} follows {self.index}"
        self._said.append(fresh)
        await self._bus.publish(self._subject, events.encode(replace(fresh, epoch=self._epoch)))
        if not self._noted:
            self._noted = True
            await self._bus.kv_note(subjects.PROGRESS_BUCKET, subjects.progress(self._subject), str(self._epoch).encode())

    async def end(self, terminal: Terminal) -> None:
        """Puts the answer on file, then publishes its terminal event; both confirmed.

        That the request has ended is noted before: it is known for longer than logs and files are kept.
        """
        if (request := subjects.replied(self._subject)) is not None:
            await self._bus.kv_note(subjects.PROGRESS_BUCKET, subjects.ended(request), b"")
        message_id = f"{self._subject}:end:{self._epoch}"
        for number, part in enumerate(events.encode_end(self._all(), terminal)):
            await self._bus.publish_confirmed(subjects.end(self._subject), part, f"{message_id}:file:{number}")
        await self._bus.publish_confirmed(self._subject, events.encode(terminal), message_id)

    async def _say_again(self) -> None:
        if not self.index:
            return
        try:
            for part in events.in_parts(self._all()):
                await self._bus.publish(self._subject, events.encode(part))
        except BusError as error:
            log.debug("not_said_again", subject=self._subject, error=str(error))  # the next reconnect will

    def _all(self) -> Tokens:
        return events.joined(self._epoch, self._said)


def _nothing() -> None:
    """What a closed publisher forgets."""
