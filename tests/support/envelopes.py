"""Envelopes for tests: one valid request, changed where a test needs it."""

import time
from typing import Any

from schemas import subjects
from schemas.envelope import ChatInput, Envelope, Message, Rails, Sampling
from schemas.timeline import Timeline


def envelope(text: str = "hello", **changes: Any) -> Envelope:
    """A chat request of tenant `default`, a minute from its deadline, on its way to the engine alone."""
    now_us = time.time_ns() // 1000
    values: dict[str, Any] = {
        "request": subjects.new_request_id(),
        "tenant": "default",
        "model": "smollm2-135m",
        "priority": "standard",
        "slip": ("engine",),
        "input": ChatInput(messages=(Message(role="user", content=text),)),
        "sampling": Sampling(seed=1, max_tokens=16, temperature=0.0),
        "rails": Rails(),
        "deadline_us": now_us + 60_000_000,
        "timeline": Timeline(now_us),
    }
    return Envelope(**(values | changes))
