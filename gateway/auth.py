"""Who asks. There are no keys yet: everybody is the one tenant "default", so the gateway listens to this machine
alone.

A browser is refused when the page that asks is not ours (its Origin is another host): without keys, any page that the
user visits could otherwise ask in their name.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from schemas.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request belongs to."""

    tenant: str


def authenticate(headers: Mapping[str, str]) -> Principal:
    """The one who sent these headers; HeadraceError unauthorized or forbidden."""
    origin = headers.get("origin")
    if origin is not None and not _is_ours(origin, headers.get("host", "")):
        raise HeadraceError("forbidden", "this server answers web pages of its own origin only")
    return Principal("default")


def _is_ours(origin: str, host: str) -> bool:
    """Whether a page of that origin is ours: same host, and a host of this machine, whatever a name server says it is."""
    try:
        return urlsplit(origin).netloc == host and is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on that host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
