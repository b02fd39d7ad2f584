"""One request's events, from the live subject and from its log, put into one order: each token once, one end. No I/O.

    event                           condition                            action
    ─────────────────────           ────────────────────────────         ─────────────────────────────────────
    any                             ended, or of an older epoch          Ignore
    Tokens [index, end)             no token in it                       Ignore
                                    index > ours                         held; FillGap(ours)
                                    a text below ours differs            End(replay_diverged)
                                    end <= ours                          Ignore
                                    otherwise                            Deliver(what is new), then what was held
    Finished or Failed at index     index > ours                         held; FillGap(ours)
    Finished                        index < ours, nothing delivered      End(invalid_value): asked from beyond the end
    Finished                        index < ours                         End(replay_diverged)
    Finished or Failed              otherwise                            End(it)

Older is told apart per source: the live subject and the log may show the same events at different times, so an event
of epoch 1 that the log holds before those of epoch 2 still counts after epoch 2 was seen live.
"""

from dataclasses import dataclass, replace

from schemas.errors import HeadraceError
from schemas.events import Event, Failed, Finished, Terminal, Tokens


@dataclass(frozen=True, slots=True)
class Deliver:
    """The client gets these tokens next."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing new."""


@dataclass(frozen=True, slots=True)
class FillGap:
    """Tokens from index on were missed: read the log."""

    index: int


@dataclass(frozen=True, slots=True)
class End:
    """The one end: the terminal event, or an error that was found here."""

    outcome: Terminal | HeadraceError


Action = Deliver | Ignore | FillGap | End

IGNORE = Ignore()


class Sequencer:
    """Where one reader of one request stands. index is the next token to deliver; start is the first one wanted.

    repeated counts the live tokens that were not delivered because they had been, or came from a fenced attempt.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.index = start
        self.epoch = 0
        self.ended = False
        self.repeated = 0
        self._log_epoch = 0
        self._texts: list[str] = []  # of tokens [start, index)
        self._ahead: dict[int, Tokens] = {}  # beyond a hole, by index
        self._terminal: Terminal | None = None  # beyond a hole

    @property
    def hole(self) -> bool:
        """Whether something is held that earlier tokens are missing for."""
        return not self.ended and (bool(self._ahead) or self._terminal is not None)

    def take(self, event: Event) -> list[Action]:
        """One live event."""
        if self.ended:
            return [IGNORE]
        stale = event.epoch < self.epoch
        if isinstance(event, Tokens):
            self.repeated += len(event.texts) if stale else max(0, min(event.end, self.index) - event.index)
        if stale:
            return [IGNORE]
        self.epoch = event.epoch
        return self._consider(event)

    def take_log(self, event: Event) -> list[Action]:
        """One event of the log; the log is read in its order, from where the last reading ended."""
        if self.ended or event.epoch < self._log_epoch:
            return [IGNORE]
        self._log_epoch = event.epoch
        self.epoch = max(self.epoch, event.epoch)
        return self._consider(event)

    def take_file(self, event: Event) -> list[Action]:
        """One event of the finished answer that is kept on file. It is of every epoch.

        Its writer may have been fenced on the subject, and yet acknowledged the work: nobody else will end the request.
        """
        return [IGNORE] if self.ended else self._consider(replace(event, epoch=max(self.epoch, event.epoch)))

    def rewind_log(self) -> None:
        """The log will be read from its beginning again."""
        self._log_epoch = 0

    def give_up(self) -> End:
        """The hole cannot be filled: the end, with the failure that was held if there is one."""
        self.ended = True
        if isinstance(self._terminal, Failed):
            return End(self._terminal)
        return End(HeadraceError("internal", f"tokens from index {self.index} on are lost"))

    def _consider(self, event: Event) -> list[Action]:
        if isinstance(event, Tokens):
            return self._consider_tokens(event)
        return self._consider_terminal(event)

    def _consider_tokens(self, event: Tokens) -> list[Action]:
        if not event.texts:
            return [IGNORE]
        if event.index > self.index:
            known = self._ahead.get(event.index)
            if known is None or known.end < event.end:
                self._ahead[event.index] = event
            return [FillGap(self.index)]
        if event.index < self.index:
            differs = self._first_difference(event)
            if differs is not None:
                return [self._diverged(f"token {differs} came again with another text")]
            if event.end <= self.index:
                return [IGNORE]
        actions: list[Action] = [self._deliver(event)]
        if self._ahead or self._terminal is not None:
            actions += self._catch_up()
        return actions

    def _consider_terminal(self, event: Terminal) -> list[Action]:
        if event.index > self.index:
            self._terminal = event
            return [FillGap(self.index)]
        if isinstance(event, Finished) and event.index < self.index:
            if self.index == self.start:
                return [self._beyond(event.index)]
            return [self._diverged(f"the answer ended at token {event.index}, and {self.index} were sent already")]
        self.ended = True
        return [End(event)]

    def _deliver(self, event: Tokens) -> Deliver:
        fresh = event.since(self.index)
        self._texts += fresh.texts
        self.index = fresh.end
        return Deliver(fresh)

    def _catch_up(self) -> list[Action]:
        """What was held and can go now."""
        actions: list[Action] = []
        while not self.ended and self._ahead and (index := min(self._ahead)) <= self.index:
            actions += self._consider_tokens_once(self._ahead.pop(index))
        if not self.ended and self._terminal is not None and self._terminal.index <= self.index:
            actions += self._consider_terminal(self._terminal)
        elif self.hole:
            actions.append(FillGap(self.index))
        return actions

    def _consider_tokens_once(self, event: Tokens) -> list[Action]:
        differs = self._first_difference(event)
        if differs is not None:
            return [self._diverged(f"token {differs} came twice, with two texts")]
        return [self._deliver(event)] if event.end > self.index else []

    def _first_difference(self, event: Tokens) -> int | None:
        """The first token both here and in the event whose texts differ."""
        low, high = max(event.index, self.start), min(event.end, self.index)
        ours = self._texts[low - self.start : high - self.start] if low < high else []
        theirs = event.texts[low - event.index : high - event.index] if low < high else ()
        for offset, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                return low + offset
        return None

    def _beyond(self, tokens: int) -> End:
        self.ended = True
        message = f"the answer has {tokens} tokens, and nothing from index {self.start} on"
        return End(HeadraceError("invalid_value", message, "from"))

    def _diverged(self, what: str) -> End:
        self.ended = True
        return End(HeadraceError("replay_diverged", f"a repeated answer differs from what was sent: {what}"))
