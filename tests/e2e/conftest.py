"""One stack for all end-to-end tests: they share it as its users would."""

from collections.abc import Iterator

import pytest

from tests.support.stack import RunningStack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    running = RunningStack(tmp_path_factory.mktemp("home"))
    yield running
    assert running.stop() == 0, running.said()
