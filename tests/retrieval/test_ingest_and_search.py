"""Files go in and answers come out: ingest_path and Searcher with the real embedder and the embedded store."""

import os
from pathlib import Path

import pytest

from schemas.envelope import Retrieval
from schemas.errors import HeadraceError
from tests.retrieval.passages import FACTS, embedder
from workers.retrieval.ingest import BATCH_CHUNKS, IngestReport, ingest_path
from workers.retrieval.search import Searcher
from workers.retrieval.store import CollectionKey, Space
from workers.retrieval.store_lancedb import LanceStore


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder with one Markdown file a fact."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text, _ in FACTS:
        (folder / name).write_text(f"# About\n\n{text}\n")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> LanceStore:
    return LanceStore(tmp_path / "passages")


def ingest(store: LanceStore, path: Path, tenant: str = "acme") -> IngestReport:
    return ingest_path(path, tenant, "facts", store, embedder(), lambda done, total: None)


def sources(store: LanceStore, query: str, mode: str = "hybrid", top_k: int = 4, tenant: str = "acme") -> list[str]:
    retrieval = Retrieval.model_validate({"collection": "facts", "top_k": top_k, "mode": mode})
    return [passage.source for passage in Searcher(store, embedder()).search(tenant, retrieval, query)]


def test_each_question_finds_its_fact_first(store: LanceStore, docs: Path) -> None:
    report = ingest(store, docs)
    assert (report.files, report.chunks, report.skipped) == (6, 6, ())
    for mode in ("hybrid", "vector"):
        assert [sources(store, question, mode)[0] for _, _, question in FACTS] == [f"docs/{name}#About" for name, _, _ in FACTS]


def test_passages_are_numbered_from_1_best_first_and_bounded_by_top_k(store: LanceStore, docs: Path) -> None:
    ingest(store, docs)
    found = Searcher(store, embedder()).search("acme", Retrieval(collection="facts", top_k=3), "Who painted the lighthouse?")
    assert [passage.number for passage in found] == [1, 2, 3]
    assert found[0].text == "# About\n\nThe Brindlemoor lighthouse was painted turquoise in 1987 by Odette Quarrie."
    assert found[0].score == pytest.approx(2 / 61)
    assert found[0].score > found[1].score >= found[2].score


def test_keyword_mode_finds_words_only(store: LanceStore, docs: Path) -> None:
    ingest(store, docs)
    assert sources(store, "zx-4417 valve", "keyword") == ["docs/codes.md#About"]
    assert sources(store, "vacation", "keyword") == []


@pytest.mark.parametrize("mode", ["hybrid", "vector", "keyword"])
def test_a_blank_query_finds_nothing_and_an_unknown_collection_is_named(store: LanceStore, docs: Path, mode: str) -> None:
    ingest(store, docs)
    assert sources(store, " \n ", mode) == []
    for query in ("lighthouse", ""):
        with pytest.raises(HeadraceError, match="'facts'") as caught:
            sources(store, query, mode, tenant="other")
        assert (caught.value.code, caught.value.param) == ("collection_not_found", "headrace.retrieval.collection")


@pytest.mark.parametrize("top_k", [0, -1, 21])
def test_top_k_out_of_bounds_is_a_clients_error(store: LanceStore, top_k: int) -> None:
    with pytest.raises(HeadraceError) as caught:
        sources(store, "x", top_k=top_k)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "headrace.retrieval.top_k")


