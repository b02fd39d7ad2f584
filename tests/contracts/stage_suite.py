"""The stage loop: every item is settled, whatever the handler does. Run on nats-server and on the broker in memory."""

import asyncio

import pytest

from runtime.bus import Bus, BusUnavailable, Message
from runtime.publishing import Publisher
from runtime.stage import StageLoop, Work, simple_lane
from schemas import events, limits, subjects
from schemas.dead_letter import DeadLetter
from schemas.envelope import Envelope
from schemas.errors import HeadraceError
from schemas.events import Event, Failed, Likely, Logprob, Tokens
from tests.contracts.servers import Server
from tests.support.envelopes import envelope
from tests.support.waiting import until


class Harness:
    """One retrieval stage with a handler of the test's, and what came out of it."""

    def __init__(self, bus: Bus, slots: int = 4) -> None:
        self.bus = bus
        self.seen: list[Work] = []
        self.ended: list[Event] = []
        self.stop = asyncio.Event()
        self.behave = self.succeed
        self.loop = StageLoop(bus, bus.clock, "retrieval", lambda loop: [simple_lane("retrieval", loop, slots)], self.handle)
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Harness":
        await self.bus.subscribe(subjects.REPLY_ALL, self.on_reply)
        self.task = asyncio.create_task(self.loop.run(self.stop, drain_s=2.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.set()
        assert self.task is not None
        await asyncio.wait_for(self.task, 10)

    async def on_reply(self, message: Message) -> None:
        self.ended.append(events.decode(message.data))

    async def handle(self, work: Work) -> None:
        self.seen.append(work)
        await self.behave(work)

    async def succeed(self, work: Work) -> None:
        pass

    async def wait(self, work: Work) -> None:
        await asyncio.Event().wait()

    async def put(self, item: Envelope) -> None:
        await self.bus.publish_confirmed(subjects.work("retrieval"), item.encode(), f"{item.request}:retrieval:0")

    async def until_settled(self, server: Server) -> None:
        """Returns when the work stream is empty: a work item is there from its confirmation to its acknowledgement."""
        give_up = asyncio.get_running_loop().time() + 15
        while await server.work_items() != 0:
            assert asyncio.get_running_loop().time() < give_up, "never settled"
            await asyncio.sleep(0.005)

    async def only_failure(self) -> Failed:
        await until(lambda: bool(self.ended), "a terminal event")
        assert len(self.ended) == 1, self.ended
        assert isinstance(self.ended[0], Failed)
        return self.ended[0]


class StageSuite:
    """Each test is one promise of the stage loop."""

    async def test_done_work_is_acknowledged_and_answered_by_nobody(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:
            await stage.put(envelope())
            await until(lambda: len(stage.seen) == 1, "the handler")
            await stage.until_settled(server)
            assert stage.ended == []

    async def test_a_clients_error_is_answered_at_once_and_not_retried(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:

            async def refuse(work: Work) -> None:
                raise HeadraceError("collection_not_found", "no collection x", "headrace.retrieval.collection")

            stage.behave = refuse
            await stage.put(envelope())
            await stage.until_settled(server)
            assert len(stage.seen) == 1
            failed = await stage.only_failure()
            assert (failed.code, failed.param) == ("collection_not_found", "headrace.retrieval.collection")

    async def test_a_failure_keeps_all_that_was_said_of_the_tokens_before_it(self, server: Server, bus: Bus) -> None:
        """On file too, from which the answer is told when the log is lost."""
        said = Tokens(1, 0, (1,), ("a",), (Logprob(Likely(1, b"a", -0.5)),))
        item = envelope()
        async with Harness(bus) as stage:

            async def say_and_refuse(work: Work) -> None:
                publisher = Publisher(bus, subjects.reply(work.request), work.epoch)
                await publisher.tokens(said)
                await bus.flush()
                publisher.close()
                raise HeadraceError("invalid_value", "no")

            stage.behave = say_and_refuse
            await stage.put(item)
            await stage.until_settled(server)
        kept = [
            events.decode(message.data) for message in await bus.read_log(subjects.reply(item.request)) if not message.sequence
        ]
        assert kept[0] == said

    async def test_a_fault_is_retried_under_a_higher_epoch_and_then_succeeds(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:

            async def fail_once(work: Work) -> None:
                if work.epoch == 1:
                    raise RuntimeError("a fault of ours")

            stage.behave = fail_once
            await stage.put(envelope())
            await until(lambda: len(stage.seen) == 2, "a second attempt")
            await stage.until_settled(server)
            assert [work.epoch for work in stage.seen] == [1, 2]
            assert stage.ended == []

    async def test_poison_ends_in_a_dead_letter_with_its_cause_and_one_typed_error(
        self, server: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        letters: list[Message] = []

        async def on_dead(message: Message) -> None:
            letters.append(message)

        monkeypatch.setattr("runtime.delivery.ATTEMPTS_MAX", 2)
        await bus.subscribe(subjects.dead("retrieval"), on_dead)
        async with Harness(bus) as stage:

            async def always_fail(work: Work) -> None:
                raise RuntimeError("poison")

            stage.behave = always_fail
            item = envelope()
            await stage.put(item)
            await stage.until_settled(server)
            assert (await stage.only_failure()).code == "attempts_exhausted"
            assert len(stage.seen) == 2
            letter = DeadLetter.decode(letters[0].data)
            assert Envelope.decode(letter.input).request == item.request
            assert "RuntimeError" in letter.cause

    @pytest.mark.parametrize("speaks", [True, False], ids=["tokens", "silence"])
    async def test_only_deliveries_that_brought_nothing_count_whatever_the_broker_forgot(
        self, server: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch, speaks: bool
    ) -> None:
        """Three holders die; with the broker the log of what they said."""
        monkeypatch.setattr(limits, "ACK_WAIT_S", 1.0)
        monkeypatch.setattr(limits, "BEAT_S", 0.2)
        monkeypatch.setattr(limits, "DELIVERIES_MAX", 2)
        monkeypatch.setattr("runtime.delivery.DELIVERIES_MAX", 2)
        async with Harness(bus) as stage:

            async def die(work: Work) -> None:
                if work.epoch > 3:
                    return
                publisher = Publisher(bus, subjects.reply(work.request), work.epoch)
                if speaks:
                    await publisher.tokens(Tokens(work.epoch, 0, (1,), ("a",)))
                await bus.flush()
                publisher.close()
                if work.epoch == 3:
                    server.kill()
                    server.start()
                raise BusUnavailable("the holder is gone")

            stage.behave = die
            await stage.put(envelope())
            await stage.until_settled(server)
            ends = [event.code for event in stage.ended if isinstance(event, Failed)]
            assert ends == ([] if speaks else ["attempts_exhausted"])
            assert len(stage.seen) == (4 if speaks else 2)

    async def test_silent_deaths_do_not_use_up_the_failures_that_are_told(
        self, server: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "ACK_WAIT_S", 1.0)
        monkeypatch.setattr(limits, "BEAT_S", 0.2)
        monkeypatch.setattr("runtime.delivery.ATTEMPTS_MAX", 2)
        async with Harness(bus) as stage:

            async def fail(work: Work) -> None:
                raise BusUnavailable("the holder is gone") if work.epoch <= 3 else RuntimeError("a fault of ours")

            stage.behave = fail
            await stage.put(envelope())
            await stage.until_settled(server)
            assert [work.epoch for work in stage.seen] == [1, 2, 3, 4, 5]
            assert "failed 2 times" in (await stage.only_failure()).message

    async def test_a_cancel_that_was_told_while_the_broker_was_away_is_found_after_the_reconnect(
        self, server: Server, bus: Bus
    ) -> None:
        """The mark is there, and nobody heard the broadcast."""
        async with Harness(bus) as stage:
            stage.behave = stage.wait
            item, other = envelope(), envelope()
            await stage.put(item)
            await stage.put(other)
            await until(lambda: len(stage.seen) == 2, "both at work")
            await bus.kv_create(subjects.CANCEL_BUCKET, item.request, b"")
            server.kill()
            server.start()
            assert (await stage.only_failure()).code == "cancelled"
            await until(lambda: stage.loop.held == 1, "the other one is still at work")

    async def test_expired_work_never_reaches_the_handler(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:
            await stage.put(envelope(deadline_us=bus.clock.now_us() - 1))
            await stage.until_settled(server)
            assert stage.seen == []
            assert (await stage.only_failure()).code == "deadline_exceeded"

    async def test_a_deadline_stops_the_handler_that_is_at_work(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:
            stage.behave = stage.wait
            await stage.put(envelope(deadline_us=bus.clock.now_us() + 200_000))
            await stage.until_settled(server)
            assert (await stage.only_failure()).code == "deadline_exceeded"

    async def test_a_cancel_stops_only_its_own_request(self, bus: Bus) -> None:
        async with Harness(bus) as stage:
            stage.behave = stage.wait
            first, second = envelope(), envelope()
            await stage.put(first)
            await stage.put(second)
            await until(lambda: len(stage.seen) == 2, "both at work")
            await bus.mark_cancelled(first.request)
            assert (await stage.only_failure()).code == "cancelled"
            await until(lambda: stage.loop.held == 1, "the other one is still at work")

    async def test_work_that_was_cancelled_in_its_queue_is_dropped_at_dequeue(self, bus: Bus) -> None:
        item = envelope()
        stage = Harness(bus)
        await stage.put(item)
        await bus.mark_cancelled(item.request)
        async with stage:
            assert stage.seen == []
            assert (await stage.only_failure()).code == "cancelled"

    async def test_bytes_that_are_no_envelope_are_buried_and_the_stage_goes_on(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:
            await bus.publish_confirmed(subjects.work("retrieval"), b"\x01garbage", "garbage")
            await stage.put(envelope())
            await until(lambda: len(stage.seen) == 1, "the good item")
            await stage.until_settled(server)

    async def test_drain_hands_back_what_it_cannot_finish(self, bus: Bus) -> None:
        item = envelope()
        async with Harness(bus) as stage:
            stage.behave = stage.wait
            await stage.put(item)
            await until(lambda: len(stage.seen) == 1, "at work")
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 4.0  # drain time is 2 s
        async with Harness(bus) as successor:
            await until(lambda: len(successor.seen) == 1, "the successor", seconds=limits.ACK_WAIT_S - 1)
            assert successor.seen[0].request == item.request
            assert successor.seen[0].epoch == 2

    async def test_a_stage_takes_only_what_it_has_room_for(self, bus: Bus) -> None:
        async with Harness(bus, slots=2) as stage:
            stage.behave = stage.wait
            items = [envelope() for _ in range(5)]
            for item in items:
                await stage.put(item)
            await until(lambda: len(stage.seen) == 2, "two at work")
            async with Harness(bus, slots=2) as other:
                other.behave = other.wait
                await until(lambda: len(other.seen) == 2, "two of the rest, which nobody had taken")
                await bus.mark_cancelled(stage.seen[0].request)
                await until(lambda: len(stage.seen) == 3, "the freed place is taken")

    async def test_consumption_resumes_after_the_broker_was_killed(self, server: Server, bus: Bus) -> None:
        async with Harness(bus) as stage:
            await stage.put(envelope())
            await until(lambda: len(stage.seen) == 1, "the first")
            server.kill()
            server.start()
            second = envelope()
            await until(lambda: bus.connected, "the reconnect")
            await stage.put(second)
            await until(lambda: second.request in {w.request for w in stage.seen}, "the second")

    async def test_a_worker_that_could_not_renew_its_leases_says_nothing_more(
        self, server: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped past its ack wait, then continued: another holder has the work, and this one ends without a word."""
        monkeypatch.setattr(limits, "BEAT_S", 0.2)
        other_bus = await server.connect("other")
        async with Harness(bus) as stalled:
            stalled.behave = stalled.wait
            await stalled.put(envelope())
            await until(lambda: len(stalled.seen) == 1, "the first holder")
            stalled.loop._healthy = lambda: False  # its beats stop, as those of a stopped process do
            began = asyncio.get_running_loop().time()
            async with Harness(other_bus) as other:
                await until(lambda: len(other.seen) == 1, "the second holder", seconds=limits.ACK_WAIT_S + 1)
                assert asyncio.get_running_loop().time() - began <= limits.ACK_WAIT_S + 1
                assert other.seen[0].epoch == 2
                await until(lambda: stalled.loop.held == 0, "the first holder lets go")
                await other.until_settled(server)
                assert stalled.ended == []
