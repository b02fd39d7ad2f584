"""What a request's subject carries: Tokens, then exactly one terminal event, Finished or Failed.

index counts the request's tokens from 0, over all attempts; epoch is the attempt that the event belongs to. ids and texts are
aligned: texts[i] is the text that token index + i brought to an end (a token that ends inside a character brings ""). On
hr.reply an id is None where a rail changed the token's text: the id would tell what the rail took out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, assert_never

from schemas import codec, limits
from schemas.codec import CodecError
from schemas.timeline import Timeline

Reason = Literal["stop", "length", "content_filter"]

TOKEN_BYTES = 10  # of a token beside its text: an id and a length
LIKELY_BYTES = 20  # of a likely token beside its bytes: an id, a number, lengths


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one request; cached_tokens of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved passage as the prompt numbered it (from 1)."""

    number: int
    source: str
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rail found: rule in where (input or output), what was done, how often."""

    rule: str
    where: Literal["input", "output"]
    action: Literal["redact", "block"]
    count: int


@dataclass(frozen=True, slots=True)
class Likely:
    """A token that could stand at a place: its bytes (none for control tokens) and the logarithm of its probability."""

    id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token, and the likeliest ones at its place, most likely first, if any were asked for.

    By the model's logits as they are: temperature, penalties and biases do not show.
    """

    token: Likely
    top: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens [index, index + len(ids)) of a request.

    logprobs are aligned with ids, or empty when nobody asked; None where a rail changed the token.
    """

    epoch: int
    index: int
    ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    logprobs: tuple[Logprob | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.texts):
            raise ValueError(f"{len(self.ids)} ids and {len(self.texts)} texts")
        if self.logprobs and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids and {len(self.logprobs)} logprobs")

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.index + len(self.ids)

    @property
    def text(self) -> str:
        """The text of all tokens of the event."""
        return "".join(self.texts)

    def since(self, index: int) -> "Tokens":
        """The part of the event from index on."""
        skip = max(0, index - self.index)
        return self.between(skip, len(self.ids)) if skip else self

    def between(self, begin: int, end: int) -> "Tokens":
        """Its tokens at the places [begin, end)."""
        return Tokens(self.epoch, self.index + begin, self.ids[begin:end], self.texts[begin:end], self.logprobs[begin:end])


def joined(epoch: int, pieces: Iterable[Tokens]) -> Tokens:
    """All pieces, which follow each other from index 0, as one event of this epoch."""
    held = list(pieces)
    logprobs: tuple[Logprob | None, ...] = ()
    if any(piece.logprobs for piece in held):
        logprobs = tuple(chain.from_iterable(piece.logprobs or (None,) * len(piece.ids) for piece in held))
    ids = tuple(chain.from_iterable(piece.ids for piece in held))
    texts = tuple(chain.from_iterable(piece.texts for piece in held))
    return Tokens(epoch, 0, ids, texts, logprobs)


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is whole: index tokens were emitted."""

    epoch: int
    index: int
    reason: Reason
    usage: Usage
    timeline: Timeline
    passages: tuple[Passage, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends without a whole answer: index tokens were emitted before."""

    epoch: int
    index: int
    code: str
    message: str
    timeline: Timeline
    param: str | None = None
    usage: Usage | None = None
    verdicts: tuple[Verdict, ...] = field(default=())


Event = Tokens | Finished | Failed
Terminal = Finished | Failed


def encode(event: Event) -> bytes:
    """One event as bytes for the broker."""
    match event:
        case Tokens():
            wire = {"t": "tokens", "e": event.epoch, "i": event.index, "ids": event.ids, "texts": event.texts}
            return codec.pack(wire | _logprobs_to_wire(event.logprobs))
        case Finished():
            return codec.pack(
                {
                    "t": "finished",
                    "e": event.epoch,
                    "i": event.index,
                    "reason": event.reason,
                    "usage": _usage_to_wire(event.usage),
                    "timeline": event.timeline.to_wire(),
                    "passages": [[p.number, p.source, p.text, p.score] for p in event.passages],
                    "verdicts": _verdicts_to_wire(event.verdicts),
                }
            )
        case Failed():
            return codec.pack(
                {
                    "t": "failed",
                    "e": event.epoch,
                    "i": event.index,
                    "code": event.code,
                    "message": event.message,
                    "param": event.param,
                    "usage": _usage_to_wire(event.usage) if event.usage else None,
                    "timeline": event.timeline.to_wire(),
                    "verdicts": _verdicts_to_wire(event.verdicts),
                }
            )
        case _:
            assert_never(event)


def decode(data: bytes) -> Event:
    """The event in these bytes; CodecError when they hold none."""
    wire = codec.unpack(data)
    try:
        return _from_wire(wire)
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"not an event: {error!r}") from error


def in_parts(tokens: Tokens) -> list[Tokens]:
    """The same tokens as events of about PART_BYTES_MAX at most, which the broker takes; at least one."""
    parts, begin, size = [], 0, 0
    for place in range(len(tokens.ids)):
        bytes_here = _token_bytes(tokens, place)
        size += bytes_here
        if size > limits.PART_BYTES_MAX and place > begin:
            parts.append(tokens.between(begin, place))
            begin, size = place, bytes_here
    return [*parts, tokens.between(begin, len(tokens.ids))]


def encode_end(tokens: Tokens, terminal: Terminal) -> list[bytes]:
    """A finished answer as a whole, in numbered parts: all its tokens, and with the last of them its end."""
    parts = in_parts(tokens)
    last = len(parts) - 1
    return [
        codec.pack({"part": n, "tokens": encode(part), "terminal": encode(terminal) if n == last else None})
        for n, part in enumerate(parts)
    ]


def decode_end(messages: Iterable[bytes]) -> list[bytes]:
    """The events, as encoded, of the finished answer whose parts these are; none unless it is whole.

    Several holders may have written it, one after another: what was whole first counts. CodecError for anything else.
    """
    events: list[bytes] = []
    for data in messages:
        wire = codec.unpack(data)
        part, tokens, terminal = wire.get("part"), wire.get("tokens"), wire.get("terminal")
        if not isinstance(part, int) or not isinstance(tokens, bytes) or not isinstance(terminal, bytes | None):
            raise CodecError("not a part of a finished answer")
        if part == 0:
            events = []
        if part == len(events):
            events.append(tokens)
            if terminal is not None:
                return [*events, terminal]
    return []


def _from_wire(wire: dict[str, Any]) -> Event:
    kind, epoch, index = wire["t"], int(wire["e"]), int(wire["i"])
    if kind == "tokens":
        return Tokens(epoch, index, tuple(wire["ids"]), tuple(wire["texts"]), _logprobs_from_wire(wire.get("logprobs", ())))
    timeline = Timeline.from_wire(wire["timeline"])
    verdicts = tuple(Verdict(*v) for v in wire["verdicts"])
    if kind == "finished":
        passages = tuple(Passage(*p) for p in wire["passages"])
        return Finished(epoch, index, wire["reason"], Usage(*wire["usage"]), timeline, passages, verdicts)
    if kind == "failed":
        usage = Usage(*wire["usage"]) if wire["usage"] else None
        return Failed(epoch, index, wire["code"], wire["message"], timeline, wire["param"], usage, verdicts)
    raise ValueError(f"unknown kind {kind!r}")


def _token_bytes(tokens: Tokens, place: int) -> int:
    """About what the token at this place takes in a message; never less."""
    size = TOKEN_BYTES + len(tokens.texts[place].encode())
    logprob = tokens.logprobs[place] if tokens.logprobs else None
    if logprob is not None:
        size += sum(LIKELY_BYTES + len(likely.data) for likely in (logprob.token, *logprob.top))
    return size


def _logprobs_to_wire(logprobs: tuple[Logprob | None, ...]) -> dict[str, Any]:
    """Each as the token, then the likeliest ones; {} when nobody asked."""
    if not logprobs:
        return {}
    each = [None if of is None else [[t.id, t.data, t.logprob] for t in (of.token, *of.top)] for of in logprobs]
    return {"logprobs": each}


def _logprobs_from_wire(wire: Iterable[Any]) -> tuple[Logprob | None, ...]:
    return tuple(None if of is None else _logprob_from_wire(*of) for of in wire)


def _logprob_from_wire(token: Iterable[Any], *top: Iterable[Any]) -> Logprob:
    return Logprob(Likely(*token), tuple(Likely(*likely) for likely in top))


def _usage_to_wire(usage: Usage) -> list[int]:
    return [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]


def _verdicts_to_wire(verdicts: tuple[Verdict, ...]) -> list[list[object]]:
    return [[v.rule, v.where, v.action, v.count] for v in verdicts]
