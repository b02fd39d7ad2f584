"""Each token once, in order: the rule by which every reader of a request's subject takes its events. Pure.

Readers are the gateway (hr.reply), the guard (hr.raw) and an engine that continues another's work (either log). Events may
come twice, late, from a holder that lost its lease, or not at all (a core publish can be dropped); the log has what was dropped.

    event                                   answer
    ─────                                   ──────
    anything after the end                  Ignore
    epoch below the highest seen            Ignore: its publisher lost its lease
    tokens or end beyond the next index     Hole: read the log, then offer the event again
    tokens that start before the next one   compared with what was delivered: Diverged, or the rest is Deliver (or Ignore)
    tokens at the next index                Deliver
    end below the next index                Diverged: fewer tokens than were delivered
    end at the next index                   End
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.bus import Message
from schemas import events
from schemas.codec import CodecError
from schemas.events import Event, Terminal, Tokens


@dataclass(frozen=True, slots=True)
class Deliver:
    """These tokens are new and next."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing new."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Tokens [index, ...) are missing before this event."""

    index: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """The event contradicts the token at index, which was delivered."""

    index: int


@dataclass(frozen=True, slots=True)
class End:
    """The terminal event, all tokens delivered."""

    terminal: Terminal


Answer = Deliver | Ignore | Hole | Diverged | End


@dataclass(slots=True)
class Sequencer:
    """The state of one reader. start is the first index that it wants: what lies before is neither delivered nor compared."""

    start: int = 0
    epoch: int = 0
    ended: bool = False
    ids: list[int | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def next_index(self) -> int:
        """The index of the next token to deliver."""
        return self.start + len(self.ids)

    def offer(self, event: Event) -> Answer:
        """What to do about one event; the state moves on only by Deliver and End."""
        if self.ended or event.epoch < self.epoch:
            return Ignore()
        if event.index > self.next_index:
            return Hole(self.next_index)
        if isinstance(event, Tokens):
            return self._take(event)
        if event.index < self.next_index and isinstance(event, events.Finished) and event.index >= self.start:
            return Diverged(event.index)
        self.epoch = event.epoch
        self.ended = True
        return End(event)

    def _take(self, tokens: Tokens) -> Answer:
        tokens = tokens.since(self.start)
        known = self.next_index - tokens.index
        for offset in range(min(known, len(tokens.ids))):
            at = tokens.index - self.start + offset
            if (tokens.ids[offset], tokens.texts[offset]) != (self.ids[at], self.texts[at]):
                return Diverged(tokens.index + offset)
        self.epoch = tokens.epoch
        fresh = tokens.since(self.next_index)
        if not fresh.ids:
            return Ignore()
        self.ids += fresh.ids
        self.texts += fresh.texts
        return Deliver(fresh)


@dataclass(frozen=True, slots=True)
class Before:
    """What earlier attempts published: token ids from 0, the highest epoch, and whether the request has ended."""

    ids: tuple[int | None, ...]
    epoch: int
    ended: bool


def emitted_before(log: Iterable[Message]) -> Before:
    """Reads a log as a reader would, up to its first hole: what lies beyond a hole reached nobody in order."""
    sequencer = Sequencer()
    highest = 0
    for message in log:
        try:
            event = events.decode(message.data)
        except CodecError:
            continue
        highest = max(highest, event.epoch)
        if isinstance(sequencer.offer(event), Hole):
            break
    return Before(tuple(sequencer.ids), highest, sequencer.ended)
