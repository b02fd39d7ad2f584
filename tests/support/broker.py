"""A real nats-server for one test: started on a free port, killed and restarted at will."""

import socket
import subprocess
import time
from pathlib import Path

from scripts import broker


class NatsServer:
    """One server and its store; the port stays the same over restarts."""

    def __init__(self, home: Path) -> None:
        self.port = broker.free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._configuration = broker.write_configuration(home, self.port, memory_mb=1024)
        self._log = home / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and returns when it accepts connections."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen([broker.binary(), "-c", self._configuration], stdout=log, stderr=log)
        give_up = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=0.2).close()
                return
            except OSError:
                assert time.monotonic() < give_up, self._log.read_text()
                time.sleep(0.01)  # polls a condition, with a deadline

    def kill(self) -> None:
        """SIGKILL: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
