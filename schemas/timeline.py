"""Where a request's time went: contiguous spans by construction.

A timeline is a start and a list of marks; a mark closes the span that began at the mark before it. Nothing can overlap or be
left out, so the spans sum to the end-to-end time whatever the stages do. All instants are microseconds of the broker's time.

Span names, in order of a full visit: gateway.accept, rails.queue, rails.check, retrieval.queue, retrieval.search,
engine.queue (in the broker), engine.wait (in the engine's own queue), engine.prefill, engine.decode, rails.output,
gateway.reply.
"""

from typing import NamedTuple


class Mark(NamedTuple):
    """The end of the span called name, in microseconds of the broker's time."""

    name: str
    end_us: int


class Timeline(NamedTuple):
    """A request's start and the marks so far."""

    start_us: int
    marks: tuple[Mark, ...] = ()

    @property
    def end_us(self) -> int:
        """The end of the last span."""
        return self.marks[-1].end_us if self.marks else self.start_us

    def mark(self, name: str, now_us: int) -> "Timeline":
        """Closes the span called name at now_us; a clock that went back gives an empty span, never a negative one."""
        return Timeline(self.start_us, (*self.marks, Mark(name, max(now_us, self.end_us))))

    def spans_us(self) -> dict[str, int]:
        """Microseconds by span; a span that was visited twice (a second attempt) is summed."""
        spans: dict[str, int] = {}
        begin = self.start_us
        for name, end in self.marks:
            spans[name] = spans.get(name, 0) + end - begin
            begin = end
        return spans

    def to_wire(self) -> list[object]:
        """[start, [name, end], ...] as msgpack carries it."""
        return [self.start_us, *([name, end] for name, end in self.marks)]

    @classmethod
    def from_wire(cls, wire: list[object]) -> "Timeline":
        """The inverse of to_wire; ValueError or TypeError on anything else."""
        start, *marks = wire
        if not isinstance(start, int):
            raise TypeError(f"timeline starts with {start!r}, not an integer")
        return cls(start, tuple(Mark(str(name), int(end)) for name, end in marks))  # type: ignore[misc, has-type]
