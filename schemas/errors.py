"""Every error that a client may see, and what each means on every surface.

HeadraceError
├── whose fault: client    malformed_request, unknown_field, invalid_value, model_not_found, collection_not_found,
│                          context_length_exceeded, payload_too_large, content_blocked, unauthorized, forbidden,
│                          not_found, method_not_allowed, idempotency_conflict, replay_expired, cancelled
├── whose fault: busy      overloaded, queue_timeout, deadline_exceeded
└── whose fault: fault     stage_unavailable, replay_diverged, attempts_exhausted, slow_reader, shutting_down, internal

A client's fault is answered at once and never retried by us. Busy is nobody's fault: the same call may succeed later.
A fault is ours: the work moves to another worker, and only after the last attempt does the client see it.
"""

from dataclasses import dataclass
from typing import Literal

Whose = Literal["client", "busy", "fault"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one error code means: HTTP status, WebSocket close code, OpenAI error type, retryable, whose fault."""

    status: int
    close: int
    kind: str
    retryable: bool
    whose: Whose


_REQUEST = "invalid_request_error"
_SERVER = "server_error"

MEANINGS: dict[str, Meaning] = {
    "malformed_request": Meaning(400, 4400, _REQUEST, False, "client"),
    "unknown_field": Meaning(400, 4400, _REQUEST, False, "client"),
    "invalid_value": Meaning(400, 4400, _REQUEST, False, "client"),
    "context_length_exceeded": Meaning(400, 4400, _REQUEST, False, "client"),
    "content_blocked": Meaning(400, 4400, _REQUEST, False, "client"),
    "unauthorized": Meaning(401, 4401, "authentication_error", False, "client"),
    "forbidden": Meaning(403, 4403, "permission_error", False, "client"),
    "not_found": Meaning(404, 4404, _REQUEST, False, "client"),
    "model_not_found": Meaning(404, 4404, _REQUEST, False, "client"),
    "collection_not_found": Meaning(404, 4404, _REQUEST, False, "client"),
    "method_not_allowed": Meaning(405, 4405, _REQUEST, False, "client"),
    "idempotency_conflict": Meaning(409, 4409, _REQUEST, False, "client"),
    "replay_expired": Meaning(410, 4410, _REQUEST, False, "client"),
    "payload_too_large": Meaning(413, 4413, _REQUEST, False, "client"),
    "cancelled": Meaning(499, 4499, "cancelled", False, "client"),
    "overloaded": Meaning(429, 4429, "rate_limit_error", True, "busy"),
    "queue_timeout": Meaning(503, 4503, _SERVER, True, "busy"),
    "deadline_exceeded": Meaning(504, 4504, "timeout", True, "busy"),
    "stage_unavailable": Meaning(503, 4503, _SERVER, True, "fault"),
    "shutting_down": Meaning(503, 4503, _SERVER, True, "fault"),
    "slow_reader": Meaning(503, 4508, _SERVER, True, "fault"),
    "replay_diverged": Meaning(500, 4500, _SERVER, True, "fault"),
    "attempts_exhausted": Meaning(500, 4500, _SERVER, True, "fault"),
    "internal": Meaning(500, 4500, _SERVER, True, "fault"),
}


class HeadraceError(Exception):
    """A typed failure that ends one request.

    code is a key of MEANINGS; message is one sentence for the client that names what is wrong; param is the request
    field at fault, if one is.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        if code not in MEANINGS:
            raise KeyError(f"error code {code!r} has no meaning; known: {', '.join(sorted(MEANINGS))}")
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @property
    def meaning(self) -> Meaning:
        """What the code means on every surface."""
        return MEANINGS[self.code]
