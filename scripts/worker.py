"""headrace worker: which function serves which kind. Imported by kind, so that a guardrail worker never loads torch."""

import importlib
from typing import Literal

from runtime.lifecycle import Serve


def serve_of(kind: Literal["retrieval", "engine", "guardrail"]) -> Serve:
    """The serve function of one kind of worker."""
    serve: Serve = importlib.import_module(f"workers.{kind}.worker").serve
    return serve
