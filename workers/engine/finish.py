"""When an answer ends, and which of its tokens may be shown already: a pure state machine per request.

A token is shown once all of its text is safe: once no stop string can begin in it any more. What is held back is
exactly the longest end of the text that is a proper beginning of a stop string (Knuth, Morris, Pratt 1977: the
automaton's state is its length), and whatever does not yet make a whole character. At a stop string the text is cut
at its start: the token across the cut is shown with its text trimmed, later ones are dropped. Of several stop strings
the one that ends first in the text counts, of those the longest; so the answer does not depend on how the text is
split into tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.envelope import Sampling
from schemas.events import Logprob
from workers.engine.detokenizer import Detokenizer

EndReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens to show now (texts and logprobs aligned with ids), and why the answer is over, if it is."""

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    reason: EndReason | None = None
    logprobs: tuple[Logprob | None, ...] = ()  # aligned with ids, or empty when nobody asked


NOTHING = Emission()


class StopMatcher:
    """Looks for stop strings in text that arrives in pieces; offsets count characters from the text's start."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self.fed = 0

    @property
    def safe(self) -> int:
        """No stop string can begin before this offset any more."""
        return self.fed - max(self._states, default=0)

    def skip(self, text: str) -> None:
        """Passes over text in which stop strings do not count. Only before the first feed."""
        self.fed += len(text)

    def feed(self, text: str) -> int | None:
        """The offset at which the first stop string to end begins, if one ends in text. The last call then."""
        if not self._stops:
            self.fed += len(text)
            return None
        for character in text:
            self.fed += 1
            hit = max((self._step(number, character) for number in range(len(self._stops))), default=0)
            if hit:
                return self.fed - hit
        return None

    def _step(self, number: int, character: str) -> int:
        """Moves one automaton on; the stop string's length when the text ends with it, else 0."""
        stop, failures, state = self._stops[number], self._failures[number], self._states[number]
        while state and stop[state] != character:
            state = failures[state - 1]
        self._states[number] = state = state + (stop[state] == character)
        return state if state == len(stop) else 0


def _failures(stop: str) -> list[int]:
    """For each prefix of stop, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = failures[length - 1]
        length += stop[length] == stop[place]
        failures[place] = length
    return failures


@dataclass(slots=True)
class _Held:
    """A token not shown yet, and where its text lies: [start, end). Inside a character, end is that of the character."""

    token_id: int
    text: str
    start: int
    end: int
    logprob: Logprob | None


class Emitter:
    """Takes an answer's tokens one by one, and gives out those that may be shown.

    tokens_max counts the answer's tokens. emitted_ids were shown by an earlier attempt: they are gone through again
    for the state that they leave behind, counted, and never given out. They may already end the answer: see ended.
    """

    def __init__(
        self,
        sampling: Sampling,
        eos_ids: frozenset[int],
        tokens_max: int,
        detokenizer: Detokenizer,
        emitted_ids: Sequence[int] = (),
    ) -> None:
        self._stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        self._with_logprobs = sampling.top_logprobs is not None
        self._tokens_min = sampling.min_tokens
        self._tokens_max = tokens_max
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(sampling.stop)
        self._held: deque[_Held] = deque()
        self.drawn = 0  # tokens of the answer, shown or not; a stop token counts
        self.shown = len(emitted_ids)
        self.ended: EndReason | None = None
        self._replay(emitted_ids)

    def push(self, token_id: int, logprob: Logprob | None = None) -> Emission:
        """The next token of the answer; afterwards the answer may be over."""
        assert self.ended is None, f"a token after the end ({self.ended})"
        self.drawn += 1
        if token_id in self._stop_ids and self.drawn > self._tokens_min:
            return self._finish("stop")
        start = self._matcher.fed
        text = self._detokenizer.feed(token_id)
        cut = self._match(text)
        end = start + len(text) + self._detokenizer.inside
        if not self._held and cut is None and end <= self._matcher.safe and self.drawn < self._tokens_max:
            return self._emit((token_id,), (text,), (logprob,))  # the common case, without a detour through the queue
        self._held.append(_Held(token_id, text, start, end, logprob))
        if cut is not None:
            return self._cut(cut)
        if self.drawn >= self._tokens_max:
            return self._finish("length")
        return self._release(self._matcher.safe)

    def _replay(self, emitted_ids: Sequence[int]) -> None:
        for token_id in emitted_ids:
            self.drawn += 1
            if self._match(self._detokenizer.feed(token_id)) is not None:
                self.ended = "stop"
                return
        if self.drawn >= self._tokens_max:
            self.ended = "length"

    def _match(self, text: str) -> int | None:
        """The cut that the latest token's text brings; stop strings count only after tokens_min tokens."""
        if self.drawn <= self._tokens_min:
            self._matcher.skip(text)
            return None
        return self._matcher.feed(text)

    def _finish(self, reason: EndReason) -> Emission:
        """The end without a stop string: all held tokens are shown, an unfinished character with the last of them."""
        tail = self._detokenizer.flush()
        cut = self._match(tail) if tail else None
        if self._held:
            self._held[-1].text += tail
        if cut is not None:
            return self._cut(cut)
        self.ended = reason
        return self._release(self._matcher.fed)

    def _cut(self, cut: int) -> Emission:
        """The end at a stop string that begins at offset cut."""
        self.ended = "stop"
        while self._held and self._held[-1].end > cut and self._held[-1].start >= cut:
            self._held.pop()
        for token in self._held:
            if token.start + len(token.text) > cut:
                token.text = token.text[: max(0, cut - token.start)]
                token.logprob = None  # its bytes would show what was cut off
        return self._release(self._matcher.fed)

    def _release(self, safe: int) -> Emission:
        """The held tokens whose text ends at or before safe; all of them when the answer is over."""
        ids, texts, logprobs = [], [], []
        while self._held and (self.ended is not None or self._held[0].end <= safe):
            token = self._held.popleft()
            ids.append(token.token_id)
            texts.append(token.text)
            logprobs.append(token.logprob)
        return self._emit(tuple(ids), tuple(texts), tuple(logprobs))

    def _emit(self, ids: tuple[int, ...], texts: tuple[str, ...], logprobs: tuple[Logprob | None, ...]) -> Emission:
        if not ids and self.ended is None:
            return NOTHING
        self.shown += len(ids)
        return Emission(ids, texts, self.ended, logprobs if self._with_logprobs else ())
