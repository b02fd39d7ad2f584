"""The bus on a real broker: what is confirmed is stored once, the log can be read back, pulls survive the broker's death."""

import asyncio

import pytest

from runtime.bus import BusRefused, BusUnavailable, Delivery
from runtime.nats_bus import NatsBus, backoff_s
from schemas import limits, subjects
from tests.support.broker import NatsServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_message_id_is_stored_once(bus: NatsBus) -> None:
    for _ in range(3):
        await bus.publish_confirmed(subjects.reply("a" * 32), b"x", "same")
    assert [m.data for m in await bus.read_log(subjects.reply("a" * 32))] == [b"x"]


async def test_the_log_gives_one_subject_in_order_beyond_one_batch(bus: NatsBus) -> None:
    mine, other = subjects.raw("a" * 32), subjects.raw("b" * 32)
    for index in range(1300):
        await bus.publish(mine, str(index).encode())
        await bus.publish(other, b"no")
    await bus.publish_confirmed(mine, b"end", "end")
    messages = await bus.read_log(mine)
    assert [m.data for m in messages] == [str(i).encode() for i in range(1300)] + [b"end"]
    last = messages[-2].sequence
    assert last is not None
    assert [m.data for m in await bus.read_log(mine, after=last)] == [b"end"]


async def test_a_log_of_nothing_is_empty(bus: NatsBus) -> None:
    assert await bus.read_log(subjects.reply("c" * 32)) == []


async def test_a_cancel_mark_is_found_by_whoever_looks_later(bus: NatsBus) -> None:
    assert not await bus.is_cancelled("a" * 32)
    await bus.mark_cancelled("a" * 32)
    assert await bus.is_cancelled("a" * 32)
    assert not await bus.is_cancelled("b" * 32)


async def test_what_is_over_the_brokers_limit_is_refused_by_name(bus: NatsBus) -> None:
    with pytest.raises((BusRefused, BusUnavailable)):
        await bus.publish_confirmed(subjects.work("rails"), bytes(limits.PAYLOAD_BYTES_MAX + 1), "big")


async def test_declaring_twice_changes_nothing_and_drift_is_put_right(bus: NatsBus, broker: NatsServer) -> None:
    found = (await bus._js.stream_info(subjects.REPLY_STREAM)).config
    await bus._js.update_stream(found.evolve(max_age=300.0))
    second = await NatsBus.connect(broker.url, "second")
    assert (await bus._js.stream_info(subjects.REPLY_STREAM)).config.max_age == limits.LOG_AGE_S
    await second.close()


async def test_nobody_at_the_address_is_said_in_words() -> None:
    with pytest.raises(BusUnavailable, match=r"no NATS server answers at nats://127\.0\.0\.1:9"):
        await NatsBus.connect("nats://127.0.0.1:9", "test")


async def test_work_that_was_accepted_survives_a_killed_broker(bus: NatsBus, broker: NatsServer) -> None:
    await bus.publish_confirmed(subjects.work("rails"), b"precious", "precious")
    broker.kill()
    broker.start()
    got: list[Delivery] = []

    async def on_delivery(delivery: Delivery) -> None:
        got.append(delivery)

    await until(lambda: bus.connected, "the reconnect")
    puller = await bus.pull(subjects.work("rails"), "rails", on_delivery, lambda: None)
    await puller.ask(1)
    await until(lambda: len(got) == 1, "the item")
    assert got[0].data == b"precious"
    await got[0].ack()


async def test_the_clock_offset_is_within_its_round_trip(bus: NatsBus) -> None:
    assert abs(bus.clock.offset_us) <= bus.clock.round_trip_us + 1000


async def test_an_item_that_is_given_back_comes_again_with_its_attempt_counted(bus: NatsBus) -> None:
    attempts: list[int] = []
    done = asyncio.Event()

    async def on_delivery(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt < 3:
            await delivery.nak(0.0)
        else:
            await delivery.ack()
            done.set()

    puller = await bus.pull(subjects.work("rails"), "rails", on_delivery, lambda: None)
    await bus.publish_confirmed(subjects.work("rails"), b"x", "x")
    await puller.ask(5)
    await asyncio.wait_for(done.wait(), 5)
    assert attempts == [1, 2, 3]


def test_backoff_doubles_with_jitter_up_to_its_cap() -> None:
    for failures, most in ((1, 0.05), (2, 0.1), (3, 0.2), (50, 2.0)):
        assert all(most / 2 <= backoff_s(failures) <= most for _ in range(50))
