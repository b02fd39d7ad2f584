"""What every Bus must do, written once: run on nats-server and on the broker in memory, so that the one in memory is honest."""

import asyncio

import pytest

from runtime.bus import Bus, BusRefused, BusUnavailable, Delivery, Message, Puller
from schemas import events, limits, subjects
from schemas.events import Finished, Tokens, Usage
from schemas.timeline import Timeline
from tests.contracts.servers import Server
from tests.support.waiting import until

WORK = subjects.work("rails")
REPLY = subjects.reply("a" * 32)


class Hands:
    """What came from one puller."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self.room = 0
        self.puller: Puller

    async def open(self, bus: Bus, subject: str = WORK, consumer: str = "rails") -> "Hands":
        self.puller = await bus.pull(subject, consumer, self.take, self.on_room)
        return self

    async def take(self, delivery: Delivery) -> None:
        self.got.append(delivery)

    def on_room(self) -> None:
        self.room += 1

    async def until(self, count: int, seconds: float = 10.0) -> Delivery:
        """The newest of that many."""
        await until(lambda: len(self.got) >= count, f"{count} deliveries, got {len(self.got)}", seconds)
        assert len(self.got) == count
        return self.got[-1]


async def settled(server: Server) -> None:
    """Returns when no work is left."""
    for _ in range(1000):
        if await server.work_items() == 0:
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"{await server.work_items()} work items are left")


class BusSuite:
    """Each test is one promise of the Bus protocol."""

    # logs

    async def test_a_message_id_is_stored_once(self, bus: Bus) -> None:
        for _ in range(3):
            await bus.publish_confirmed(REPLY, b"x", "same")
        assert [m.data for m in await bus.read_log(REPLY)] == [b"x"]

    async def test_the_log_gives_one_subject_in_order_beyond_one_batch(self, bus: Bus) -> None:
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

    async def test_a_log_of_many_megabytes_is_read_whole(self, bus: Bus) -> None:
        large = [bytes([n]) * (limits.PAYLOAD_BYTES_MAX - 1024) for n in range(5)]
        for data in large:
            await bus.publish_confirmed(REPLY, data, str(data[0]))
        assert [m.data for m in await bus.read_log(REPLY)] == large

    async def test_a_log_of_nothing_is_empty(self, bus: Bus) -> None:
        assert await bus.read_log(subjects.reply("c" * 32)) == []

    async def test_a_finished_answer_on_file_follows_what_its_log_holds(self, bus: Bus) -> None:
        tokens, end = Tokens(1, 0, (1,), ("a",)), Finished(1, 1, "stop", Usage(1, 1), Timeline(0))
        kept = [(events.encode(tokens), None), (events.encode(end), None)]
        await bus.publish_confirmed(REPLY, events.encode(end), "end")
        assert [(m.data, m.sequence) for m in await bus.read_log(REPLY)] == [(events.encode(end), 1)]
        for part in events.encode_end(tokens, end):
            await bus.publish_confirmed(subjects.end(REPLY), part, "file")
        assert [(m.data, m.sequence) for m in await bus.read_log(REPLY)] == [(events.encode(end), 1), *kept]
        assert [(m.data, m.sequence) for m in await bus.read_log(REPLY, after=1)] == kept

    # live

    async def test_live_messages_come_in_order_to_every_pattern_that_wants_them(self, server: Server, bus: Bus) -> None:
        other = await server.connect("other")
        exact: list[bytes] = []
        every: list[tuple[str, bytes]] = []

        async def on_exact(message: Message) -> None:
            exact.append(message.data)

        async def on_every(message: Message) -> None:
            every.append((message.subject, message.data))

        first = await bus.subscribe(REPLY, on_exact)
        await bus.subscribe(subjects.REPLY_ALL, on_every)
        await bus.flush()
        for index in range(50):
            await other.publish(REPLY, str(index).encode())
        await other.publish_confirmed(subjects.reply("b" * 32), b"end", "end")
        await until(lambda: len(every) == 51, "all of them")
        assert exact == [str(index).encode() for index in range(50)]
        assert every[-1] == (subjects.reply("b" * 32), b"end")
        await first.unsubscribe()
        await bus.flush()
        await other.publish_confirmed(REPLY, b"late", "late")
        await until(lambda: len(every) == 52, "the late one")
        assert len(exact) == 50

    async def test_what_is_not_stored_twice_is_live_twice(self, bus: Bus) -> None:
        live: list[bytes] = []

        async def on_message(message: Message) -> None:
            live.append(message.data)

        await bus.subscribe(REPLY, on_message)
        for _ in range(2):
            await bus.publish_confirmed(REPLY, b"x", "same")
        await until(lambda: len(live) == 2, "both")

    # buckets

    async def test_a_cancel_mark_is_found_by_whoever_looks_later(self, bus: Bus) -> None:
        assert not await bus.is_cancelled("a" * 32)
        await bus.mark_cancelled("a" * 32)
        assert await bus.is_cancelled("a" * 32)
        assert not await bus.is_cancelled("b" * 32)

    async def test_of_several_who_put_a_key_one_succeeds(self, bus: Bus) -> None:
        bucket = subjects.REQUEST_BUCKET
        assert await bus.kv_get(bucket, "key") is None
        won = await asyncio.gather(*(bus.kv_create(bucket, "key", b"%d" % index) for index in range(5)))
        assert sum(won) == 1
        found = await bus.kv_get(bucket, "key")
        assert found is not None
        assert found.data == b"%d" % won.index(True)
        assert await bus.kv_update(bucket, "key", b"new", found.revision)
        assert not await bus.kv_update(bucket, "key", b"stale", found.revision)
        newer = await bus.kv_get(bucket, "key")
        assert newer is not None
        assert (newer.data, newer.revision > found.revision) == (b"new", True)

    async def test_what_is_over_the_brokers_limit_is_refused_by_name(self, bus: Bus) -> None:
        with pytest.raises((BusRefused, BusUnavailable)):
            await bus.publish_confirmed(WORK, bytes(limits.PAYLOAD_BYTES_MAX + 1), "big")

    # work

    async def test_only_what_was_asked_for_comes(self, bus: Bus) -> None:
        for index in range(4):
            await bus.publish_confirmed(WORK, b"%d" % index, f"id {index}")
        hands = await Hands().open(bus)
        assert hands.puller.outstanding == 0
        await hands.puller.ask(3)
        await hands.until(3)
        assert [delivery.data for delivery in hands.got] == [b"0", b"1", b"2"]
        assert [delivery.attempt for delivery in hands.got] == [1, 1, 1]
        assert hands.puller.outstanding == 0
        assert await bus.backlog(WORK, "rails") == 4
        await hands.got[0].ack()
        assert await bus.backlog(WORK, "rails") == 3
        assert await bus.backlog(subjects.work("guard"), "guard") is None

    async def test_what_was_asked_for_comes_when_it_is_there(self, bus: Bus) -> None:
        hands = await Hands().open(bus)
        await hands.puller.ask(2)
        assert hands.puller.outstanding == 2
        await bus.publish_confirmed(WORK, b"x", "x")
        await hands.until(1)
        assert hands.puller.outstanding == 1

    async def test_what_is_asked_for_in_vain_is_declined(self, bus: Bus) -> None:
        hands = await Hands().open(bus)
        await hands.puller.ask(2)
        await until(lambda: hands.room > 0 and hands.puller.outstanding == 0, "the decline")

    async def test_two_who_ask_share_the_work(self, server: Server, bus: Bus) -> None:
        first, second = await Hands().open(bus), await Hands().open(await server.connect("other"))
        await first.puller.ask(2)
        await second.puller.ask(2)
        for index in range(4):
            await bus.publish_confirmed(WORK, b"%d" % index, f"id {index}")
        await first.until(2)
        await second.until(2)
        assert {delivery.data for delivery in first.got + second.got} == {b"0", b"1", b"2", b"3"}

    async def test_an_item_that_is_given_back_comes_again_with_its_attempt_counted(self, server: Server, bus: Bus) -> None:
        hands = await Hands().open(bus)
        await bus.publish_confirmed(WORK, b"x", "x")
        await hands.puller.ask(5)
        for count in (1, 2):
            await (await hands.until(count)).nak(0.0)
        third = await hands.until(3)
        assert [delivery.attempt for delivery in hands.got] == [1, 2, 3]
        assert {delivery.sequence for delivery in hands.got} == {third.sequence}
        await third.ack()
        await settled(server)

    async def test_a_delay_is_waited_for(self, bus: Bus) -> None:
        loop = asyncio.get_running_loop()
        hands = await Hands().open(bus)
        await bus.publish_confirmed(WORK, b"x", "x")
        await hands.puller.ask(2)
        began = loop.time()
        await (await hands.until(1)).nak(1.0)
        await hands.until(2)
        assert 0.9 <= loop.time() - began <= 3.0

    async def test_a_lease_that_lapses_brings_the_item_back_unless_it_is_renewed(self, bus: Bus) -> None:
        loop = asyncio.get_running_loop()
        hands = await Hands().open(bus)
        for name in (b"kept", b"lost"):
            await bus.publish_confirmed(WORK, name, name.decode())
        began = loop.time()
        await hands.puller.ask(2)
        await hands.until(2)
        while len(hands.got) < 3:
            assert loop.time() - began < limits.ACK_WAIT_S + 4, "never came again"
            await hands.got[0].beat()
            await hands.puller.ask(1 - hands.puller.outstanding)
            await asyncio.sleep(0.5)
        assert loop.time() - began >= limits.ACK_WAIT_S - 0.5
        assert (hands.got[2].data, hands.got[2].attempt) == (b"lost", 2)
        await hands.got[0].ack()
        await hands.got[2].ack()

    async def test_an_old_holders_word_counts_for_the_new_one(self, server: Server, bus: Bus) -> None:
        """So nobody may acknowledge what was not published, not even who no longer holds it."""
        old, new = await Hands().open(bus), await Hands().open(await server.connect("other"))
        for name in (b"done", b"given back"):
            await bus.publish_confirmed(WORK, name, name.decode())
        await old.puller.ask(2)
        await old.until(2)
        began = asyncio.get_running_loop().time()
        while len(new.got) < 2:
            assert asyncio.get_running_loop().time() - began < limits.ACK_WAIT_S + 4, "never came again"
            await new.puller.ask(3 - new.puller.outstanding - len(new.got))
            await asyncio.sleep(0.1)
        olds, news = ({delivery.data: delivery for delivery in hands.got} for hands in (old, new))
        await olds[b"done"].ack()
        assert await server.work_items() == 1
        await olds[b"given back"].nak(0.0)
        again = await new.until(3)
        assert (again.data, again.attempt) == (b"given back", 3)
        await news[b"done"].ack()  # it is gone already, and that is no error
        await news[b"given back"].ack()
        await settled(server)

    async def test_work_that_is_done_is_not_queued_again_under_its_id(self, server: Server, bus: Bus) -> None:
        hands = await Hands().open(bus)
        await bus.publish_confirmed(WORK, b"x", "x")
        await hands.puller.ask(1)
        await (await hands.until(1)).ack()
        await bus.publish_confirmed(WORK, b"x", "x")
        await settled(server)

    async def test_who_has_closed_gets_nothing_more(self, server: Server, bus: Bus) -> None:
        closed = await Hands().open(bus)
        await closed.puller.ask(5)
        await closed.puller.close()
        await closed.puller.close()
        hands = await Hands().open(await server.connect("other"))
        await hands.puller.ask(1)
        await bus.publish_confirmed(WORK, b"x", "x")
        await hands.until(1)
        assert closed.got == []

    # the broker's death

    async def test_work_that_was_accepted_survives_a_killed_broker(self, server: Server, bus: Bus) -> None:
        await bus.publish_confirmed(WORK, b"precious", "precious")
        server.kill()
        server.start()
        await until(lambda: bus.connected, "the reconnect")
        hands = await Hands().open(bus)
        await hands.puller.ask(1)
        delivery = await hands.until(1)
        assert delivery.data == b"precious"
        await delivery.ack()

    async def test_token_logs_die_with_the_broker_and_everybody_hears_of_it(self, server: Server, bus: Bus) -> None:
        heard: list[str] = []

        async def on_reconnect() -> None:
            heard.append("reconnect")

        forget = bus.on_reconnect(on_reconnect)
        await bus.publish_confirmed(REPLY, b"x", "x")
        server.kill()
        server.start()
        await until(lambda: heard == ["reconnect"], "the call")
        assert await bus.read_log(REPLY) == []
        forget()

    async def test_who_asked_before_the_broker_died_is_told_to_ask_again(self, server: Server, bus: Bus) -> None:
        hands = await Hands().open(bus)
        await hands.puller.ask(1)
        server.kill()
        server.start()
        await until(lambda: hands.room > 0 and hands.puller.outstanding == 0, "the call")
        await bus.publish_confirmed(WORK, b"x", "x")
        await hands.puller.ask(1)
        await (await hands.until(1)).ack()
