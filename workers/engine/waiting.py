"""The queue before the engine's slots: who goes next.

Interactive before standard before batch, first come first served inside a class. Waiting ages: each age_us that a
sequence has waited, in all, moves it one class up, where its early arrival puts it at the front. So a batch request
waits at most two ages behind requests that arrived after it, and the order of two sequences changes at most twice,
which rules out a livelock.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush

from schemas.errors import HeadraceError
from schemas.subjects import PRIORITIES, Priority
from workers.engine.request import RANKS, Sequence


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class WaitingQueue:
    """Sequences by (rank, arrival). Bounded by requests_max for newcomers; a preempted sequence always finds room."""

    def __init__(self, requests_max: int, age_us: int) -> None:
        assert min(requests_max, age_us) > 0, f"requests_max {requests_max}, age_us {age_us}"
        self.requests_max = requests_max
        self.age_us = age_us
        self._ranks: tuple[list[Sequence], ...] = tuple([] for _ in PRIORITIES)  # each by arrival
        # A heap of (promotion_us, arrival, sequence); entries of sequences that ran or ended since stay until they are due.
        self._promotions: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return sum(len(line) for line in self._ranks)

    def put(self, sequence: Sequence, now_us: int) -> None:
        """Queues a newcomer; HeadraceError overloaded when requests_max are waiting."""
        if len(self) >= self.requests_max:
            raise HeadraceError("overloaded", f"{len(self)} requests are waiting for this engine, its limit")
        sequence.rank = RANKS[sequence.priority]
        self.put_back(sequence, now_us)

    def put_back(self, sequence: Sequence, now_us: int) -> None:
        """Queues a preempted sequence: its old arrival puts it before all that came later in its class."""
        sequence.waiting_since_us = now_us
        insort(self._ranks[sequence.rank], sequence, key=_arrival)
        self._expect_promotion(sequence, now_us + self.age_us - sequence.waited_us)

    def head(self, now_us: int) -> Sequence | None:
        """Who goes next, if anybody waits."""
        self._promote(now_us)
        return next((line[0] for line in self._ranks if line), None)

    def remove(self, sequence: Sequence, now_us: int) -> None:
        """Takes a waiting sequence out, because it runs now or is over."""
        assert sequence.waiting_since_us is not None, f"{sequence.request} does not wait"
        self._line_remove(sequence)
        sequence.waited_us += max(0, now_us - sequence.waiting_since_us)
        sequence.waiting_since_us = sequence.promotion_us = None

    def waiting(self) -> dict[Priority, int]:
        """How many wait, by the class that they came in with."""
        counts = dict.fromkeys(PRIORITIES, 0)
        for line in self._ranks:
            for sequence in line:
                counts[sequence.priority] += 1
        return counts

    def _promote(self, now_us: int) -> None:
        while self._promotions and self._promotions[0][0] <= now_us:
            due_us, _, sequence = heappop(self._promotions)
            if sequence.promotion_us != due_us:
                continue  # it ran or ended since
            self._line_remove(sequence)
            sequence.rank -= 1
            sequence.waited_us = 0
            sequence.waiting_since_us = due_us
            insort(self._ranks[sequence.rank], sequence, key=_arrival)
            self._expect_promotion(sequence, due_us + self.age_us)

    def _expect_promotion(self, sequence: Sequence, due_us: int) -> None:
        sequence.promotion_us = due_us if sequence.rank > 0 else None
        if sequence.promotion_us is not None:
            heappush(self._promotions, (sequence.promotion_us, sequence.arrival, sequence))

    def _line_remove(self, sequence: Sequence) -> None:
        line = self._ranks[sequence.rank]
        place = bisect_left(line, sequence.arrival, key=_arrival)
        assert line[place] is sequence, f"{sequence.request} is not in the line of rank {sequence.rank}"
        del line[place]
