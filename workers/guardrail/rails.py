"""Applies rules to text: the next finding, and how much of a text's end a finding could still start in.

Findings are taken leftmost first; of those that start at one place the longest, then the one higher in the table; the next
search starts where the last finding ended. That order depends on the text alone, which is what lets window.py decide a stream
piece by piece and come to the same findings as a look at the whole.

Rails fail closed: a rule that raises ends the request with HeadraceError("internal"). What it raised is not passed on, because
its message may quote the text.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeVar

import regex

from schemas.envelope import Action, RuleGroup
from schemas.errors import HeadraceError
from schemas.events import Verdict
from workers.guardrail.patterns import RULES, Rule

Taken = Literal["redact", "block"]
Result = TypeVar("Result")

# Needs one more character and then refuses it: behind a body, it makes a partial match of every body that reaches the end.
_ONE_MORE = r"(?:\U0010FFFF(?<!\U0010FFFF))"


@dataclass(frozen=True, slots=True)
class Finding:
    """Characters [start, end) of a text are to be removed, or the text blocked from start on."""

    rule: str
    start: int
    end: int
    action: Taken
    placeholder: str


class Rail(Protocol):
    """What finds things in a text, one after another."""

    @property
    def chars_max(self) -> int:
        """The most characters that open_from leaves open."""

    def next_finding(self, text: str, start: int, limit: int) -> Finding | None:
        """The first finding whose match starts in [start, limit); what is before start is context."""

    def open_from(self, text: str, start: int) -> int:
        """The first position from start on where text to come could make or change a match; len(text) if none."""


class PatternRail:
    """A rail made of the rules of a table."""

    def __init__(self, rules: Iterable[tuple[Rule, Taken]]) -> None:
        self._rules = [(rule, action, _body(rule, action)) for rule, action in rules]
        assert self._rules, "a rail needs a rule"
        self.chars_max = max(rule.chars_max for rule, _, _ in self._rules)
        whole = [_whole(rule, body) for rule, _, body in self._rules]
        self._patterns = [regex.compile(pattern) for pattern in whole]
        self._sign = regex.compile("|".join(sorted({rule.sign for rule, _, _ in self._rules})))
        self._any = regex.compile("|".join(whole))
        self._open = regex.compile(f"(?:{'|'.join(rule.before + body for rule, _, body in self._rules)}){_ONE_MORE}")

    def next_finding(self, text: str, start: int, limit: int) -> Finding | None:
        """See Rail. Raises HeadraceError("internal") when a rule fails."""
        if self._sign.search(text, start) is None:
            return None
        while start < limit:
            match = _fail_closed("search", lambda at: self._any.search(text, at), start)
            if match is None or match.start() >= limit:
                return None
            finding = self._longest(text, match.start())
            if finding is not None:
                return finding
            start = match.start() + 1
        return None

    def open_from(self, text: str, start: int) -> int:
        """See Rail. Raises HeadraceError("internal") when a rule fails."""
        start = max(start, len(text) - self.chars_max)
        match = _fail_closed("search", lambda at: self._open.search(text, at, partial=True), start)
        return len(text) if match is None else match.start()

    def _longest(self, text: str, start: int) -> Finding | None:
        longest: Finding | None = None
        for (rule, action, _), pattern in zip(self._rules, self._patterns, strict=True):
            match = pattern.match(text, start)
            if match is None:
                continue
            first, last = match.span(pattern.groups)
            if rule.check is not None:
                last = first + _fail_closed(rule.name, rule.check, text[first:last])
            if first < last and (longest is None or last > longest.end):
                longest = Finding(rule.name, first, last, action, rule.placeholder)
        return longest


def rail_for(actions: Mapping[RuleGroup, Action]) -> Rail | None:
    """The rail of these actions, or None when all are off. Compiled once per set of actions."""
    return _compiled(tuple(sorted((group, action) for group, action in actions.items())))


def find_all(rail: Rail, text: str) -> list[Finding]:
    """All findings in a whole text, in order."""
    findings, start = [], 0
    while (finding := rail.next_finding(text, start, len(text))) is not None:
        findings.append(finding)
        start = finding.end
    return findings


def redact(text: str, findings: Iterable[Finding]) -> str:
    """The text with a placeholder for each finding, whatever its action."""
    pieces, start = [], 0
    for finding in findings:
        pieces += [text[start : finding.start], finding.placeholder]
        start = finding.end
    return "".join([*pieces, text[start:]])


def tally(findings: Iterable[Finding], where: Literal["input", "output"]) -> tuple[Verdict, ...]:
    """One verdict for each rule and action, with its count, in order of first appearance."""
    counts: dict[tuple[str, Taken], int] = {}
    for finding in findings:
        key = finding.rule, finding.action
        counts[key] = counts.get(key, 0) + 1
    return tuple(Verdict(rule, where, action, count) for (rule, action), count in counts.items())


@lru_cache
def _compiled(actions: tuple[tuple[RuleGroup, Action], ...]) -> Rail | None:
    taken: dict[RuleGroup, Taken] = {group: action for group, action in actions if action != "off"}
    rules = [(rule, taken[rule.group]) for rule in RULES if rule.group in taken]
    return PatternRail(rules) if rules else None


def _body(rule: Rule, action: Taken) -> str:
    return f"(?:{rule.blocking if action == 'block' and rule.blocking else rule.body})"


def _whole(rule: Rule, body: str) -> str:
    return f"{rule.before}{body}(?!{rule.after})" if rule.after else f"{rule.before}{body}"


Argument = TypeVar("Argument")


def _fail_closed(name: str, call: Callable[[Argument], Result], argument: Argument) -> Result:
    try:
        return call(argument)
    except Exception as error:
        kind = type(error).__name__
    raise HeadraceError("internal", f"a rail failed ({name}: {kind}), and text that no rail has seen is not passed on")
