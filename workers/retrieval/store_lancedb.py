"""The embedded passage store: LanceDB tables under one directory. The only file that imports lancedb.

One table is one collection, its name the tenant's digest and the collection's name. Every call opens the table anew, so
it sees what any process committed before. Writers of several processes meet in Lance's optimistic commits: the passage
id is the table's primary key, so Lance notices two writers of one document and repeats the later one; what it gives up
on is repeated here. Vectors are compared one by one, exactly: 80 ms among 100,000 passages (2-core CPU, 2026-12-01).
"""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.db import LanceDBConnection
from lancedb.index import FTS
from lancedb.query import MatchQuery
from lancedb.table import LanceTable

from workers.retrieval.chunker import Chunk
from workers.retrieval.store import (
    Collection,
    CollectionKey,
    Hit,
    Space,
    Vectors,
    check_name,
    check_space,
    check_vectors,
    is_name,
    not_found,
    passage_id,
)

COMMIT_ATTEMPTS_MAX = 12
COMMIT_PAUSE_S_MAX = 1.0
VERSIONS_KEPT = timedelta(hours=1)  # a search that began on an older version has long ended
WORDS_CHARS_MAX = 64  # a longer word is not indexed
_PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}  # Lance's spec: two merges that insert one id conflict

Result = TypeVar("Result")


def commit_pause_s(attempt: int, chance: float) -> float:
    """Seconds to wait after attempt (from 1): 20 ms doubled up to COMMIT_PAUSE_S_MAX, less chance in [0, 1) of half."""
    return float(min(0.02 * 2 ** (attempt - 1), COMMIT_PAUSE_S_MAX) * (1 - chance / 2))


class LanceStore:
    """A PassageStore in a directory, which is made if it is not there."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        database = lancedb.connect(directory)
        assert isinstance(database, LanceDBConnection), f"{directory} opened as {type(database).__name__}"
        self._database = database

    def create_collection(self, key: CollectionKey, space: Space) -> None:
        """See PassageStore. Processes that create the same collection at once all succeed."""
        check_name(key.collection)

        def ensure() -> None:
            table = self._find(key)
            if table is None:
                table = self._database.create_table(_table_name(key), schema=_schema(key, space))
            check_space(key, _space(table), space)
            _index(table)

        _committed(ensure)

    def list_collections(self, tenant: str) -> tuple[Collection, ...]:
        """See PassageStore."""
        tables = ((name, self._find(CollectionKey(tenant, name))) for name in self._names(tenant))
        return tuple(Collection(name, _space(table), table.count_rows()) for name, table in tables if table is not None)

    def drop_collection(self, key: CollectionKey) -> None:
        """See PassageStore."""
        self._open(key)
        self._database.drop_table(_table_name(key), ignore_missing=True)

    def upsert(self, key: CollectionKey, space: Space, chunks: Sequence[Chunk], vectors: Vectors) -> None:
        """See PassageStore. One commit."""
        check_vectors(space, chunks, vectors)
        check_space(key, _space(self._open(key)), space)
        if not chunks:
            return
        rows = _rows(key, space, chunks, vectors)
        replaced = " OR ".join(f"document = {_quoted(name)}" for name in dict.fromkeys(c.document for c in chunks))

        def merge() -> None:
            merging: Any = self._open(key).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merging.when_not_matched_by_source_delete(replaced).execute(rows)

        _committed(merge)

    def remove(self, key: CollectionKey, document: str) -> None:
        """See PassageStore."""
        _committed(lambda: self._open(key).delete(f"document = {_quoted(document)}"))

    def optimize(self, key: CollectionKey) -> None:
        """See PassageStore. Compacts, and forgets versions older than VERSIONS_KEPT."""
        _committed(lambda: self._open(key).optimize(cleanup_older_than=VERSIONS_KEPT))

    def search_vector(self, key: CollectionKey, space: Space, vector: Vectors, k: int) -> tuple[Hit, ...]:
        """See PassageStore."""
        table = self._open(key)
        check_space(key, _space(table), space)
        assert vector.shape == (space.dimensions,), f"query vector of {vector.shape}, the space has {space.dimensions}"
        query: Any = table.search(vector, vector_column_name="vector")
        rows = query.distance_type("cosine").select(["id", "source", "text", "_distance"]).limit(k).to_list()
        return tuple(Hit(row["id"], row["source"], row["text"], 1.0 - row["_distance"]) for row in rows)

    def search_keyword(self, key: CollectionKey, text: str, k: int) -> tuple[Hit, ...]:
        """See PassageStore."""
        query: Any = self._open(key).search(MatchQuery(text, "text"))  # type: ignore[call-arg]
        rows = query.select(["id", "source", "text", "_score"]).limit(k).to_list()
        return tuple(Hit(row["id"], row["source"], row["text"], row["_score"]) for row in rows)

    def _open(self, key: CollectionKey) -> LanceTable:
        """The table as of now."""
        table = self._find(key)
        if table is None:
            raise not_found(key)
        return table

    def _find(self, key: CollectionKey) -> LanceTable | None:
        """The table as of now, if there is one; one that another process is just making is not there yet."""
        if not is_name(key.collection):
            return None
        try:
            table = self._database.open_table(_table_name(key))
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None
        owner = table.schema.metadata[b"tenant"].decode()
        assert owner == key.tenant, f"the table of {key} belongs to {owner!r}"
        return table

    def _names(self, tenant: str) -> list[str]:
        """The names of the tenant's collections, sorted."""
        prefix = _table_name(CollectionKey(tenant, ""))
        tables = self._database.list_tables().tables  # without a limit the embedded database gives all in one page
        return sorted(name.removeprefix(prefix) for name in tables if name.startswith(prefix))


