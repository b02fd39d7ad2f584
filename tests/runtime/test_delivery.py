"""The table of one delivery, row by row."""

import pytest

from runtime.delivery import Acknowledge, Answer, Broken, Bury, Done, GiveBack, HandedBack, Lost, arrive, settle
from schemas.errors import MEANINGS, HeadraceError
from schemas.limits import ATTEMPTS_MAX, DELIVERIES_MAX

FAULT = HeadraceError("internal", "x")


def kinds(actions: tuple[object, ...]) -> list[type]:
    return [type(action) for action in actions]


def code(actions: tuple[object, ...]) -> str:
    [answer] = [action for action in actions if isinstance(action, Answer)]
    return answer.error.code


def test_what_arrives_in_time_is_worked_on() -> None:
    assert arrive(0, cancelled=False, expired=False) == ()
    assert arrive(DELIVERIES_MAX - 1, cancelled=False, expired=False) == ()


def test_what_is_cancelled_or_expired_is_answered_and_settled() -> None:
    assert kinds(arrive(0, cancelled=True, expired=False)) == [Answer, Acknowledge]
    assert code(arrive(0, cancelled=True, expired=True)) == "cancelled"
    assert code(arrive(0, cancelled=False, expired=True)) == "deadline_exceeded"


def test_silent_deaths_end_in_a_dead_letter() -> None:
    actions = arrive(DELIVERIES_MAX, cancelled=False, expired=False)
    assert kinds(actions) == [Bury, Answer, Acknowledge]
    assert code(actions) == "attempts_exhausted"


@pytest.mark.parametrize("name", [name for name, meaning in MEANINGS.items() if meaning.whose != "fault"])
def test_a_client_or_busy_error_is_never_retried(name: str) -> None:
    assert kinds(settle(Broken(HeadraceError(name, "x")), 1)) == [Answer, Acknowledge]


def test_faults_back_off_and_end() -> None:
    delays = [settle(Broken(FAULT), attempt)[0] for attempt in range(1, ATTEMPTS_MAX)]
    assert delays == [GiveBack(0.1), GiveBack(0.4), GiveBack(1.6), GiveBack(6.4)]
    assert kinds(settle(Broken(FAULT), ATTEMPTS_MAX)) == [Bury, Answer, Acknowledge]


def test_done_is_acknowledged_a_drain_gives_back_and_a_lost_lease_says_nothing() -> None:
    assert settle(Done(), 1) == (Acknowledge(),)
    assert settle(HandedBack(), 3) == (GiveBack(0.0),)
    assert settle(Lost(), 3) == ()
