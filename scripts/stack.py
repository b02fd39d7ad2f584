"""The embedded stack: a broker and one process of each kind, supervised.

A child that dies is started again after a backoff; what it held goes on elsewhere or in its successor. The gateway's
listener is ours, so that whoever connects while it restarts waits a moment, and is not refused. Stopping has an order: the
gateway first (it finishes its clients' streams, which needs the workers), then the workers, the broker last.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.listener import listen
from runtime.patience import backoff_s
from runtime.settings import PREFIX, Settings
from scripts import broker

STEADY_S = 30.0  # a child that lived this long starts with no failures counted


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    inherits: tuple[int, ...] = ()  # file descriptors
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    failures: int = 0
    start_at_s: float = field(default=0.0)


class Stack:
    """Starts, supervises and stops the processes. Not thread-safe: one thread calls start, tend and stop.

    gateway.listener.StartError when the port cannot be had.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._say = say
        self.home = settings.home
        self._host = settings.host
        self._listener = listen(settings.host, settings.port)
        self.port: int = self._listener.getsockname()[1]
        nats_port = broker.free_port()
        self.nats_url = f"nats://127.0.0.1:{nats_port}"
        self._log_folder = self.home / "logs"
        self._log_folder.mkdir(parents=True, exist_ok=True)
        configuration = broker.write_configuration(self.home, nats_port, settings.broker_memory_mb)
        own = settings.model_copy(update={"nats_url": self.nats_url, "port": self.port, "listen_fd": self._listener.fileno()})
        self._environment = os.environ | own.environment() | {PREFIX + "NATS_URL": self.nats_url}
        python = [sys.executable, "-m", "scripts.cli"]
        self.children = [
            Child("nats", [str(broker.binary()), "-c", str(configuration)]),
            Child("worker-guardrail", [*python, "worker", "guardrail"]),
            Child("worker-retrieval", [*python, "worker", "retrieval"]),
            *(Child(name, [*python, "worker", "engine"]) for name in _engine_names(settings.engines)),
            Child("gateway", [*python, "gateway"], (self._listener.fileno(),)),
        ]

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def log_of(self, name: str) -> Path:
        """The file that a child's output goes to."""
        return self._log_folder / f"{name}.log"

    def start(self) -> None:
        """Starts every process; returns at once."""
        for child in self.children:
            self._start(child)

    def tend(self) -> bool:
        """Starts again what has died, and says whether anything changed; to be called a few times a second."""
        now, changed = time.monotonic(), False
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                self._note_death(child, now)
                changed = True
            if child.process is None and now >= child.start_at_s:
                self._start(child)
                changed = True
        return changed

    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that live."""
        return {child.name: child.process.pid for child in self.children if child.process is not None}

    def stop(self, patience_s: float) -> None:
        """Stops everything in order, each kind within patience_s, then by force."""
        self._listener.close()
        for kind in ("gateway", "worker", "nats"):
            running = [c.process for c in self.children if c.name.startswith(kind) and c.process is not None]
            for process in running:
                process.send_signal(signal.SIGTERM)
            give_up = time.monotonic() + patience_s
            for process in running:
                try:
                    process.wait(max(0.1, give_up - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def kill(self) -> None:
        """Ends everything at once."""
        self._listener.close()
        for child in self.children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()

    def _start(self, child: Child) -> None:
        with open(self.log_of(child.name), "ab") as log:
            child.process = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=child.inherits,
                start_new_session=True,  # Ctrl-C is ours to pass on, in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        child.started_s = time.monotonic()

    def _note_death(self, child: Child, now: float) -> None:
        assert child.process is not None
        child.failures = 1 if now - child.started_s > STEADY_S else child.failures + 1
        child.start_at_s = now + backoff_s(child.failures, base=0.2, most=10.0)
        self._say(f"{child.name} {self._cause(child.name, child.process.returncode)}; starting it again")
        child.process = None

    def _cause(self, name: str, status: int) -> str:
        if status < 0:
            return f"was ended by signal {-status}"
        if status == 0:
            return "was told to stop"
        lines = self.log_of(name).read_text(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1][:200] if lines else 'it said nothing'}"


def _engine_names(engines: int) -> list[str]:
    """worker-engine, and worker-engine-2 and so on for more than one."""
    return ["worker-engine", *(f"worker-engine-{number}" for number in range(2, engines + 1))]


def _die_with_parent() -> None:
    """Asks the kernel to end this child when the supervisor is killed: no orphan keeps the broker's store open."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
