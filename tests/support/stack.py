"""One whole stack, started as a user starts it: `headrace up`, in a home of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class RunningStack:
    """`headrace up` as a child process; url and pids come from the state file that it writes when it is ready."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.home = home
        self.environment = os.environ | {"HEADRACE_HOME": str(home)} | settings
        self._log = open(home.with_suffix(".log"), "ab")  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.cli", "up", "--port", "0"],
            env=self.environment,
            stdout=self._log,
            stderr=self._log,
        )
        state = self._wait_ready(180.0)
        self.url: str = state["url"]
        self.nats_url: str = state["nats_url"]

    def _wait_ready(self, seconds: float) -> dict[str, str]:
        give_up = time.monotonic() + seconds
        while not (self.home / "run.json").exists():
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < give_up, self.said()
            time.sleep(0.05)  # polls a condition, with a deadline
        state: dict[str, str] = json.loads((self.home / "run.json").read_text())
        return state

    def pid(self, name: str) -> int | None:
        """The process id of one child (`nats`, `gateway`, `worker-engine`, ...), if it lives; it changes with each restart."""
        pids: dict[str, int] = json.loads((self.home / "run.json").read_text())["pids"]
        return pids.get(name)

    def kill(self, name: str) -> None:
        """SIGKILL to one child; the supervisor starts another."""
        pid = self.pid(name)
        assert pid is not None, f"{name} is not running"
        os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        """What `headrace up` printed, and the ends of its children's logs."""
        ends = [f"--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted((self.home / "logs").glob("*.log"))]
        return "\n".join([self.home.with_suffix(".log").read_text(), *ends])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a headrace sub-command in the same home."""
        return subprocess.run(
            [sys.executable, "-m", "scripts.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def stop(self) -> int:
        """Asks for a drain and returns the exit status."""
        self._process.send_signal(signal.SIGINT)
        status = self._process.wait(60)
        self._log.close()
        return status
