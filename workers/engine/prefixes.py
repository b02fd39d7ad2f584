"""What a full block of computed tokens is called: a digest chained over all before it, so equal names mean equal prefixes.

The root is salted by tenant: no tenant ever reads, or finds out by timing, what another one's prompts held. Hash chains over
blocks are the field's usual prefix cache; here a name is never trusted alone, the block's token ids are compared too.
"""

from array import array
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Prefix:
    """A full block's contents: its own token ids, after everything that the parent's digest stands for."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def root(tenant: str) -> bytes:
    """What the first block of any of the tenant's sequences comes after."""
    return blake2b(tenant.encode(), digest_size=DIGEST_BYTES, person=b"tenant").digest()


def follow(parent: bytes, token_ids: tuple[int, ...]) -> Prefix:
    """The prefix that is longer by one block."""
    digest = blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, person=b"block").digest()
    return Prefix(digest, parent, token_ids)
