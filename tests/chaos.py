"""Kills and stops real processes under real streams, and counts what clients lost: python -m tests.chaos --minutes 3

A whole stack (two engines) serves 16 concurrent greedy streams of the real small model, each with its undisturbed text known.
Every few seconds one process is killed (SIGKILL) or stopped past its lease and continued (SIGSTOP, SIGCONT). Clients do what
clients should: a broken stream is resumed from its next index, a request that was never accepted is sent again. What gateways
removed and repaired is read from their metrics, a quarter of a second before a death at the latest. Exit status 1 when a
request has not exactly one terminal event, or a text differs.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.stack import RunningStack

STREAMS = 16
TOKENS = 48
VICTIMS = ("worker-engine", "worker-engine-2", "worker-guardrail", "worker-retrieval", "gateway", "nats")
STOP_S = 7.0  # beyond the ack wait
TOPICS = ("mills", "rivers", "bread", "tides", "clocks", "maps", "ships", "bees", "salt", "glass", "wool", "bells")
BROKEN = (httpx.HTTPError, json.JSONDecodeError)


@dataclass(slots=True)
class Tally:
    """What was done and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    resumes: int = 0
    resends: int = 0
    duplicates: int = 0  # tokens that came again on a resume, and were not shown
    repeated: dict[int, float] = field(default_factory=dict)  # tokens that a gateway removed, by its process id
    gaps: dict[int, float] = field(default_factory=dict)  # holes that a gateway filled, by its process id
    faults: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)  # typed errors, which are an answer but not the text


class Stream:
    """One client's view of one request: text by token index, and its end."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.request: str | None = None
        self.next_index = 0
        self.text = ""
        self.ends: list[str] = []

    def event(self, identity: str | None, frame: dict[str, object]) -> None:
        """One server-sent event of GET /v1/requests/{id}/events."""
        if frame["type"] == "token":
            index = int(str(frame["index"]))
            if index < self.next_index:
                self._tally.duplicates += 1
                return
            self.text += str(frame["text"])
            assert identity is not None
            self.next_index = int(identity.rsplit(":", 1)[1])
        elif frame["type"] == "done":
            self.ends.append("done")
        elif frame["type"] == "error":
            self.ends.append(str(frame["code"]))


async def ask(url: str, prompt: str, tally: Tally) -> Stream:
    """One request from its first try to its end, whatever dies between."""
    stream = Stream(tally)
    key = os.urandom(12).hex()
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(20.0)) as client:
        give_up = time.monotonic() + 170
        while not stream.ends:
            if time.monotonic() > give_up:
                tally.faults.append(f"{stream.request}: no end after 170 s, {stream.next_index} tokens")
                return stream
            try:
                if stream.request is None:
                    await _send(client, stream, prompt, key, tally)
                else:
                    tally.resumes += 1
                    await _follow(client, stream)
            except BROKEN:
                await asyncio.sleep(0.2)
    return stream


async def _send(client: httpx.AsyncClient, stream: Stream, prompt: str, key: str, tally: Tally) -> None:
    """Sends the request under its key: a second send attaches to the first. Its text is then followed by index."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "headrace": {"on_disconnect": "keep", "deadline_ms": 160_000},
    }
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={"Idempotency-Key": key}) as answer:
        if answer.status_code != 200:
            tally.resends += 1
            await answer.aread()
            await asyncio.sleep(0.3)
            return
        stream.request = answer.headers["X-Request-Id"]


async def _follow(client: httpx.AsyncClient, stream: Stream) -> None:
    path = f"/v1/requests/{stream.request}/events?from={stream.next_index}"
    async with client.stream("GET", path) as answer:
        if answer.status_code != 200:
            await answer.aread()
            await asyncio.sleep(0.3)
            return
        identity: str | None = None
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                identity = line.removeprefix("id: ")
            elif line.startswith("data: "):
                stream.event(identity, json.loads(line.removeprefix("data: ")))
                identity = None


def prompts(count: int) -> list[str]:
    """Different prompts, so that no two texts are alike by chance."""
    return [f"Write {2 + i // len(TOPICS)} sentences about {TOPICS[i % len(TOPICS)]}." for i in range(count)]