def test_what_is_left_out_is_named_with_its_reason(store: LanceStore, docs: Path) -> None:
    (docs / "image.png").write_bytes(b"\x89PNG")
    (docs / "latin.txt").write_bytes(b"caf\xe9")
    (docs / "empty.md").write_text(" \n")
    (docs / "deep").mkdir()
    (docs / "deep" / "bom.TXT").write_bytes(b"\xef\xbb\xbfHello there.")
    (docs / ".git").mkdir()
    (docs / ".git" / "note.md").write_text("hidden")
    (docs / "linked.md").symlink_to(docs / "nowhere")
    report = ingest(store, docs)
    assert (report.files, report.chunks) == (7, 7)
    assert [(Path(skipped.path).name, skipped.reason) for skipped in report.skipped] == [
        ("empty.md", "empty"),
        ("image.png", "not one of .txt, .md"),
        ("latin.txt", "not UTF-8 (byte 3)"),
        ("linked.md", "a link that leads to no file"),
    ]
    assert str(report.skipped[0]) == f"{docs / 'empty.md'}: empty"
    assert sources(store, "Hello there", "keyword") == ["docs/deep/bom.TXT:1"]


def test_a_byte_order_mark_hides_no_heading(store: LanceStore, tmp_path: Path) -> None:
    (tmp_path / "bom.md").write_bytes(b"\xef\xbb\xbf# Greeting\n\nHello there.")
    ingest(store, tmp_path / "bom.md")
    [source] = sources(store, "hello", "keyword")
    assert source.endswith("/bom.md#Greeting")


def test_ingesting_again_replaces_and_an_emptied_file_leaves(store: LanceStore, docs: Path) -> None:
    ingest(store, docs)
    (docs / "bills.md").write_text("Invoices are paid at once.")
    (docs / "lights.md").write_text("")
    report = ingest(store, docs)
    assert (report.files, [Path(skipped.path).name for skipped in report.skipped]) == (5, ["lights.md"])
    assert sources(store, "invoices 45 turquoise", "keyword") == ["docs/bills.md:1"]
    assert store.list_collections("acme")[0].passages == 5


def test_a_file_alone_has_the_name_that_its_folder_gives_it(
    store: LanceStore, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(store, docs)
    monkeypatch.chdir(docs)
    assert ingest(store, Path("bills.md")).files == 1
    assert ingest(store, Path(".")).files == 6
    assert store.list_collections("acme")[0].passages == 6


def test_progress_counts_chunks_up_to_the_total(store: LanceStore, docs: Path) -> None:
    (docs / "long.md").write_text("".join(f"# Part {n}\n\nText.\n\n" for n in range(BATCH_CHUNKS + 5)))
    seen: list[tuple[int, int]] = []
    report = ingest_path(docs, "acme", "facts", store, embedder(), lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, report.chunks)
    assert seen[-1] == (report.chunks, report.chunks)
    assert len(seen) == 3
    assert seen == sorted(seen)


def test_nothing_to_take_in_is_a_report_and_no_path_an_error(store: LanceStore, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    report = ingest(store, tmp_path / "bare")
    assert (report.files, report.chunks, report.skipped) == (0, 0, ())
    with pytest.raises(FileNotFoundError, match="missing"):
        ingest(store, tmp_path / "missing.md")


def test_a_collection_of_another_model_is_refused(store: LanceStore, docs: Path) -> None:
    store.create_collection(CollectionKey("acme", "facts"), Space("elder-model@0", 384))
    for call in (lambda: ingest(store, docs), lambda: sources(store, "x")):
        with pytest.raises(HeadraceError, match=r"elder-model@0 .* MiniLM") as caught:
            call()
        assert caught.value.code == "invalid_value"


def test_a_document_of_many_batches_is_stored_whole(store: LanceStore, docs: Path) -> None:
    (docs / "long.md").write_text("".join(f"# Part {n}\n\nfigure{n:03} text.\n\n" for n in range(BATCH_CHUNKS + 6)))
    for _ in range(2):
        ingest(store, docs)
    assert store.list_collections("acme")[0].passages == BATCH_CHUNKS + 12
    assert sources(store, "figure000", "keyword") == ["docs/long.md#Part 0"]
    assert sources(store, "figure069", "keyword") == ["docs/long.md#Part 69"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(store: LanceStore, docs: Path) -> None:
    (docs / "bills.md").chmod(0)
    assert [skipped.reason for skipped in ingest(store, docs).skipped] == ["cannot be read: Permission denied"]
