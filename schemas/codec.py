"""Bytes on the broker: one version byte, then one msgpack map. The only file that packs or unpacks.

Raises CodecError for what cannot be a message of ours; never anything else, whatever the bytes.
"""

from typing import Any

import msgpack

from schemas.limits import PAYLOAD_BYTES_MAX

VERSION = 1


class CodecError(ValueError):
    """The bytes are not a message of this version, or the message is over the broker's limit."""


def pack(value: dict[str, Any]) -> bytes:
    """Packs one map; CodecError when the result is over PAYLOAD_BYTES_MAX or a text has lone surrogates."""
    try:
        body: bytes = msgpack.packb(value, use_bin_type=True)
    except UnicodeEncodeError as error:
        raise CodecError(f"message holds text that is not Unicode: {error.reason}") from error
    if len(body) + 1 > PAYLOAD_BYTES_MAX:
        raise CodecError(f"message of {len(body) + 1} bytes is over the limit of {PAYLOAD_BYTES_MAX} bytes")
    return bytes((VERSION,)) + body


def unpack(data: bytes) -> dict[str, Any]:
    """Unpacks one map; CodecError on anything else."""
    if len(data) > PAYLOAD_BYTES_MAX:
        raise CodecError(f"message of {len(data)} bytes is over the limit of {PAYLOAD_BYTES_MAX} bytes")
    if not data or data[0] != VERSION:
        found = data[0] if data else "nothing"
        raise CodecError(f"message of version {found}, this process reads version {VERSION}")
    try:
        value = msgpack.unpackb(data[1:], raw=False, strict_map_key=True)
    except Exception as error:
        raise CodecError(f"message is not msgpack: {error}") from error
    if not isinstance(value, dict):
        raise CodecError(f"message is a {type(value).__name__}, not a map")
    return value
