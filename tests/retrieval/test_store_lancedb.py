"""The embedded store keeps the PassageStore contract, and loses nothing when processes write at once."""

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.passage_store_suite import KEY, SPACE, PassageStoreSuite, chunk, texts
from workers.retrieval.store_lancedb import COMMIT_PAUSE_S_MAX, LanceStore, commit_pause_s

ROOT = Path(__file__).parents[2]

WRITER = """
import pathlib, sys
import numpy as np
from tests.contracts.passage_store_suite import KEY, SPACE, chunk
from workers.retrieval.store_lancedb import LanceStore
folder, writer, passages = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = LanceStore(pathlib.Path(folder))
print("ready", flush=True)
sys.stdin.readline()
store.create_collection(KEY, SPACE)
for document in range(6):
    for name, count in ((f"shared-{document}", passages), (f"own-{writer}-{document}", 2)):
        chunks = [chunk(name, position, f"{name} {position} by {writer}") for position in range(count)]
        store.upsert(KEY, SPACE, chunks, np.ones((count, 4), np.float32))
    if document % 3 == 2:
        store.optimize(KEY)
"""


class TestLanceStore(PassageStoreSuite):
    """The contract, on LanceDB."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LanceStore:
        return LanceStore(tmp_path / "passages")

    @pytest.fixture
    def second(self, tmp_path: Path) -> LanceStore:
        return LanceStore(tmp_path / "passages")


def test_two_processes_that_create_and_ingest_at_once_lose_nothing_and_mix_nothing(tmp_path: Path) -> None:
    """Both write the same six documents, with 7 and with 4 passages, and six documents of their own."""
    counts = {"one": 7, "two": 4}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as running:
        writers = [
            running.enter_context(subprocess.Popen([*command, name, str(count)], stdin=pipe, stdout=pipe, cwd=ROOT))
            for name, count in counts.items()
        ]
        assert [writer.stdout.readline() for writer in writers if writer.stdout] == [b"ready\n"] * 2
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        assert [writer.wait(timeout=60) for writer in writers] == [0, 0]

    found = texts(LanceStore(tmp_path))
    own = sorted(f"own-{name}-{d} {p} by {name}" for name in counts for d in range(6) for p in range(2))
    assert [text for text in found if text.startswith("own")] == own
    for document in range(6):
        shared = [text for text in found if text.startswith(f"shared-{document} ")]
        versions = [[f"shared-{document} {p} by {name}" for p in range(count)] for name, count in counts.items()]
        assert shared in versions


def test_two_writers_that_start_each_document_together_leave_one_version_of_it(tmp_path: Path) -> None:
    """One document after another, both stores insert it at the same moment, with 7 and with 4 passages."""
    documents, counts = range(25), (7, 4)
    stores = [LanceStore(tmp_path) for _ in counts]
    stores[0].create_collection(KEY, SPACE)
    start = threading.Barrier(len(counts), timeout=30)

    def write(store: LanceStore, passages: int) -> None:
        for document in documents:
            chunks = [chunk(f"d{document}", at, f"d{document} {at} of {passages}") for at in range(passages)]
            start.wait()
            store.upsert(KEY, SPACE, chunks, np.ones((passages, 4), np.float32))

    with ThreadPoolExecutor(len(counts)) as pool:
        list(pool.map(write, stores, counts))
    found = [hit.text for hit in stores[0].search_vector(KEY, SPACE, np.ones(4, np.float32), 1000)]
    for document in documents:
        of_document = sorted(text for text in found if text.startswith(f"d{document} "))
        assert of_document in [[f"d{document} {at} of {count}" for at in range(count)] for count in counts]


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True))
def test_the_pause_after_a_lost_commit_is_positive_and_capped(attempt: int, chance: float) -> None:
    assert 0.01 <= commit_pause_s(attempt, chance) <= COMMIT_PAUSE_S_MAX


def test_a_lost_tenants_digest_is_a_bug_and_not_a_leak(tmp_path: Path) -> None:
    """A table whose metadata names another tenant is never read."""
    store = LanceStore(tmp_path)
    store.create_collection(KEY, SPACE)
    [table] = list(tmp_path.glob("*.lance"))
    table.rename(tmp_path / f"{'0' * 32}.{KEY.collection}.lance")
    assert store.list_collections(KEY.tenant) == ()
