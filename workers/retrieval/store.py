"""What a passage store promises, and the checks that every store makes alike.

A collection belongs to a tenant and to an embedding space: it is named by both halves of its key, so tenants never
meet, and it holds vectors of one model only. Stores are synchronous and safe to call from several threads; ingest and
search may be different processes, and a search sees every upsert that ended before it began. One suite in
tests/contracts runs on every store.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from schemas import subjects
from schemas.errors import HeadraceError
from workers.retrieval.chunker import Chunk

PARAM = "headrace.retrieval.collection"

Vectors = NDArray[np.float32]


class CollectionKey(NamedTuple):
    """A collection of a tenant."""

    tenant: str
    collection: str


class Space(NamedTuple):
    """Where vectors can be compared: the embedding model's id and its dimensions."""

    model: str
    dimensions: int


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection as list_collections shows it."""

    name: str
    space: Space
    passages: int


@dataclass(frozen=True, slots=True)
class Hit:
    """One found passage. id is the same in every search of the collection; score is higher for a better match."""

    id: str
    source: str
    text: str
    score: float


class PassageStore(Protocol):
    """Collections of passages. Calls on a collection that is not there raise HeadraceError collection_not_found."""

    def create_collection(self, key: CollectionKey, space: Space) -> None:
        """Makes an empty collection; one that is there stays as it is.

        Raises HeadraceError invalid_value for a bad name, or when the collection is there in another space.
        """

    def list_collections(self, tenant: str) -> tuple[Collection, ...]:
        """The tenant's collections by name."""

    def drop_collection(self, key: CollectionKey) -> None:
        """Removes a collection with all its passages."""

    def upsert(self, key: CollectionKey, space: Space, chunks: Sequence[Chunk], vectors: Vectors) -> None:
        """Stores chunks; vectors is float32 [len(chunks), space.dimensions].

        Every document that the chunks name is replaced as a whole and at once: a search sees its old passages or its
        new ones. Raises HeadraceError invalid_value when the collection is of another space.
        """

    def remove(self, key: CollectionKey, document: str) -> None:
        """Removes a document's passages; nothing when there are none."""

    def optimize(self, key: CollectionKey) -> None:
        """Folds what was added into the indexes. Searches are right without it, and faster after it."""

    def search_vector(self, key: CollectionKey, space: Space, vector: Vectors, k: int) -> tuple[Hit, ...]:
        """The k nearest passages to a vector, float32 [dimensions]; score is the cosine similarity.

        Raises HeadraceError invalid_value when the collection is of another space.
        """

    def search_keyword(self, key: CollectionKey, text: str, k: int) -> tuple[Hit, ...]:
        """The k best passages that share a word with text (BM25); text is words, never a query language."""


def is_name(name: str) -> bool:
    """Whether a collection may be called name."""
    return name.isascii() and subjects.slug(name) == name


def check_name(name: str) -> None:
    """Raises HeadraceError invalid_value unless name may be a collection's."""
    if not is_name(name):
        message = f"collection name {_shown(name)} is not 1 to 64 of a-z, 0-9, '_' and '-', the first a letter or digit"
        raise HeadraceError("invalid_value", message, PARAM)


def check_space(key: CollectionKey, stored: Space, given: Space) -> None:
    """Raises HeadraceError invalid_value when vectors of given cannot be compared with the collection's."""
    if stored != given:
        message = (
            f"collection {key.collection!r} was made with embedding model {stored.model} of {stored.dimensions} "
            f"dimensions, and this process embeds with {given.model} of {given.dimensions}: drop it and ingest it again"
        )
        raise HeadraceError("invalid_value", message, PARAM)


def check_vectors(space: Space, chunks: Sequence[Chunk], vectors: Vectors) -> None:
    """Asserts that there is one finite vector of the space for each chunk."""
    expected = (len(chunks), space.dimensions)
    assert vectors.shape == expected, f"vectors of shape {vectors.shape}, expected {expected}"
    assert np.isfinite(vectors).all(), "vectors hold a number that is not finite"


def not_found(key: CollectionKey) -> HeadraceError:
    """The error for a collection that this tenant does not have."""
    return HeadraceError("collection_not_found", f"there is no collection {_shown(key.collection)}", PARAM)


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:80] + "...")


def passage_id(chunk: Chunk) -> str:
    """The passage's id inside its collection: 32 hexadecimal digits of its document and position."""
    return hashlib.sha256(f"{chunk.document}\0{chunk.position}".encode(errors="surrogatepass")).hexdigest()[:32]
