"""The bus on a real broker: what every bus must do, and what only this one has to."""

from typing import Any

import pytest

from runtime import streams
from runtime.bus import BusUnavailable
from runtime.nats_bus import NatsBus
from runtime.patience import backoff_s
from schemas import limits, subjects
from tests.contracts.bus_suite import BusSuite
from tests.contracts.servers import OnNats
from tests.support.broker import NatsServer

pytestmark = pytest.mark.anyio


class TestNatsBus(OnNats, BusSuite):
    """The suite on nats-server."""


async def test_declaring_twice_changes_nothing_and_drift_is_put_right(bus: NatsBus, broker: NatsServer) -> None:
    found = (await bus._js.stream_info(subjects.REPLY_STREAM)).config
    await bus._js.update_stream(found.evolve(max_age=300.0))
    second = await NatsBus.connect(broker.url, "second")
    assert (await bus._js.stream_info(subjects.REPLY_STREAM)).config.max_age == limits.LOG_AGE_S
    await second.close()


async def test_nobody_at_the_address_is_said_in_words() -> None:
    with pytest.raises(BusUnavailable, match=r"no NATS server answers at nats://127\.0\.0\.1:9"):
        await NatsBus.connect("nats://127.0.0.1:9", "test")


async def test_the_clock_offset_is_within_its_round_trip(bus: NatsBus) -> None:
    assert abs(bus.clock.offset_us) <= bus.clock.round_trip_us + 1000


def test_backoff_doubles_with_jitter_up_to_its_cap() -> None:
    for failures, most in ((1, 0.05), (2, 0.1), (3, 0.2), (50, 2.0)):
        assert all(most / 2 <= backoff_s(failures) <= most for _ in range(50))


async def test_a_stage_that_opens_while_the_bus_declares_what_it_knows_disturbs_nothing(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare = streams.declare_consumer

    async def while_another_opens(js: Any, subject: str, consumer: str) -> None:
        bus._consumers.setdefault("guard", subjects.work("guard"))
        await declare(js, subject, consumer)

    bus._consumers["rails"] = subjects.work("rails")
    monkeypatch.setattr(streams, "declare_consumer", while_another_opens)
    await bus._declare()
    assert set(bus._consumers) == {"rails", "guard"}
