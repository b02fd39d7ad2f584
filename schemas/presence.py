"""What a worker says of itself every second: that it is there, whether it can be given work, and how it is."""

from typing import Self

from pydantic import Field, ValidationError

from schemas import codec
from schemas.codec import CodecError
from schemas.envelope import Wire
from schemas.subjects import Stage


class ModelCard(Wire):
    """A model that an engine serves. context_tokens bounds prompt and answer together."""

    id: str
    context_tokens: int
    precision: str
    token_bytes_max: int = 1024  # no token stands for more text: a longer prompt cannot fit


class Presence(Wire):
    """One worker's state. gauges are numbers for the operator (kv blocks by state, running, waiting, ...)."""

    stage: Stage
    worker: str
    ready: bool
    reason: str = ""  # why it is not ready
    model: ModelCard | None = None  # of an engine
    slots: int = 0  # requests that it takes at once
    running: int = 0
    gauges: dict[str, float] = Field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes for the broker."""
        return codec.pack(self.model_dump(mode="python"))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The presence in these bytes; CodecError when they hold none."""
        try:
            return cls.model_validate(codec.unpack(data))
        except ValidationError as error:
            raise CodecError(f"not a presence: {error}") from error
