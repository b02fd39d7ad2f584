"""What every PassageStore must do, written once.

A store's test file subclasses PassageStoreSuite and gives two fixtures: `store`, empty, and `second`, another store object
on the same data, as another process would have.
"""

from collections.abc import Callable

import numpy as np
import pytest

from schemas.errors import HeadraceError
from workers.retrieval.chunker import Chunk
from workers.retrieval.store import CollectionKey, PassageStore, Space, Vectors

SPACE = Space("test-model@1", 4)
KEY = CollectionKey("acme", "handbook")


def chunk(document: str, position: int, text: str) -> Chunk:
    return Chunk(document, position, f"{document}:{position + 1}", text)


def vectors(*rows: tuple[float, float, float, float]) -> Vectors:
    return np.array(rows, np.float32).reshape(-1, 4)


EAST, NORTH, UP = (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)


def texts(store: PassageStore, key: CollectionKey = KEY) -> list[str]:
    """All passages of a small collection."""
    return sorted(hit.text for hit in store.search_vector(key, SPACE, vectors(EAST)[0], 100))


class PassageStoreSuite:
    """Each test is one promise of the PassageStore protocol."""

    @pytest.fixture
    def filled(self, store: PassageStore) -> PassageStore:
        """KEY with three passages of two documents."""
        store.create_collection(KEY, SPACE)
        chunks = [
            chunk("a.md", 0, "The lighthouse is turquoise."),
            chunk("a.md", 1, "Its lamps burn whale oil."),
            chunk("b.md", 0, "Invoices are paid within 45 days."),
        ]
        store.upsert(KEY, SPACE, chunks, vectors(EAST, NORTH, UP))
        return store

    def test_vector_search_finds_the_nearest_first_with_its_cosine(self, filled: PassageStore) -> None:
        hits = filled.search_vector(KEY, SPACE, vectors((0.8, 0.6, 0.0, 0.0))[0], 2)
        assert [hit.text for hit in hits] == ["The lighthouse is turquoise.", "Its lamps burn whale oil."]
        assert [hit.score for hit in hits] == pytest.approx([0.8, 0.6], abs=1e-5)
        assert [hit.source for hit in hits] == ["a.md:1", "a.md:2"]

    def test_keyword_search_finds_words_in_any_case_and_inflection(self, filled: PassageStore) -> None:
        assert [hit.source for hit in filled.search_keyword(KEY, "LAMP", 5)] == ["a.md:2"]
        assert [hit.source for hit in filled.search_keyword(KEY, "invoice 45", 5)] == ["b.md:1"]

    def test_keyword_search_takes_any_text_as_words(self, filled: PassageStore) -> None:
        assert filled.search_keyword(KEY, "nowhere", 5) == ()
        for text in ("", "   ", "?!", "the of"):
            assert filled.search_keyword(KEY, text, 5) == ()
        for text in ('"lamps', "lamps AND (", "lamps* -x^2", "source:lamps OR 1=1; --", "\x00lamps"):
            assert [hit.source for hit in filled.search_keyword(KEY, text, 5)] == ["a.md:2"]

    def test_both_searches_give_a_passage_the_same_id(self, filled: PassageStore) -> None:
        by_vector = filled.search_vector(KEY, SPACE, vectors(NORTH)[0], 1)
        by_keyword = filled.search_keyword(KEY, "lamps", 1)
        assert by_vector[0].id == by_keyword[0].id

    def test_k_bounds_the_hits_and_may_be_more_than_there_are(self, filled: PassageStore) -> None:
        assert len(filled.search_vector(KEY, SPACE, vectors(EAST)[0], 1)) == 1
        assert len(filled.search_vector(KEY, SPACE, vectors(EAST)[0], 50)) == 3
        assert len(filled.search_keyword(KEY, "lighthouse lamps invoices", 2)) == 2

    def test_an_empty_collection_is_searched_and_finds_nothing(self, store: PassageStore) -> None:
        store.create_collection(KEY, SPACE)
        assert store.search_vector(KEY, SPACE, vectors(EAST)[0], 4) == ()
        assert store.search_keyword(KEY, "lamps", 4) == ()

    def test_upserting_a_document_again_replaces_all_its_passages_and_no_others(self, filled: PassageStore) -> None:
        filled.upsert(KEY, SPACE, [chunk("a.md", 0, "The lighthouse is gone.")], vectors(NORTH))
        assert texts(filled) == ["Invoices are paid within 45 days.", "The lighthouse is gone."]
        assert filled.search_keyword(KEY, "turquoise lamps", 5) == ()

    def test_upserting_the_same_twice_makes_no_doubles(self, filled: PassageStore) -> None:
        for _ in range(2):
            filled.upsert(KEY, SPACE, [chunk("c.md", 0, "Once."), chunk("c.md", 1, "Only.")], vectors(EAST, UP))
        assert texts(filled).count("Once.") == 1
        assert len(texts(filled)) == 5

    def test_upserting_nothing_changes_nothing(self, filled: PassageStore) -> None:
        filled.upsert(KEY, SPACE, [], vectors())
        assert len(texts(filled)) == 3

    def test_remove_takes_out_one_document_and_is_content_with_none(self, filled: PassageStore) -> None:
        filled.remove(KEY, "a.md")
        filled.remove(KEY, "never-there.md")
        assert texts(filled) == ["Invoices are paid within 45 days."]

    def test_a_document_name_is_data_in_every_language(self, filled: PassageStore) -> None:
        name = "o'brien\" OR 1=1 -- %_\\ é.md"
        filled.upsert(KEY, SPACE, [chunk(name, 0, "Quoted.")], vectors(EAST))
        filled.upsert(KEY, SPACE, [chunk(name, 0, "Quoted again.")], vectors(EAST))
        assert len(texts(filled)) == 4
        filled.remove(KEY, name)
        assert len(texts(filled)) == 3

    def test_another_store_object_sees_an_upsert_at_once(self, filled: PassageStore, second: PassageStore) -> None:
        assert len(texts(second)) == 3
        filled.upsert(KEY, SPACE, [chunk("new.md", 0, "Fresh herring.")], vectors(EAST))
        assert [hit.source for hit in second.search_keyword(KEY, "herring", 3)] == ["new.md:1"]
        assert "Fresh herring." in texts(second)

    def test_another_store_object_sees_a_collection_that_was_dropped_and_made_again(
        self, filled: PassageStore, second: PassageStore
    ) -> None:
        assert len(texts(second)) == 3
        filled.drop_collection(KEY)
        filled.create_collection(KEY, SPACE)
        filled.upsert(KEY, SPACE, [chunk("z.md", 0, "Second life.")], vectors(UP))
        assert texts(second) == ["Second life."]

    def test_optimize_changes_no_answer(self, filled: PassageStore) -> None:
        before = filled.search_keyword(KEY, "lamps turquoise", 5), texts(filled)
        filled.optimize(KEY)
        after = filled.search_keyword(KEY, "lamps turquoise", 5), texts(filled)
        assert [hit.id for hit in after[0]] == [hit.id for hit in before[0]]
        assert after[1] == before[1]

    @pytest.mark.parametrize("other", ["acme2", "ACME", "acme.handbook", "", "a" * 300, "acme/../acme", "ácme"])
    def test_tenants_never_meet(self, filled: PassageStore, other: str) -> None:
        key = CollectionKey(other, KEY.collection)
        with pytest.raises(HeadraceError) as caught:
            filled.search_keyword(key, "lamps", 5)
        assert caught.value.code == "collection_not_found"
        filled.create_collection(key, SPACE)
        filled.upsert(key, SPACE, [chunk("a.md", 0, "Another house.")], vectors(EAST))
        assert texts(filled, key) == ["Another house."]
        assert len(texts(filled)) == 3
        assert [collection.name for collection in filled.list_collections(other)] == ["handbook"]

    def test_an_unknown_collection_is_named_by_every_call(self, store: PassageStore) -> None:
        key = CollectionKey("acme", "atlantis")
        calls: list[Callable[[], object]] = [
            lambda: store.search_vector(key, SPACE, vectors(EAST)[0], 1),
            lambda: store.search_keyword(key, "x", 1),
            lambda: store.upsert(key, SPACE, [chunk("a", 0, "x")], vectors(EAST)),
            lambda: store.remove(key, "a"),
            lambda: store.optimize(key),
            lambda: store.drop_collection(key),
        ]
        for call in calls:
            with pytest.raises(HeadraceError, match="atlantis") as caught:
                call()
            assert (caught.value.code, caught.value.param) == ("collection_not_found", "headrace.retrieval.collection")

    @pytest.mark.parametrize("name", ["", "Handbook", "../up", "a b", "-a", "a.b", "a" * 65, "é", "a\n", "\ud800"])
    def test_a_bad_name_is_refused_at_creation_and_not_found_elsewhere(self, store: PassageStore, name: str) -> None:
        with pytest.raises(HeadraceError) as refused:
            store.create_collection(CollectionKey("acme", name), SPACE)
        assert (refused.value.code, refused.value.param) == ("invalid_value", "headrace.retrieval.collection")
        with pytest.raises(HeadraceError) as missing:
            store.search_keyword(CollectionKey("acme", name), "x", 1)
        assert missing.value.code == "collection_not_found"

    @pytest.mark.parametrize("name", ["a", "0", "a-b_c", "z" * 64])
    def test_a_good_name_of_1_to_64_characters_is_taken(self, store: PassageStore, name: str) -> None:
        store.create_collection(CollectionKey("acme", name), SPACE)
        assert [collection.name for collection in store.list_collections("acme")] == [name]

    def test_creating_again_keeps_the_passages(self, filled: PassageStore) -> None:
        filled.create_collection(KEY, SPACE)
        assert len(texts(filled)) == 3

    @pytest.mark.parametrize("other", [Space("other-model@2", 4), Space("test-model@1", 8)])
    def test_another_embedding_space_is_refused_and_both_models_named(self, filled: PassageStore, other: Space) -> None:
        row = np.ones((1, other.dimensions), np.float32)
        calls: list[Callable[[], object]] = [
            lambda: filled.create_collection(KEY, other),
            lambda: filled.upsert(KEY, other, [chunk("a", 0, "x")], row),
            lambda: filled.search_vector(KEY, other, row[0], 1),
        ]
        for call in calls:
            with pytest.raises(HeadraceError, match=rf"test-model@1 of 4 .* {other.model} of {other.dimensions}:") as caught:
                call()
            assert (caught.value.code, caught.value.param) == ("invalid_value", "headrace.retrieval.collection")
        assert len(texts(filled)) == 3

    def test_collections_are_listed_by_name_with_space_and_size_until_dropped(self, filled: PassageStore) -> None:
        filled.create_collection(CollectionKey("acme", "annex"), Space("other-model@2", 8))
        listed = filled.list_collections("acme")
        assert [(c.name, c.space, c.passages) for c in listed] == [
            ("annex", Space("other-model@2", 8), 0),
            ("handbook", SPACE, 3),
        ]
        filled.drop_collection(KEY)
        assert [collection.name for collection in filled.list_collections("acme")] == ["annex"]
        assert filled.list_collections("nobody") == ()

    def test_more_collections_than_a_page_are_listed(self, store: PassageStore) -> None:
        names = [f"c{number:02}" for number in range(25)]
        for name in names:
            store.create_collection(CollectionKey("acme", name), SPACE)
        assert [collection.name for collection in store.list_collections("acme")] == names
