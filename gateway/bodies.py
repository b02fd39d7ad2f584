"""A client's bytes as JSON values, strictly: bounded, UTF-8, no duplicate keys, no NaN. Every fault is the client's,
by name.
"""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from schemas.errors import HeadraceError
from schemas.limits import BODY_BYTES_MAX
from schemas.requests import path_of

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _DuplicateKey(Exception):
    pass


class _Duplicated:
    """Stands where an object has the same key twice."""

    def __init__(self, key: str) -> None:
        self.key = key


async def read_body(chunks: AsyncIterator[bytes], announced: str | None) -> bytes:
    """The whole body; HeadraceError payload_too_large as soon as it is over BODY_BYTES_MAX."""
    if announced is not None and announced.isdigit() and int(announced) > BODY_BYTES_MAX:
        raise too_large(int(announced))
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise too_large(len(body))
    return bytes(body)


def too_large(found: int) -> HeadraceError:
    """A body of found bytes or more."""
    return HeadraceError("payload_too_large", f"the body has {found} bytes or more; the limit is {BODY_BYTES_MAX}")


def loads(data: bytes | str) -> Any:
    """The JSON value in data; HeadraceError malformed_request or, for a repeated key, invalid_value at its path."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = _parse(text)
        if _SURROGATE.search(text):
            _refuse_lone_surrogates(value)
        return value
    except UnicodeDecodeError as error:
        raise HeadraceError("malformed_request", f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise HeadraceError("malformed_request", f"the body is not JSON: {error}") from None
    except _DuplicateKey:
        path = _path_of_duplicate(text)
        raise HeadraceError("invalid_value", f"{path}: this key is there twice", path) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, NaN, a very deep nest
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise HeadraceError("malformed_request", f"the body is not JSON that we take: {reason}") from None


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKey
    return found


def _refuse_lone_surrogates(value: Any) -> None:
    """Half a character (an escape like \\ud800 alone) cannot be sent on as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise HeadraceError("malformed_request", "the body holds half a character (a lone surrogate)") from None


def _path_of_duplicate(text: str) -> str:
    """Where the first repeated key is; malformed_request where what follows it is not JSON either."""
    try:
        return _duplicate_path(text)
    except (ValueError, RecursionError):
        raise HeadraceError("malformed_request", "the body is not JSON that we take, and repeats a key") from None


def _duplicate_path(text: str) -> str:
    """Where the first repeated key is."""

    def mark(pairs: list[tuple[str, Any]]) -> object:
        repeated = _first_repeated(pairs)
        return dict(pairs) if repeated is None else _Duplicated(repeated)

    return path_of(_find(json.loads(text, object_pairs_hook=mark)) or ())


def _first_repeated(pairs: list[tuple[str, Any]]) -> str | None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def _find(value: object) -> tuple[int | str, ...] | None:
    if isinstance(value, _Duplicated):
        return (value.key[:64],)
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found = _find(child)
        if found is not None:
            return (key, *found)
    return None
