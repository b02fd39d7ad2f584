"""The bus in memory, on virtual time: what every bus must do."""

import pytest

from tests.contracts.bus_suite import BusSuite
from tests.contracts.servers import OnMemory

pytestmark = pytest.mark.anyio


class TestMemoryBus(OnMemory, BusSuite):
    """The suite on the broker in memory."""
