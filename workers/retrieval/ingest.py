"""Files into a collection: read, cut, embed, store. What is left out is named with its reason.

A document's name is its path from the parent of the folder that was given (docs/guide.md for guide.md in docs), so the
same folder, or a file directly in it, ingested again replaces its own passages. What has left the folder stays stored.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workers.retrieval.chunker import Chunk, chunk_document
from workers.retrieval.search import Embeds
from workers.retrieval.store import CollectionKey, PassageStore, Vectors

SUFFIXES = (".txt", ".md")
BATCH_CHUNKS = 64  # embedded at once, and the step of progress
COMMIT_CHUNKS = 512  # whole documents are stored together until they have this many chunks

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was left out, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What one ingest did."""

    files: int
    chunks: int
    seconds: float
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    """The chunks by document, the documents that are empty now, and every file that was left out."""

    documents: tuple[tuple[Chunk, ...], ...]
    emptied: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def ingest_path(
    path: Path, tenant: str, collection: str, store: PassageStore, embedder: Embeds, progress: Progress
) -> IngestReport:
    """Ingests a .txt or .md file, or all below a folder, into a collection, which is made if it is not there.

    progress(done, total) counts chunks: once at the start, then after each batch. Hidden files and folders are left out
    without being named. Raises FileNotFoundError for a path that is not there, and what PassageStore raises.
    """
    started = time.monotonic()
    key = CollectionKey(tenant, collection)
    store.create_collection(key, embedder.space)
    read = _read(path)
    for document in read.emptied:
        store.remove(key, document)
    total = sum(len(chunks) for chunks in read.documents)
    counter = _Counter(progress, total)
    for chunks in _commits(read.documents):
        store.upsert(key, embedder.space, chunks, _vectors(embedder, chunks, counter))
        store.optimize(key)  # at once: a keyword search reads what is not indexed yet passage by passage
    return IngestReport(len(read.documents), total, time.monotonic() - started, read.skipped)


class _Counter:
    """Chunks embedded so far, told to progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self.add(0)

    def add(self, chunks: int) -> None:
        self._done += chunks
        self._progress(self._done, self._total)


def _read(path: Path) -> _Read:
    documents, emptied, skipped = [], [], []
    for file, document in _files(path):
        text = _text(file)
        if isinstance(text, Skipped):
            skipped.append(text)
        elif chunks := chunk_document(document, text):
            documents.append(chunks)
        else:
            emptied.append(document)
            skipped.append(Skipped(str(file), "empty"))
    return _Read(tuple(documents), tuple(emptied), tuple(skipped))


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Every file to look at with its document name, in the order of the names."""
    path = path.resolve()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    root = path if path.is_dir() else path.parent
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() or file.is_symlink())
    for file in found:
        inside = file.relative_to(root)
        if file == path or not any(part.startswith(".") for part in inside.parts):
            yield file, (root.name / inside).as_posix()


def _text(file: Path) -> str | Skipped:
    """The file's text, or why there is none."""
    if file.suffix.lower() not in SUFFIXES:
        return Skipped(str(file), f"not one of {', '.join(SUFFIXES)}")
    if not file.is_file():  # a link to nothing or to a folder; links to folders are not followed
        return Skipped(str(file), "a link that leads to no file")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return Skipped(str(file), f"not UTF-8 (byte {error.start})")
    except OSError as error:
        return Skipped(str(file), f"cannot be read: {error.strerror}")


def _commits(documents: tuple[tuple[Chunk, ...], ...]) -> Iterator[list[Chunk]]:
    """Whole documents together, COMMIT_CHUNKS chunks or a little more at once: a document is never parted."""
    pending: list[Chunk] = []
    for chunks in documents:
        pending.extend(chunks)
        if len(pending) >= COMMIT_CHUNKS:
            yield pending
            pending = []
    if pending:
        yield pending


def _vectors(embedder: Embeds, chunks: list[Chunk], counter: _Counter) -> Vectors:
    """Vectors of the chunks, float32 [len(chunks), dimensions], embedded in batches."""
    parts = []
    for begin in range(0, len(chunks), BATCH_CHUNKS):
        texts = [chunk.text for chunk in chunks[begin : begin + BATCH_CHUNKS]]
        parts.append(embedder.embed(texts))
        counter.add(len(texts))
    return np.concatenate(parts)
