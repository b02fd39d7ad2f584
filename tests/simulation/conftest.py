"""How many seeds: --seeds N where this folder is named on the command line, or HEADRACE_TEST_SEEDS=N; and no log lines."""

import os
from collections.abc import Iterator

import pytest
import structlog

SEEDS = 2000
CHUNK = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, when pytest reads this file early enough."""
    parser.addoption("--seeds", type=int, default=None, help=f"simulated runs (default {SEEDS})")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each hundred seeds."""
    if "first_seed" in metafunc.fixturenames:
        given = metafunc.config.getoption("--seeds", default=None)
        seeds = given or int(os.environ.get("HEADRACE_TEST_SEEDS", SEEDS))
        starts = range(0, seeds, CHUNK)
        metafunc.parametrize(("first_seed", "count"), [(start, min(CHUNK, seeds - start)) for start in starts])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A run's log lines are of no use: its journal is. Nothing is formatted either, which saves a third of the time."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)
