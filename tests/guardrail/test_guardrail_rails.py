"""Which finding is taken when several could be, and what happens when a rule fails."""

import pytest

from schemas.errors import HeadraceError
from schemas.events import Verdict
from workers.guardrail.patterns import Rule
from workers.guardrail.rails import Finding, PatternRail, find_all, rail_for, redact, tally


def rule(name: str, body: str, after: str = "") -> Rule:
    return Rule(name, "personal", f"[{name}]", body, 9, "", after=after)


def found(text: str, *rules: Rule) -> list[tuple[str, int, int]]:
    rail = PatternRail([(one, "redact") for one in rules])
    return [(finding.rule, finding.start, finding.end) for finding in find_all(rail, text)]


def test_the_leftmost_match_is_taken_then_the_longest_then_the_first_of_the_table() -> None:
    short, long, late, twin = rule("short", "ab"), rule("long", "abc"), rule("late", "bcdef"), rule("twin", "a[b]c")
    assert found("xabcdef", short, long, late) == [("long", 1, 4)]
    assert found("xabcdef", long, short, late) == [("long", 1, 4)]
    assert found("xabcdef", short, late) == [("short", 1, 3)]
    assert found("xabcdef", long, twin) == [("long", 1, 4)]
    assert found("xabcdef", twin, long) == [("twin", 1, 4)]


def test_the_next_search_starts_where_the_last_finding_ended() -> None:
    assert found("aaaaa", rule("pair", "aa")) == [("pair", 0, 2), ("pair", 2, 4)]


def test_what_may_not_follow_shortens_or_refuses_a_match() -> None:
    digits = rule("digits", r"\d{2,4}(?: \d)?", after=r"\d")
    assert found("12345", digits) == [("digits", 1, 5)]
    assert found("1234 56", digits) == [("digits", 0, 4), ("digits", 5, 7)]


@pytest.mark.parametrize("text", ["AKIA" + "IOSFODNN7EXAMPLEX", "212-555-01234", "123-45-67890", "41111111111111111111111"])
def test_longer_runs_are_not_taken_for_what_they_begin_with(text: str) -> None:
    rail = rail_for({"secrets": "redact", "personal": "redact"})
    assert rail is not None
    assert find_all(rail, text) == []


def test_a_group_in_the_pattern_is_the_part_that_is_removed() -> None:
    assert found("key=abc;", rule("value", "key=([a-z]{3})")) == [("value", 4, 7)]


def test_redaction_and_tally_keep_the_order_of_the_text() -> None:
    findings = [Finding("b", 0, 1, "redact", "<b>"), Finding("a", 2, 3, "redact", "<a>"), Finding("b", 3, 4, "redact", "<b>")]
    assert redact("1-23-", findings) == "<b>-<a><b>-"
    assert tally(findings, "input") == (Verdict("b", "input", "redact", 2), Verdict("a", "input", "redact", 1))


def test_there_is_no_rail_when_all_groups_are_off() -> None:
    assert rail_for({}) is None
    assert rail_for({"secrets": "off", "personal": "off"}) is None


def test_a_rule_that_raises_is_an_internal_error_that_names_the_rule_and_quotes_nothing() -> None:
    def broken(text: str) -> int:
        raise ValueError(text)

    rail = PatternRail([(Rule("broken", "personal", "#", "a1", 2, "1", check=broken), "redact")])
    with pytest.raises(HeadraceError, match="broken: ValueError") as caught:
        find_all(rail, "an a1")
    assert caught.value.code == "internal"
    assert "a1" not in caught.value.message
    assert caught.value.__context__ is None