def _table_name(key: CollectionKey) -> str:
    """<128 bits of the tenant's digest>.<collection>: no tenant's name can be written so as to meet another's."""
    return f"{hashlib.sha256(key.tenant.encode()).hexdigest()[:32]}.{key.collection}"


def _schema(key: CollectionKey, space: Space) -> pa.Schema:
    number = pa.field("id", pa.string(), nullable=False, metadata=_PRIMARY_KEY)
    fields = [pa.field(name, pa.string(), nullable=False) for name in ("document", "source", "text")]
    vector = pa.field("vector", pa.list_(pa.float32(), space.dimensions), nullable=False)
    return pa.schema([number, *fields, vector], metadata={"tenant": key.tenant, "model": space.model})


def _space(table: LanceTable) -> Space:
    schema = table.schema
    return Space(schema.metadata[b"model"].decode(), schema.field("vector").type.list_size)


def _index(table: LanceTable) -> None:
    """Gives a table its full-text index if it has none, whoever made it and however far they came."""
    if not any(index.columns == ["text"] for index in table.list_indices()):
        # icu finds words where no space parts them (Chinese, Japanese, Thai); the stemmer is English.
        table.create_index("text", config=FTS(base_tokenizer="icu", max_token_length=WORDS_CHARS_MAX), replace=False)


def _rows(key: CollectionKey, space: Space, chunks: Sequence[Chunk], vectors: Vectors) -> pa.Table:
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    columns = [
        pa.array([passage_id(chunk) for chunk in chunks]),
        pa.array([chunk.document for chunk in chunks]),
        pa.array([chunk.source for chunk in chunks]),
        pa.array([chunk.text for chunk in chunks]),
        pa.FixedSizeListArray.from_arrays(flat, space.dimensions),
    ]
    return pa.Table.from_arrays(columns, schema=_schema(key, space))


def _quoted(text: str) -> str:
    """A string literal of the filter language."""
    return "'" + text.replace("'", "''") + "'"


def _committed(action: Callable[[], Result]) -> Result:
    """The action's result; repeats it, paced, while another writer's commit comes before its own."""
    for attempt in range(1, COMMIT_ATTEMPTS_MAX + 1):
        try:
            return action()
        except (RuntimeError, OSError, ValueError) as error:
            if attempt == COMMIT_ATTEMPTS_MAX or not _is_conflict(error):
                raise
            time.sleep(commit_pause_s(attempt, random.random()))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _is_conflict(error: Exception) -> bool:
    """Lance names a lost race only in its message."""
    message = str(error).lower()
    return "conflict" in message or "already exists" in message
