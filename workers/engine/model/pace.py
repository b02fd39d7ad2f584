"""How many threads a step runs on: as many as make it faster, found by measuring, again and again.

A step has some 250 parallel regions, and at the end of each all threads wait for the last. On a processor of its own every
thread helps; beside a broker and other workers a thread that has to wait for its turn holds up all: measured on two cores,
one of them busy (December 2026), a step of 8 rows took 38 ms on one thread and 80 to 900 ms on two; with both free, 38 and 25.
Results do not depend on it: linear layers are checked at every count that may be chosen. Pure: knows no torch and no clock.
"""

from dataclasses import dataclass, field

_ROWS_OF_CLASS = (4, 16, 64)  # a step of more rows gains more from threads: each size of step is measured by itself
_TRY_AFTER_LEAST, _TRY_AFTER_MOST = 16, 512  # steps between tries of what is not the fastest now
_NEWS = 0.4  # weight of the last measurement


def work_of(rows: int, keys: int) -> float:
    """About what a step costs, in milliseconds of one core for the default model; only ratios matter."""
    return 20 + 0.3 * rows + 0.003 * keys


@dataclass(slots=True)
class _Class:
    costs: dict[int, float] = field(default_factory=dict)
    since_try: int = 0
    try_after: int = _TRY_AFTER_LEAST
    tries: int = 0


class Pace:
    """options: the thread counts to choose from, one or more."""

    def __init__(self, options: tuple[int, ...]) -> None:
        assert options, "there is a thread count to choose"
        self._options = options
        self._classes = [_Class() for _ in range(len(_ROWS_OF_CLASS) + 1)]

    def choose(self, rows: int) -> int:
        """The thread count for the next step, of so many rows."""
        of = self._class_of(rows)
        for option in reversed(self._options):
            if option not in of.costs:
                return option
        fastest = min(self._options, key=of.costs.__getitem__)
        others = [option for option in self._options if option != fastest]
        if others and of.since_try >= of.try_after:
            return others[of.tries % len(others)]
        return fastest

    def record(self, rows: int, keys: int, threads: int, seconds: float) -> None:
        """What a step took on the threads that were chosen for it."""
        of, cost = self._class_of(rows), seconds / work_of(rows, keys)
        if len(of.costs) < len(self._options):
            of.costs[threads] = cost
            return
        before = min(self._options, key=of.costs.__getitem__)
        of.costs[threads] = cost if threads != before else (1 - _NEWS) * of.costs[threads] + _NEWS * cost
        after = min(self._options, key=of.costs.__getitem__)
        if after != before:
            of.since_try, of.try_after = 0, _TRY_AFTER_LEAST
        elif threads != before:
            of.since_try, of.try_after, of.tries = 0, min(2 * of.try_after, _TRY_AFTER_MOST), of.tries + 1
        else:
            of.since_try += 1

    def _class_of(self, rows: int) -> _Class:
        return self._classes[sum(rows > most for most in _ROWS_OF_CLASS)]
