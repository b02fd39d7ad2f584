"""The simulation sees what it is there for: each planted bug is found within some hundreds of seeds."""

from collections.abc import Iterator

import pytest

from tests.simulation import virtual_time
from tests.simulation.mutations import MUTATIONS
from tests.simulation.plan import draw
from tests.simulation.virtual_time import Stuck
from tests.simulation.world import simulate

SEEDS_MAX = 1000


@pytest.fixture
def impatient() -> Iterator[None]:
    """A bug may make the system turn in a circle: that is found, too, and need not take long."""
    usual, virtual_time.STEPS_MAX = virtual_time.STEPS_MAX, 100_000
    yield
    virtual_time.STEPS_MAX = usual


def caught(seed: int) -> bool:
    """Whether the run of a seed shows that something is wrong."""
    try:
        return bool(simulate(draw(seed)).violations)
    except Stuck:
        return True


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    MUTATIONS[name](monkeypatch)
    assert any(caught(seed) for seed in range(SEEDS_MAX)), f"{name} was not seen in {SEEDS_MAX} seeds"
