"""`<request>:<index>`: the id of a durable server-sent event, and what a client sends back to go on after it."""

from schemas.errors import HeadraceError
from schemas.subjects import is_request_id

HEADER = "Last-Event-ID"


def token_index(text: str, param: str) -> int:
    """The index in a client's text; HeadraceError invalid_value names param."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise HeadraceError("invalid_value", f"{param}: a token index is wanted, got {text[:64]!r}", param)
    return int(text)


def parse(text: str) -> tuple[str, int]:
    """The request, and the first token that the client does not have."""
    request, _, index = text.partition(":")
    if not is_request_id(request):
        raise HeadraceError("invalid_value", f"{HEADER}: <request>:<index> is wanted, got {text[:64]!r}", HEADER)
    return request, token_index(index, HEADER)
