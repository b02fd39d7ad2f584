"""Time as the pipeline means it: microseconds of the broker's clock, so that spans made by several machines fit together."""

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the broker's time in microseconds."""

    def now_us(self) -> int:
        """Microseconds since the epoch, by the broker's clock."""
        ...


class BrokerClock:
    """The local clock plus a measured offset to the broker's; the offset is 0 until the first measurement."""

    def __init__(self) -> None:
        self.offset_us = 0
        self.round_trip_us = 0

    def now_us(self) -> int:
        """Microseconds since the epoch, by the broker's clock."""
        return time.time_ns() // 1000 + self.offset_us

    def learn(self, sent_us: int, received_us: int, broker_us: int) -> None:
        """Takes one exchange: the broker's time is taken to be that of the middle of the round trip.

        sent_us and received_us are local. The error is at most half the round trip, so an offset within it is noise.
        """
        self.round_trip_us = received_us - sent_us
        offset = broker_us - (sent_us + received_us) // 2
        if abs(offset - self.offset_us) > self.round_trip_us // 2:
            self.offset_us = offset
