"""headrace ingest: documents into a collection. It writes to the store itself; a running stack sees them at once."""

import dataclasses
import json
import sys
from pathlib import Path

from runtime import model_files
from runtime.settings import Settings
from schemas.errors import HeadraceError


def ingest(settings: Settings, path: Path, collection: str, tenant: str, as_json: bool) -> int:
    """Reads path, embeds its passages and stores them; exit status 1 when nothing could be taken in."""
    if not path.exists():
        print(f"headrace ingest: {path} does not exist", file=sys.stderr)
        return 1
    folder = model_files.ensure(model_files.EMBEDDER, lambda line: print(line, file=sys.stderr), settings.models)
    from workers.retrieval.embedder import Embedder
    from workers.retrieval.ingest import ingest_path
    from workers.retrieval.store_lancedb import LanceStore

    try:
        report = ingest_path(
            path,
            tenant,
            collection,
            LanceStore(settings.home / "passages"),
            Embedder(folder, threads=settings.threads),
            _progress,
        )
    except HeadraceError as error:
        print(f"headrace ingest: {error.message}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        store = settings.home / "passages"
        print(f"{report.chunks} passages from {report.files} file(s) in {collection} of {store}, {report.seconds:.1f} s")
        for skipped in report.skipped:
            print(f"skipped {skipped}")
    return 0 if report.chunks else 1


def _progress(done: int, total: int) -> None:
    if not sys.stderr.isatty():
        return
    print(f"\rembedding {done}/{total} passages", end="" if done < total else "\n", file=sys.stderr, flush=True)
