"""The WebSocket's frames, both ways: JSON text, told apart by `type`.

`id` is the client's own name for a request on this socket; `request` is ours, valid on any gateway. A resume's `from`
is the index of the first token that the client does not have.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from schemas.errors import HeadraceError
from schemas.requests import Closed, refusal

ClientId = Annotated[str, Field(min_length=1, max_length=128)]
RequestId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Start(Closed):
    """Ask for an answer; body is what the HTTP route of that kind takes, idempotency_key what its Idempotency-Key header is."""

    type: Literal["start"]
    id: ClientId
    kind: Literal["chat", "completion"]
    body: dict[str, Any]
    idempotency_key: str | None = None


class Cancel(Closed):
    """Stop a request of this socket."""

    type: Literal["cancel"]
    id: ClientId


class Resume(Closed):
    """Follow a request from token index `from` on, whichever gateway or socket began it."""

    type: Literal["resume"]
    id: ClientId
    request: RequestId
    start: int = Field(default=0, ge=0, alias="from")


class Ping(Closed):
    """Answered by pong."""

    type: Literal["ping"]


CLIENT_TYPES = ("start", "cancel", "resume", "ping")


def _type_of(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"~{kind}" if kind in CLIENT_TYPES else "~none"


ClientFrame = Start | Cancel | Resume | Ping
_CLIENT_FRAME: TypeAdapter[ClientFrame] = TypeAdapter(
    Annotated[
        Annotated[Start, Tag("~start")]
        | Annotated[Cancel, Tag("~cancel")]
        | Annotated[Resume, Tag("~resume")]
        | Annotated[Ping, Tag("~ping")],
        Discriminator(_type_of),
    ]
)


def parse_frame(value: object) -> ClientFrame:
    """A client's frame; HeadraceError names what is wrong with it."""
    if not isinstance(value, dict):
        raise HeadraceError("malformed_request", "a frame is a JSON object")
    if value.get("type") not in CLIENT_TYPES:
        raise HeadraceError("invalid_value", f"type: must be one of {', '.join(CLIENT_TYPES)}", "type")
    try:
        return _CLIENT_FRAME.validate_python(value)
    except ValidationError as error:
        raise refusal(error) from None


class ServerFrame(BaseModel):
    """A frame that we send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> str:
        """As JSON; fields that are absent are left out."""
        return self.model_dump_json(exclude_none=True)


class Accepted(ServerFrame):
    """The request is queued; keep `request` to resume."""

    type: Literal["accepted"] = "accepted"
    id: str
    request: str


class Token(ServerFrame):
    """Tokens [index, index + n) of the answer; the next frame says the next index.

    logprobs, if asked for, are as in OpenAI's chat.
    """

    type: Literal["token"] = "token"
    id: str | None = None
    request: str
    index: int
    text: str
    logprobs: list[dict[str, Any]] | None = None


class Counted(ServerFrame):
    """Tokens counted, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class Done(ServerFrame):
    """The answer is whole. headrace: passages used, verdicts, timings, when there are any."""

    type: Literal["done"] = "done"
    id: str | None = None
    request: str
    finish_reason: str
    usage: Counted
    headrace: dict[str, Any] | None = None


class Error(ServerFrame):
    """A request ended without a whole answer (with id), or a frame was refused (id only when it had one)."""

    type: Literal["error"] = "error"
    id: str | None = None
    request: str | None = None
    code: str
    message: str
    param: str | None = None
    retryable: bool


class Pong(ServerFrame):
    """Answers ping."""

    type: Literal["pong"] = "pong"
