"""One search: a query and what the request asked for in, numbered passages out. Knows no store and no broker."""

from typing import Protocol, assert_never

from schemas.envelope import Retrieval
from schemas.errors import HeadraceError
from schemas.events import Passage
from schemas.limits import TOP_K_PASSAGES_MAX
from workers.retrieval.fusion import fuse
from workers.retrieval.store import CollectionKey, Hit, PassageStore, Space, Vectors

# How deep each ranking is read before two are fused: a passage that is 10th in both beats one that one search found.
CANDIDATES_PER_PASSAGE = 4
CANDIDATES_MIN = 20


class Embeds(Protocol):
    """What a search needs of an embedder."""

    @property
    def space(self) -> Space:
        """The embedding space."""

    def embed(self, texts: list[str]) -> Vectors:
        """Vectors of the texts, float32 [len(texts), dimensions]."""


class Searcher:
    """Searches one store with one embedder. Synchronous; may be called from several threads."""

    def __init__(self, store: PassageStore, embedder: Embeds) -> None:
        self._store = store
        self._embedder = embedder

    def search(self, tenant: str, retrieval: Retrieval, query: str) -> tuple[Passage, ...]:
        """The best passages of the tenant's collection, numbered from 1, the best first; none for a blank query.

        Scores are cosine similarity (vector), BM25 (keyword) or fused ranks (hybrid). Raises HeadraceError
        collection_not_found, and invalid_value for top_k or for a collection of another embedding model.
        """
        k = retrieval.top_k
        if not 1 <= k <= TOP_K_PASSAGES_MAX:
            message = f"top_k is {k}, it must be 1 to {TOP_K_PASSAGES_MAX}"
            raise HeadraceError("invalid_value", message, "headrace.retrieval.top_k")
        hits = self._hits(CollectionKey(tenant, retrieval.collection), retrieval, query.strip())
        return tuple(Passage(number, hit.source, hit.text, hit.score) for number, hit in enumerate(hits[:k], 1))

    def _hits(self, key: CollectionKey, retrieval: Retrieval, query: str) -> tuple[Hit, ...]:
        match retrieval.mode:
            case "vector":
                return self._by_vector(key, query, retrieval.top_k)
            case "keyword":
                return self._by_keyword(key, query, retrieval.top_k)
            case "hybrid":
                depth = max(CANDIDATES_MIN, CANDIDATES_PER_PASSAGE * retrieval.top_k)
                return _fused(self._by_vector(key, query, depth), self._by_keyword(key, query, depth))
            case _:
                assert_never(retrieval.mode)

    def _by_vector(self, key: CollectionKey, query: str, k: int) -> tuple[Hit, ...]:
        hits = self._store.search_vector(key, self._embedder.space, self._embedder.embed([query])[0], k)
        return hits if query else ()

    def _by_keyword(self, key: CollectionKey, query: str, k: int) -> tuple[Hit, ...]:
        return self._store.search_keyword(key, query, k)


def _fused(*rankings: tuple[Hit, ...]) -> tuple[Hit, ...]:
    hits = {hit.id: hit for ranking in rankings for hit in ranking}
    fused = fuse([[hit.id for hit in ranking] for ranking in rankings])
    return tuple(Hit(id, hits[id].source, hits[id].text, score) for id, score in fused)
