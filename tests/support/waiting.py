"""Waiting for conditions, with a deadline, instead of sleeping."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Returns when condition() holds; fails, naming what was awaited, after that many seconds."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + seconds
    while not condition():
        assert loop.time() < give_up, f"waited {seconds} s for: {what}"
        await asyncio.sleep(0.005)


def until_now(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """The same for a test that has no event loop."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"waited {seconds} s for: {what}"
        time.sleep(0.02)  # polls a condition, with a deadline
