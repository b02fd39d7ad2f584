"""What the retrieval tests share: where the embedding model is, and invented facts with questions about them."""

import os
from functools import cache
from pathlib import Path

from runtime.model_files import default_embedder
from workers.retrieval.embedder import Embedder


def embedder_directory() -> Path:
    """HEADRACE_TEST_MINILM, else the default model (fetched once)."""
    given = os.environ.get("HEADRACE_TEST_MINILM")
    return Path(given) if given else default_embedder()


@cache
def embedder() -> Embedder:
    """The default embedder, loaded once for all tests."""
    return Embedder(embedder_directory(), threads=None)


# (document, text, question)
FACTS = (
    ("lights.md", "The Brindlemoor lighthouse was painted turquoise in 1987 by Odette Quarrie.", "Who painted the lighthouse?"),
    ("leave.md", "Employees of Tavastock may carry over at most eleven days of unused leave.", "How much vacation can I keep?"),
    ("router.md", "To reset the Quillon 7 router, hold the amber button for nine seconds.", "How do I restart the router?"),
    ("feast.md", "The Festival of Lanterns takes place on the second Sunday of March.", "When is the lantern celebration?"),
    ("bills.md", "Invoices of Dunmore & Slate are paid within 45 days.", "How fast are bills settled?"),
    ("codes.md", "Error ZX-4417 means that the flux valve is blocked by ice.", "What does ZX-4417 mean?"),
)