async def strike(stack: RunningStack, rnd: random.Random, tally: Tally, until: float, every_s: float) -> None:
    """Kills or stops one process after another."""
    stopped: list[asyncio.Task[None]] = []
    turn = 0
    while time.monotonic() < until:
        await asyncio.sleep(every_s * rnd.uniform(0.6, 1.4))
        victim = VICTIMS[turn % len(VICTIMS)]
        turn += 1
        pid = stack.pid(victim)
        if pid is None:
            continue
        how = "stop" if rnd.random() < 0.25 and victim != "nats" else "kill"
        try:
            os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        except ProcessLookupError:
            continue
        tally.kills[f"{how} {victim}"] += 1
        if how == "stop":
            stopped.append(asyncio.create_task(_continue_later(pid)))
    for task in stopped:
        await task


async def watch(stack: RunningStack, tally: Tally) -> None:
    """Keeps each gateway's last counters, since they die with it."""
    while True:
        await asyncio.sleep(0.25)
        pid = stack.pid("gateway")
        try:
            async with httpx.AsyncClient(timeout=2.0) as client:
                text = (await client.get(stack.url + "/metrics")).text
        except httpx.HTTPError:
            continue
        if pid is None or pid != stack.pid("gateway"):
            continue
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "headrace_gateway_repeated_tokens_total":
                tally.repeated[pid] = float(value)
            elif name == "headrace_gateway_gaps_filled_total":
                tally.gaps[pid] = float(value)


async def _continue_later(pid: int) -> None:
    await asyncio.sleep(STOP_S)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


async def run(stack: RunningStack, minutes: float, every_s: float, seed: int) -> Tally:
    """The undisturbed texts, then the storm, then the comparison."""
    tally, rnd = Tally(), random.Random(seed)
    asked = prompts(24)
    quiet = Tally()
    expected: dict[str, str] = {}
    for begin in range(0, len(asked), STREAMS):
        batch = asked[begin : begin + STREAMS]
        expected |= {
            p: s.text for p, s in zip(batch, await asyncio.gather(*(ask(stack.url, p, quiet) for p in batch)), strict=True)
        }
    until = time.monotonic() + 60 * minutes
    storm = asyncio.create_task(strike(stack, rnd, tally, until, every_s))

    async def client(number: int) -> None:
        turn = number
        while time.monotonic() < until:
            prompt = asked[turn % len(asked)]
            turn += STREAMS + 1
            tally.requests += 1
            judge(await ask(stack.url, prompt, tally), expected[prompt], tally)

    watching = asyncio.create_task(watch(stack, tally))
    await asyncio.gather(*(client(number) for number in range(STREAMS)))
    await storm
    watching.cancel()
    return tally


def judge(stream: Stream, expected: str, tally: Tally) -> None:
    """One end, and the whole text; or one typed error."""
    if len(stream.ends) != 1:
        tally.faults.append(f"{stream.request}: ends {stream.ends}")
    elif stream.ends[0] != "done":
        tally.errors[stream.ends[0]] += 1
    elif stream.text != expected:
        tally.faults.append(f"{stream.request}: text differs: {stream.text[:200]!r} for {expected[:200]!r}")


def main() -> int:
    """Prints the summary as JSON; exit status 1 on any loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--every", type=float, default=2.5, help="seconds between strikes, on average")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = RunningStack(Path(folder) / "home", HEADRACE_ENGINES="2", HEADRACE_THREADS="1", HEADRACE_CACHE_TOKENS="8192")
        try:
            tally = asyncio.run(run(stack, options.minutes, options.every, options.seed))
        finally:
            stack.stop()
    print(
        json.dumps(
            {
                "requests": tally.requests,
                "strikes": sum(tally.kills.values()),
                "by_kind": dict(tally.kills),
                "resumes": tally.resumes,
                "sent_again": tally.resends,
                "duplicates_removed": tally.duplicates + int(sum(tally.repeated.values())),
                "gaps_repaired": int(sum(tally.gaps.values())),
                "typed_errors": dict(tally.errors),
                "lost": len(tally.faults),
                "faults": tally.faults[:20],
            },
            indent=1,
        )
    )
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
