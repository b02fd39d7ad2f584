"""The broker is away for a minute: nothing is lost, and work goes on within ten seconds of its return."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from scripts.broker import free_port
from tests.support.broker import NatsServer
from tests.support.waiting import until_now

AWAY_S = 60.0
BACK_S = 10.0
BODY = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Write about a mill that stands still."}],
    "temperature": 0,
    "max_tokens": 160,
    "ignore_eos": True,
}


@pytest.fixture
def gateway(broker: NatsServer, tmp_path: Path) -> Iterator[str]:
    """Every process of the pipeline on the test's own broker; the gateway's URL."""
    port = free_port()
    own = {"HEADRACE_NATS_URL": broker.url, "HEADRACE_PORT": str(port), "HEADRACE_HOME": str(tmp_path / "home")}
    kinds = (["worker", "guardrail"], ["worker", "engine"], ["gateway"])
    with ExitStack() as cleanup:
        for kind in kinds:
            log = cleanup.enter_context(open(tmp_path / f"{kind[-1]}.log", "ab"))
            command = [sys.executable, "-m", "scripts.cli", *kind]
            process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
        url = f"http://127.0.0.1:{port}"
        until_now(lambda: ready(url), "every process", seconds=180)
        yield url


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str) -> str:
    answer = httpx.post(url + "/v1/chat/completions", json=BODY, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.timeout(420)
def test_a_minute_without_the_broker_loses_nothing_and_ends_within_ten_seconds(broker: NatsServer, gateway: str) -> None:
    undisturbed = ask(gateway)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, gateway) for _ in range(4)]
        until_now(lambda: "headrace_gateway_in_flight_requests 4.0" in metrics(gateway), "four in flight")
        broker.kill()
        gone = time.monotonic()
        until_now(lambda: not ready(gateway), "the gateway knows")
        refused = httpx.post(gateway + "/v1/chat/completions", json=BODY, timeout=30)
        until_now(lambda: time.monotonic() - gone >= AWAY_S, "a minute", seconds=2 * AWAY_S)
        broker.start()
        back = time.monotonic()
        until_now(lambda: ready(gateway), "the gateway serves again", seconds=BACK_S)
        short = httpx.post(gateway + "/v1/chat/completions", json=BODY | {"max_tokens": 1}, timeout=60)
        took_s = time.monotonic() - back
        texts = [each.result() for each in running]
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_unavailable")
    assert short.status_code == 200
    assert took_s < BACK_S
    assert texts == [undisturbed] * 4


def metrics(url: str) -> str:
    return httpx.get(url + "/metrics", timeout=5).text
