"""How long and how often the broker is asked before it counts as away; the same for the real bus and the one in memory."""

import random

from schemas import limits

PULL_EXPIRES_S = 4.0  # below the ack wait: a stopped process has no pull left by the time its work is delivered again
PULL_BEAT_S = 1.0
CONFIRM_TIMEOUT_S = 2.0
CONFIRM_TRIES = 4
READ_TIMEOUT_S = 1.0
assert PULL_EXPIRES_S < limits.ACK_WAIT_S


def backoff_s(failures: int, base: float = 0.05, most: float = 2.0) -> float:
    """Seconds to wait after that many failures in a row (from 1): doubling, capped, with full jitter above a half."""
    return min(most, base * 2.0 ** (failures - 1)) * (0.5 + random.random() / 2)
