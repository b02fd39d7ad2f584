"""Ten thousand short requests, and what they leave behind: python -m tests.soak --requests 10000

Prints, at the start, in the middle, at the end and once the token logs' time is over: the memory of each process, the bytes of
each stream and bucket, the consumers that are open. Token logs are kept for a time and up to a size: their bytes grow until
then, and are gone after it (buckets keep a few bytes of each request for longer, REQUEST_RECORD_S); memory and consumers may
not grow. Exit status 1 when a request failed, when a process grew by more than --growth between the middle and the end, or
when a stream still holds something at last. --hurry leaves the last reading out.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from runtime.nats_bus import NatsBus
from schemas import limits, subjects
from tests.support.stack import RunningStack

STREAMS = (subjects.WORK_STREAM, subjects.RAW_STREAM, subjects.REPLY_STREAM, subjects.END_STREAM, subjects.DEAD_STREAM)
SWEEP_S = 30.0  # for the broker to drop what is too old
BUCKETS = (subjects.REQUEST_BUCKET, subjects.PROGRESS_BUCKET, subjects.CANCEL_BUCKET, subjects.IDEMPOTENCY_BUCKET)
NAMES = ("nats", "gateway", "worker-guardrail", "worker-retrieval", "worker-engine")


async def observe(stack: RunningStack, bus: NatsBus) -> dict[str, Any]:
    """One reading: megabytes by process, bytes by stream, consumers."""
    memory = {}
    for name in NAMES:
        pid = stack.pid(name)
        memory[name] = round(psutil.Process(pid).memory_info().rss / 2**20, 1) if pid else None
    streams = {name: (await bus._js.stream_info(name)).state for name in STREAMS}
    buckets = {name: (await bus._js.stream_info(f"KV_{name}")).state.bytes for name in BUCKETS}
    consumers = sum([(await bus._js.stream_info(name)).state.consumer_count for name in STREAMS])
    stream_bytes = {name: state.bytes for name, state in streams.items()}
    return {"memory_mb": memory, "stream_bytes": stream_bytes, "bucket_bytes": buckets, "consumers": consumers}


async def send(url: str, count: int, concurrency: int) -> int:
    """Sends count requests of one token each; the number that failed."""
    failed = 0
    left = iter(range(count))
    pool = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal failed
        for number in left:
            body = {"model": "smollm2-135m", "prompt": f"{number} is", "max_tokens": 1, "temperature": 0}
            answer = await http.post("/v1/completions", json=body)
            failed += answer.status_code != 200

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=pool) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    return failed


async def run(stack: RunningStack, count: int, hurry: bool) -> dict[str, Any]:
    """A tenth to warm up, then two halves of the rest, then nothing for as long as logs are kept."""
    bus = await NatsBus.connect(stack.nats_url, "soak")
    began = time.monotonic()
    failed = await send(stack.url, count // 10, 32)
    readings = [await observe(stack, bus)]
    for _ in range(2):
        failed += await send(stack.url, (count - count // 10) // 2, 32)
        readings.append(await observe(stack, bus))
    seconds = time.monotonic() - began
    if not hurry:
        await asyncio.sleep(limits.LOG_AGE_S + SWEEP_S)
        readings.append(await observe(stack, bus))
    await bus.close()
    return {"requests": count, "failed": failed, "seconds": round(seconds, 1), "readings": readings}


def grown(report: dict[str, Any], growth: float) -> list[str]:
    """Processes that grew by more than that share between the middle and the end."""
    middle, end = (reading["memory_mb"] for reading in report["readings"][1:3])
    return [name for name in NAMES if name != "nats" and end[name] > middle[name] * (1 + growth)]


def left(report: dict[str, Any]) -> list[str]:
    """Streams that hold something once all logs' time is over."""
    return [name for reading in report["readings"][3:] for name, held in reading["stream_bytes"].items() if held]


def main() -> int:
    """Prints the report as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--growth", type=float, default=0.05)
    parser.add_argument("--hurry", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = RunningStack(Path(folder) / "home")
        try:
            report = asyncio.run(run(stack, options.requests, options.hurry))
        finally:
            stack.stop()
    report["grown"], report["left"] = grown(report, options.growth), left(report)
    print(json.dumps(report, indent=1))
    return 1 if report["failed"] or report["grown"] or report["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
