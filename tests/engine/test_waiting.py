"""Who goes next: class, then arrival, and waiting lifts a class."""

import pytest

from schemas.errors import HeadraceError
from schemas.subjects import Priority
from tests.engine.fakes import sampling
from workers.engine.request import Sequence
from workers.engine.waiting import WaitingQueue


def _put(queue: WaitingQueue, arrival: int, priority: Priority, now_us: int = 0) -> Sequence:
    sequence = Sequence(f"{priority}-{arrival}", "tenant", priority, (1,), sampling(), now_us, 10**9, arrival=arrival)
    queue.put(sequence, now_us)
    return sequence


def _taken(queue: WaitingQueue, now_us: int) -> list[str]:
    order = []
    while (sequence := queue.head(now_us)) is not None:
        queue.remove(sequence, now_us)
        order.append(sequence.request)
    return order


def test_classes_go_in_order_and_first_come_first_served_inside_one() -> None:
    queue = WaitingQueue(9, 100)
    for arrival, priority in enumerate[Priority](["batch", "standard", "interactive", "batch", "interactive"]):
        _put(queue, arrival, priority)
    assert queue.waiting() == {"interactive": 2, "standard": 1, "batch": 2}
    assert _taken(queue, 0) == ["interactive-2", "interactive-4", "standard-1", "batch-0", "batch-3"]


def test_batch_waits_two_ages_and_then_goes_before_later_arrivals() -> None:
    for now_us, first in [(199, "interactive-1"), (200, "batch-0")]:
        queue = WaitingQueue(9, 100)
        _put(queue, 0, "batch")
        _put(queue, 1, "interactive", 50)
        assert _taken(queue, now_us)[0] == first


def test_batch_that_waited_one_age_goes_before_a_later_standard_request() -> None:
    queue = WaitingQueue(9, 100)
    _put(queue, 0, "batch")
    _put(queue, 1, "standard", 99)
    assert _taken(queue, 100) == ["batch-0", "standard-1"]


def test_waiting_adds_up_over_runs() -> None:
    queue = WaitingQueue(9, 100)
    batch = _put(queue, 0, "batch")
    queue.remove(batch, 60)
    queue.put_back(batch, 1000)
    queue.head(1039)
    assert batch.rank == 2
    queue.head(1040)
    assert batch.rank == 1


def test_a_preempted_sequence_returns_to_the_front_of_its_class() -> None:
    queue = WaitingQueue(9, 100)
    first = _put(queue, 0, "standard")
    queue.remove(first, 1)
    _put(queue, 1, "standard", 2)
    queue.put_back(first, 3)
    assert _taken(queue, 3) == ["standard-0", "standard-1"]


def test_a_full_queue_refuses_newcomers_and_takes_a_preempted_sequence_back() -> None:
    queue = WaitingQueue(2, 100)
    first = _put(queue, 0, "batch")
    queue.remove(first, 0)
    _put(queue, 1, "batch")
    _put(queue, 2, "batch")
    with pytest.raises(HeadraceError) as refused:
        _put(queue, 3, "interactive")
    assert refused.value.code == "overloaded"
    queue.put_back(first, 0)
    assert len(queue) == 3


def test_a_sequence_removed_while_its_promotion_was_due_stays_removed() -> None:
    queue = WaitingQueue(9, 100)
    batch = _put(queue, 0, "batch")
    queue.remove(batch, 50)
    assert queue.head(500) is None
    assert batch.rank == 2
