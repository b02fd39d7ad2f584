"""When a refused call may be worth another try: how long the work ahead of it takes at the rate at which work ends.

Pure: the time comes in as an argument. Without a measured rate it is what the code usually takes to pass.
"""

from collections import deque
from math import ceil

WINDOW_S = 30.0
SAMPLES_MAX = 512
LEAST_S, MOST_S = 1, 60

# What a full queue lasts depends on the rate; a missing worker or broker does not.
BY_RATE = ("overloaded", "queue_timeout")
USUAL_S = {"overloaded": 1, "queue_timeout": 2, "stage_unavailable": 2, "shutting_down": 2, "slow_reader": 1}


class DrainRate:
    """Streams that ended at this gateway within the last WINDOW_S."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=SAMPLES_MAX)

    def note(self, now_s: float) -> None:
        """One stream has ended."""
        self._ends.append(now_s)

    def per_second(self, now_s: float) -> float | None:
        """Ends a second; None when there were fewer than two lately."""
        while self._ends and now_s - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return None
        return (len(self._ends) - 1) / max(now_s - self._ends[0], 1e-3)


def retry_after_s(code: str, per_second: float | None, waiting: int) -> int:
    """Whole seconds, LEAST_S to MOST_S: until `waiting` requests and one more have ended."""
    if per_second is None or code not in BY_RATE:
        return USUAL_S.get(code, LEAST_S)
    return min(MOST_S, max(LEAST_S, ceil((waiting + 1) / per_second)))
