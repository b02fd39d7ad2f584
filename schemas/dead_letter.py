"""Work that failed its last attempt, with its cause: what hr.dead.<stage> carries."""

from dataclasses import dataclass
from typing import Self

from schemas import codec
from schemas.codec import CodecError
from schemas.subjects import Stage


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """input is the work item's own bytes: an envelope, unless that was the fault."""

    stage: Stage
    cause: str
    attempts: int
    input: bytes

    def encode(self) -> bytes:
        """As bytes for the broker."""
        return codec.pack({"stage": self.stage, "cause": self.cause, "attempts": self.attempts, "input": self.input})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The letter in these bytes; CodecError when they hold none."""
        wire = codec.unpack(data)
        try:
            return cls(wire["stage"], str(wire["cause"]), int(wire["attempts"]), bytes(wire["input"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CodecError(f"not a dead letter: {error!r}") from error
