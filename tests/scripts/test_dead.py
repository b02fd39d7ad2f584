"""Dead letters can be listed, read, and sent again as new requests."""

import json

import pytest

from gateway import ownership
from runtime.bus import Delivery
from runtime.nats_bus import NatsBus
from runtime.settings import Settings
from schemas import subjects
from schemas.dead_letter import DeadLetter
from schemas.envelope import Envelope, Rails
from scripts import dead
from tests.support.broker import NatsServer
from tests.support.envelopes import envelope
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_letter_is_listed_shown_and_replayed_with_its_guard(bus: NatsBus, capsys: pytest.CaptureFixture[str]) -> None:
    item = envelope(rails=Rails(output={"personal": "redact"}))
    letter = DeadLetter("engine", "internal: x", 5, item.encode())
    await bus.publish_confirmed(subjects.dead("engine"), letter.encode(), "one")
    await bus.publish_confirmed(subjects.dead("rails"), DeadLetter("rails", "bytes", 1, b"?").encode(), "two")

    assert await dead._list(bus, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["number"], row["stage"], row["request"]) for row in rows] == [(1, "engine", item.request), (2, "rails", "?")]
    assert await dead._show(bus, 1) == 0
    assert json.loads(capsys.readouterr().out)["input"]["request"] == item.request
    assert await dead._show(bus, 9) == 1

    got: dict[str, Envelope] = {}

    async def on_delivery(delivery: Delivery) -> None:
        got[delivery.subject] = Envelope.decode(delivery.data)
        await delivery.ack()

    for subject, consumer in ((subjects.work("guard"), "guard"), (item.next_subject, "engine")):
        puller = await bus.pull(subject, consumer, on_delivery, lambda: None)
        await puller.ask(1)
    assert await dead._replay(bus, 1) == 0
    new = capsys.readouterr().out.strip()
    await until(lambda: len(got) == 2, "guard and engine")
    assert {one.request for one in got.values()} == {new}
    assert new != item.request
    owned = await ownership.read(bus, new)
    assert owned is not None
    assert (owned.tenant, owned.model, owned.on_disconnect) == (item.tenant, item.model, "keep")


def test_no_broker_is_said_in_one_line(broker: NatsServer, tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    broker.kill()
    settings = Settings(home=str(tmp_path), nats_url=broker.url)  # type: ignore[arg-type]
    assert dead.list_letters(settings, as_json=False) == 1
    assert capsys.readouterr().err.startswith("headrace dead: no NATS server answers")
