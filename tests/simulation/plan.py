"""What happens in one run, drawn from its seed: who asks for what, and which faults come when."""

import random
from dataclasses import dataclass, replace
from typing import Literal

from schemas.envelope import Action
from tests.simulation.model import Script

Kind = Literal["gateway", "guardrail", "engine"]
Name = Literal["crash", "stale_wake_up", "drain", "disconnect", "full_store", "broker_death"]
Going = Literal["reads", "cancels", "leaves"]

KINDS: tuple[Kind, ...] = ("gateway", "guardrail", "engine")


@dataclass(frozen=True, slots=True)
class Ask:
    """One client's request. after: what it does when it goes, seconds after it was taken in. slow: seconds between reads."""

    prompt: str
    seed: int
    script: Script
    at_s: float
    personal: Action = "off"
    deadline_ms: int = 120_000
    going: Going = "reads"
    after_s: float = 0.0
    keeps: bool = False
    slow_s: float = 0.0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Lossy:
    """Chances of harm to each message, by its name."""

    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    lose: float = 0.0
    lose_answer: float = 0.0
    crash_before_ack: float = 0.0
    crash_after_publish: float = 0.0

    @property
    def calm(self) -> bool:
        """Whether what is sent arrives."""
        return not (self.lose or self.lose_answer)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one moment, for so long where it lasts, to the nth replica of a kind where it is one's own."""

    name: Name
    at_s: float
    for_s: float
    kind: Kind
    replica: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    asks: tuple[Ask, ...]
    lossy: Lossy
    faults: tuple[Fault, ...]

    @property
    def broker_dies(self) -> bool:
        """Whether logs in memory are lost on the way."""
        return any(fault.name == "broker_death" for fault in self.faults)

    @property
    def cuts(self) -> bool:
        """Whether a process may be cut off from the broker, or hear it late."""
        late = not self.lossy.calm or self.lossy.delay > 0
        return late or any(fault.name in ("disconnect", "broker_death") for fault in self.faults)

    @property
    def orderly(self) -> bool:
        """Whether live messages come to every reader as they come to the log."""
        harmed = self.lossy.drop or self.lossy.duplicate or self.lossy.reorder
        stalls = any(fault.kind == "gateway" and fault.name == "stale_wake_up" for fault in self.faults)
        return not (harmed or stalls or any(fault.name in ("disconnect", "broker_death") for fault in self.faults))


def draw(seed: int) -> Plan:
    """The run of a seed."""
    rng = random.Random(f"plan {seed}")
    asks = tuple(_ask(rng, number) for number in range(rng.randint(3, 5)))
    if rng.random() < 0.1:
        return _two_holders(rng, seed, asks)
    faults = tuple(_fault(rng) for _ in range(rng.choice((0, 1, 2, 2, 3, 4))))
    return Plan(seed, asks, _lossy(rng), faults)


def _two_holders(rng: random.Random, seed: int, asks: tuple[Ask, ...]) -> Plan:
    """Nothing but work that two hold at once, because one of them slept just through its lease."""
    freeze = Fault("stale_wake_up", 0.2, 5.05 + rng.random() * 0.5, rng.choice(("engine", "engine", "guardrail")), 0)
    at_once = (
        replace(ask, at_s=0.2 + rng.random() * 0.3, slow_s=0.0, personal=rng.choice(("off", "off", ask.personal)))
        for ask in asks
    )
    faults = [freeze]
    if rng.random() < 0.5:  # and then the one that did not sleep dies
        faults.append(Fault("crash", 5.5 + rng.random() * 2, 0.0, freeze.kind, 1))
    return Plan(seed, tuple(at_once), Lossy(), tuple(faults))


def _ask(rng: random.Random, number: int) -> Ask:
    leaks, failures = rng.random() < 0.3, rng.choice((0,) * 14 + (1, 2, 99))
    script = Script(rng.randint(5, 12), leaks, failures)
    ask = Ask(
        prompt=f"question {number}",
        seed=rng.getrandbits(32),
        script=replace(script, tokens=max(script.tokens, 8)) if leaks else script,
        at_s=rng.random() * 1.5,
        personal=rng.choice(("off", "redact", "redact", "block")),
        slow_s=rng.choice((0.0, 0.0, 0.0, 0.5, 2.0)),
        key=rng.choice((None, f"key {number}")),
    )
    match rng.choice(("reads",) * 7 + ("cancels", "leaves", "hurries")):
        case "hurries":
            return replace(ask, deadline_ms=rng.choice((30, 300, 1500, 7000)))
        case "cancels":
            return replace(ask, going="cancels", after_s=rng.random() * 2)
        case "leaves":
            return replace(ask, going="leaves", after_s=rng.random() * 2, keeps=rng.random() < 0.5)
        case _:
            return ask


def _lossy(rng: random.Random) -> Lossy:
    def chance(of: float, at_most: float) -> float:
        return rng.random() * at_most if rng.random() < of else 0.0

    if rng.random() < 0.2:
        return Lossy()
    return Lossy(
        delay=chance(0.4, 0.1),
        drop=chance(0.4, 0.4),
        duplicate=chance(0.3, 0.3),
        reorder=chance(0.3, 0.3),
        lose=chance(0.3, 0.1),
        lose_answer=chance(0.3, 0.1),
        crash_before_ack=chance(0.3, 0.4),
        crash_after_publish=chance(0.3, 0.2),
    )


def _fault(rng: random.Random) -> Fault:
    if rng.random() < 0.3:  # early, so that work comes to a process that does not run; mostly longer than a lease
        for_s = rng.choice((0.3, 1.0, 3.0, 5.2, 5.5, 6.0, 7.0, 9.0))
        return Fault("stale_wake_up", rng.random() * 2.5, for_s, rng.choice((*KINDS, "engine", "engine")), rng.randrange(2))
    name: Name = rng.choice(("crash", "crash", "crash", "drain", "disconnect", "full_store", "broker_death"))
    return Fault(name, rng.random() * 5, rng.random() * 3, rng.choice(KINDS), rng.randrange(2))
