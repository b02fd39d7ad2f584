"""Puts one request's token events through a window and makes events of what comes out.

The window counts tokens; events carry the index of their first one. Nothing is dropped before a block, so the indices of the
events that come out follow each other from 0 without a gap, as those that go in must.
"""

from collections import deque
from dataclasses import replace

from schemas.envelope import Rails
from schemas.events import Logprob, Passage, Tokens, Verdict
from workers.guardrail.rails import Finding, find_all, rail_for, redact
from workers.guardrail.window import Released, Window


class OutputRail:
    """The output rails over one stream, from its first token."""

    def __init__(self, rails: Rails) -> None:
        rail = rail_for(rails.output)
        assert rail is not None, "no output rail is on"
        self._window = Window(rail)
        self._received = 0
        self._released = 0
        self._logprobs: deque[Logprob | None] = deque()  # of the tokens in the window, if anybody asked
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self.blocked: Finding | None = None  # once set, nothing more is taken

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One verdict for each rule and action so far."""
        return tuple(self._verdicts.values())

    def feed(self, tokens: Tokens) -> list[Tokens]:
        """Takes the next event, in order; returns what has become safe. HeadraceError when a rail fails."""
        assert tokens.index == self._received, f"got token {tokens.index}, expected {self._received}"
        self._received = tokens.end
        self._logprobs += tokens.logprobs
        ids = [token_id for token_id in tokens.ids if token_id is not None]
        return self._events(tokens.epoch, self._window.feed(ids, tokens.texts))

    def close(self, epoch: int) -> list[Tokens]:
        """The stream is over: returns all that is left and safe."""
        return self._events(epoch, self._window.close())

    def _events(self, epoch: int, released: Released) -> list[Tokens]:
        self.blocked = released.blocked
        for new in released.verdicts:
            old = self._verdicts.get((new.rule, new.action))
            count = new.count + (old.count if old else 0)
            self._verdicts[new.rule, new.action] = Verdict(new.rule, new.where, new.action, count)
        if not released.ids:
            return []
        tokens = Tokens(epoch, self._released, released.ids, released.texts, self._logprobs_of(released))
        self._released = tokens.end
        return [tokens]

    def _logprobs_of(self, released: Released) -> tuple[Logprob | None, ...]:
        """Those of the tokens that leave; none for a token that was changed, whose bytes they would tell."""
        if not self._logprobs:
            return ()
        leaving = [self._logprobs.popleft() for _ in released.ids]
        return tuple(None if token_id is None else of for token_id, of in zip(released.ids, leaving, strict=True))


def clean_passages(rails: Rails, passages: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """Passages as they may leave beside an answer: what a rule matches is taken out, whatever its action is."""
    rail = rail_for(rails.output)
    if rail is None:
        return passages
    return tuple(
        replace(
            passage,
            text=redact(passage.text, find_all(rail, passage.text)),
            source=redact(passage.source, find_all(rail, passage.source)),
        )
        for passage in passages
    )
