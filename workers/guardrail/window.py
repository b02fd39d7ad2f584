"""Holds back the end of a stream that might still become a match, and not a character more.

Tokens go in, the same number of tokens comes out in the same order: as they were, or with what a rule matched taken out and
without their id, which would tell. Sans I/O; knows no events and no bus. What has been released after a sequence of tokens
depends on that sequence alone, so a window is rebuilt by feeding it the same tokens again, in any batches.

Positions are characters of the whole stream, from 0. [0, decided) is decided: no text to come can change what happens to it.
[decided, received) is at most rail.chars_max long while nothing is blocked.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from schemas.events import Verdict
from workers.guardrail.patterns import LOOK_BEHIND_CHARS
from workers.guardrail.rails import Finding, Rail, redact, tally


@dataclass(frozen=True, slots=True)
class Released:
    """Tokens that may leave, ids and texts aligned, and what was decided on the way.

    verdicts: of this call alone. blocked: the finding after which nothing leaves any more, in positions of the stream.
    """

    ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()
    blocked: Finding | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """A token that waits. A token without text belongs to the character that comes next: it carries some of its bytes."""

    id: int
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + (len(self.text) or 1)


class Window:
    """One stream's window. After a block, a close or an error it takes nothing more."""

    def __init__(self, rail: Rail) -> None:
        self._rail = rail
        self._text = ""  # [_origin, received): what is undecided, and the context to the left of it
        self._origin = 0
        self._decided = 0
        self._held: deque[_Held] = deque()
        self._edits: deque[Finding] = deque()  # decided, and not yet behind every held token
        self._ended = False

    @property
    def held_chars(self) -> int:
        """Characters that are not decided yet."""
        return self._origin + len(self._text) - self._decided

    def feed(self, ids: Sequence[int], texts: Sequence[str]) -> Released:
        """Takes the next tokens; returns those that have become safe. HeadraceError when a rail fails."""
        assert not self._ended, "fed after its end"
        received = self._origin + len(self._text)
        for token_id, text in zip(ids, texts, strict=True):
            self._held.append(_Held(token_id, text, received))
            received += len(text)
        self._text += "".join(texts)
        return self._step(final=False)

    def close(self) -> Released:
        """The stream is over: decides and returns all that is held."""
        assert not self._ended, "closed after its end"
        return self._step(final=True)

    def _step(self, final: bool) -> Released:
        self._ended = True  # stays so when a rail raises
        findings = self._decide(final)
        blocked = findings[-1] if findings and findings[-1].action == "block" else None
        self._edits.extend(findings if blocked is None else findings[:-1])
        tokens = [self._rendered(token) for token in self._due(final, blocked)]
        self._ended = final or blocked is not None
        self._trim()
        ids, texts = tuple(token[0] for token in tokens), tuple(token[1] for token in tokens)
        return Released(ids, texts, tally(findings, "output"), blocked)

    def _decide(self, final: bool) -> list[Finding]:
        """Moves decided as far as it goes: to the end, to where a match is still open, or to a block."""
        findings: list[Finding] = []
        text, at = self._text, self._decided - self._origin
        limit = len(text) if final else self._rail.open_from(text, at)
        while at < limit:
            finding = self._rail.next_finding(text, at, limit)
            if finding is None:
                at = limit
                break
            findings.append(replace(finding, start=self._origin + finding.start, end=self._origin + finding.end))
            if finding.action == "block":
                at = finding.start
                break
            at = finding.end
            if at > limit:
                limit = self._rail.open_from(text, at)
        self._decided = self._origin + at
        return findings

    def _due(self, final: bool, blocked: Finding | None) -> list[_Held]:
        """Takes the tokens that are decided to their end, and the token that a block cuts, to be rendered without the rest."""
        due: list[_Held] = []
        while self._held and (self._held[0].end <= self._decided or (final and blocked is None)):
            due.append(self._held.popleft())
        if blocked is not None and self._held and self._held[0].start < self._decided:
            due.append(self._held[0])
            self._edits.append(replace(blocked, end=max(blocked.end, self._held[0].end), placeholder=""))
        return due

    def _rendered(self, token: _Held) -> tuple[int | None, str]:
        while self._edits and self._edits[0].end <= token.start:
            self._edits.popleft()
        if not self._edits or self._edits[0].start >= token.end:
            return token.id, token.text
        size = len(token.text)
        inside = []
        for edit in self._edits:
            if edit.start >= token.end:
                break
            placeholder = edit.placeholder if edit.start >= token.start and size else ""
            start, end = max(edit.start - token.start, 0), min(edit.end - token.start, size)
            inside.append(replace(edit, start=start, end=end, placeholder=placeholder))
        return None, redact(token.text, inside)

    def _trim(self) -> None:
        drop = self._decided - self._origin - LOOK_BEHIND_CHARS
        if drop > 0:
            self._text = self._text[drop:]
            self._origin += drop
