"""The stage loop on both brokers."""

import pytest

from tests.contracts.servers import OnMemory, OnNats
from tests.contracts.stage_suite import StageSuite

pytestmark = pytest.mark.anyio


class TestStageOnNats(OnNats, StageSuite):
    """The suite on nats-server."""


class TestStageOnMemory(OnMemory, StageSuite):
    """The suite on the broker in memory."""
