"""What happens to one delivered work item: decided here, without I/O, and nowhere else.

    arrival             condition                       actions
    ─────────           ─────────────────────────       ─────────────────────────────────────────────
    arrive()            DELIVERIES_MAX came to nothing  Bury, Answer attempts_exhausted, Acknowledge
                        request was cancelled           Answer cancelled, Acknowledge
                        deadline has passed             Answer deadline_exceeded, Acknowledge
                        otherwise                       (none: work on it)
    settle(outcome)     Done                            Acknowledge
                        Failed, client or busy          Answer, Acknowledge
                        Failed, fault, attempts left    GiveBack after a backoff
                        Failed, fault, last attempt     Bury, Answer attempts_exhausted, Acknowledge
                        HandedBack (drain)              GiveBack at once
                        Lost (the lease)                (none: it is somebody else's now)

A failure that is told (an exception) is tried ATTEMPTS_MAX times. A holder that dies tells nothing, and may have died of other
causes, so silent deaths have a higher bound, and only deliveries since the last one that brought the request forward count.

Acknowledge always comes last: a crash before it brings the item back, and every action before it is idempotent.
"""

from dataclasses import dataclass
from typing import assert_never

from schemas.errors import HeadraceError
from schemas.limits import ATTEMPTS_MAX, DELIVERIES_MAX


@dataclass(frozen=True, slots=True)
class Done:
    """The results are published and confirmed."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The work ended in a typed error."""

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The worker stops before the work is done."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease ran out while the worker was held up: another holder has the work, or will."""


Outcome = Done | Broken | HandedBack | Lost


@dataclass(frozen=True, slots=True)
class Answer:
    """Publish the terminal Failed event."""

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Bury:
    """Put the input with its cause on the dead-letter subject."""

    cause: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The item is settled."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The item goes back to its queue and comes again after delay_s."""

    delay_s: float


Action = Answer | Bury | Acknowledge | GiveBack


def arrive(fruitless: int, cancelled: bool, expired: bool) -> tuple[Action, ...]:
    """Actions on an item that was just delivered; none means that it is to be worked on.

    fruitless: deliveries before this one, since the last that brought the request forward.
    """
    if fruitless >= DELIVERIES_MAX:
        return _exhausted(fruitless, "every holder died or lost its lease")
    if cancelled:
        return (Answer(HeadraceError("cancelled", "the request was cancelled")), Acknowledge())
    if expired:
        return (Answer(HeadraceError("deadline_exceeded", "the deadline passed in a queue")), Acknowledge())
    return ()


def settle(outcome: Outcome, failures: int) -> tuple[Action, ...]:
    """Actions after the work, whatever became of it. failures: those that were told so far, with this one if it is one."""
    match outcome:
        case Done():
            return (Acknowledge(),)
        case HandedBack():
            return (GiveBack(0.0),)
        case Lost():
            return ()
        case Broken(error) if error.meaning.whose != "fault":
            return (Answer(error), Acknowledge())
        case Broken(error) if failures >= ATTEMPTS_MAX:
            return _exhausted(failures, f"{error.code}: {error.message}")
        case Broken():
            return (GiveBack(min(8.0, 0.1 * 4.0 ** (failures - 1))),)
        case _:
            assert_never(outcome)


def _exhausted(attempts: int, cause: str) -> tuple[Action, ...]:
    error = HeadraceError("attempts_exhausted", f"the request failed {attempts} times; the last cause: {cause}")
    return (Bury(cause), Answer(error), Acknowledge())
