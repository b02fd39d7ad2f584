"""Where the gateway listens: a socket of its own, or one that its supervisor keeps open through restarts.

The supervisor imports this too, so it stays light.
"""

import socket
import sys

from gateway.auth import is_loopback
from schemas.limits import GIVEN_UP_S, SLOW_READER_S


class StartError(Exception):
    """The gateway cannot listen; the message is one line for the operator. status is the process's exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def inherit(descriptor: int) -> socket.socket:
    """The listener that the supervisor keeps open through our restarts: who connects meanwhile waits in its queue."""
    try:
        listener = socket.socket(fileno=descriptor)
        listening = bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        raise StartError(f"listen_fd {descriptor} is no open socket: {error.strerror or error}", 2) from error
    if not listening:
        listener.detach()  # whose it is, we do not know
        raise StartError(f"listen_fd {descriptor} is a socket that does not listen", 2)
    listener.setblocking(False)
    return listener


def listen(host: str, port: int) -> socket.socket:
    """A bound listener; StartError when the address is taken, or reaches beyond this machine."""
    if not is_loopback(host):
        message = f"host {host} can be reached from other machines, and there are no API keys yet; use 127.0.0.1"
        raise StartError(message, 2)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}", 1) from error
    listener.setblocking(False)
    if sys.platform == "linux":  # a peer that takes nothing for longer than our own patience is dropped by the kernel
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((SLOW_READER_S + 2 * GIVEN_UP_S) * 1000))
    return listener
