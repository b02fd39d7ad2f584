"""The window: split as you like, the same text comes out as from one look at the whole; nothing is held longer than needed."""

import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.envelope import Action, RuleGroup
from schemas.errors import HeadraceError
from tests.guardrail.samples import KEY, SAMPLES, in_place, redacting
from workers.guardrail.patterns import RULES, Rule
from workers.guardrail.rails import Finding, PatternRail, Rail, find_all, rail_for, redact, tally
from workers.guardrail.window import Released, Window

RAIL = redacting()
Split = tuple[str, ...]


def whole(rail: Rail, text: str) -> tuple[str, Finding | None]:
    """What one look at the whole text makes of it: the text that may leave, and the finding that blocks."""
    findings = find_all(rail, text)
    for number, finding in enumerate(findings):
        if finding.action == "block":
            return redact(text[: finding.start], findings[:number]), finding
    return redact(text, findings), None


def stream(rail: Rail, tokens: Sequence[str], batch: int = 1) -> tuple[list[int | None], list[str], list[Released]]:
    """Feeds tokens in batches, then closes; ids, texts and the answers. Stops at a block, as the caller must."""
    window, answers = Window(rail), []
    for start in range(0, len(tokens), batch):
        part = tokens[start : start + batch]
        answers.append(window.feed(range(start, start + len(part)), part))
        if answers[-1].blocked:
            break
    else:
        answers.append(window.close())
    ids = [token_id for answer in answers for token_id in answer.ids]
    return ids, [text for answer in answers for text in answer.texts], answers


def check(rail: Rail, tokens: Sequence[str], batch: int = 1) -> None:
    """The property: the same text, findings and block as from one look, token for token, and ids only of untouched tokens."""
    text = "".join(tokens)
    expected, blocked = whole(rail, text)
    ids, texts, answers = stream(rail, tokens, batch)
    assert "".join(texts) == expected
    assert answers[-1].blocked == blocked
    findings = find_all(rail, text)
    counted = findings if blocked is None else findings[: findings.index(blocked) + 1]
    counts: Counter[tuple[str, str]] = Counter()
    for verdict in (verdict for answer in answers for verdict in answer.verdicts):
        counts[verdict.rule, verdict.action] += verdict.count
    assert counts == {(verdict.rule, verdict.action): verdict.count for verdict in tally(counted, "output")}
    assert len(ids) == len(tokens) if blocked is None else len(ids) <= len(tokens)
    touched = {position for finding in counted for position in range(finding.start, finding.end)}
    start = 0
    for index, token_id in enumerate(ids):
        own = range(start, start + (len(tokens[index]) or 1))
        assert token_id == (None if touched.intersection(own) else index)
        assert token_id is None or texts[index] == tokens[index]
        start += len(tokens[index])


def splits(text: str, parts: int) -> list[Split]:
    """Every way to cut a text into so many parts, empty parts included."""
    cuts = itertools.combinations_with_replacement(range(len(text) + 1), parts - 1)
    return [tuple(text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))) for cut in cuts]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_cut_in_two_and_every_character_alone_gives_the_text_of_one_look(name: str) -> None:
    for text in (f"See {in_place(name)}, thanks.", in_place(name), in_place(name) + in_place(name), f"x{in_place(name)}1"):
        for tokens in splits(text, 2):
            check(RAIL, tokens)
        check(RAIL, list(text))


@pytest.mark.parametrize(
    "text", ["to a.b@c.io.", "4111 1111 1111 1111 1", "+1 202 555 0143-", "no86 0111 17947 x", "pwd: a1b2c3d4.!", "a@b.cd@e.fg"]
)
def test_every_cut_in_three_gives_the_text_of_one_look(text: str) -> None:
    for tokens in splits(text, 3):
        check(RAIL, tokens)


ACTIONS: list[dict[RuleGroup, Action]] = [
    {"secrets": "redact", "personal": "redact"},
    {"secrets": "block", "personal": "redact"},
    {"secrets": "redact", "personal": "block"},
    {"personal": "redact"},
    {"secrets": "block"},
]
FRAGMENTS = st.one_of(
    st.sampled_from([in_place(name) for name in SAMPLES]),
    st.sampled_from(
        ["@", ".", " ", "-", "a", "b1", "1", "4", "é", "用户", "🙂", "\n", ": ", "=", "password", "DE89", "+", "'"]
    ),
    st.text(alphabet="a@.b+1 -\n4:eyJsk_%(0)/用", max_size=8),
    st.sampled_from(list(SAMPLES.values())).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])),
)


@given(
    st.lists(FRAGMENTS, max_size=7).map("".join),
    st.sampled_from(ACTIONS),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2, 5, 1000]),
)
@example("a@b.c", ACTIONS[0], random.Random(0), 1)
@settings(max_examples=500, deadline=None)
def test_any_text_in_any_split_gives_the_text_of_one_look(
    text: str, actions: dict[RuleGroup, Action], chance: random.Random, batch: int
) -> None:
    rail = rail_for(actions)
    assert rail is not None
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(len(text) + 2)))
    check(rail, [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))], batch)


@given(st.text(alphabet="a@.b+1 -\n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_hostile_alphabet_character_by_character_gives_the_text_of_one_look(text: str) -> None:
    check(RAIL, list(text))


TOY = [
    (Rule("toy", "personal", "#", r"a{1,2}(?:@b{1,2}){1,2}", 8, "@", r"(?<!b)", r"b"), "redact"),
    (Rule("pair", "personal", "%", r"b@", 2, "@"), "redact"),
]


def test_all_short_texts_over_a_small_alphabet_give_the_text_of_one_look() -> None:
    rail = PatternRail(TOY)  # type: ignore[arg-type]
    for size in range(7):
        for letters in itertools.product("a@b.", repeat=size):
            assert "".join(stream(rail, letters)[1]) == whole(rail, "".join(letters))[0]


def test_exactly_what_could_still_become_a_match_is_open() -> None:
    """Against plain search: position s is open when some continuation gives a body from s that reaches the end of the text."""
    rail = PatternRail(TOY)  # type: ignore[arg-type]
    bodies = [re.compile(rule.before + f"(?:{rule.body})") for rule, _ in TOY]
    endings = ["".join(letters) for size in range(6) for letters in itertools.product("a@b", repeat=size)]
    for letters in itertools.product("a@b.", repeat=4):
        text = "".join(letters)
        reached = (
            start
            for start in range(len(text))
            if any(body.fullmatch(text + ending, start) for body in bodies for ending in endings)
        )
        assert rail.open_from(text, 0) == next(reached, len(text)), text


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("Hello", "Hello"),
        ("Hello ", ""),
        ("Hello, wor", "wor"),
        ("mail bob@x.com", "bob@x.com"),
        ("mail bob@x.com ", ""),
        ("mail bob@x.com.", "bob@x.com."),
        ("mail bob@x.com. ", ""),
        ("mail bob@x!", ""),
        ("call 202-555-01", "202-555-01"),
        ("call 202-555-01x", "202-555-01x"),
        ("in 1999.", "1999."),
        ("in 1999, ", ""),
        ("in 2024 ", "2024 "),
        ("in 2024 we ", ""),
        ("AKIA" + "IOSFODNN7EXAMPLE", "AKIA" + "IOSFODNN7EXAMPLE"),
        ("key ghp_", "ghp_"),
        ("key ghp_" + KEY[:29] + " ", ""),
        ("天气很好\uff0c我们去公园", "我们去公园"),
    ],
)
def test_what_is_held_back(text: str, held: str) -> None:
    window, before = Window(RAIL), text[: len(text) - len(held)]
    released = "".join(window.feed(range(len(text)), list(text)).texts)
    assert released == redact(before, find_all(RAIL, before))
    assert window.held_chars == len(held)


PROSE = (
    "The river turned the wheel, and the wheel turned the stone; nobody in the valley remembered a time when it hadn't. "
    "Grain came up the road in carts (heavy ones, drawn by oxen), and flour went down again before evening. "
    '"Water," said the miller, "is patient: it will wait for you - but not for long!"'
)


def test_prose_is_held_back_by_at_most_the_word_that_is_being_written() -> None:
    window = Window(RAIL)
    for index, character in enumerate(PROSE):
        window.feed((index,), (character,))
        word = re.split(r"\s", PROSE[: index + 1])[-1]
        assert window.held_chars <= len(word)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_more_is_held_back_than_the_longest_match_of_the_rule(rule: Rule) -> None:
    window, most = Window(PatternRail([(rule, "redact")])), 0
    texts = [in_place(rule.name)[:-1] + "A1" * 30, "a" * 700 + "@" + "a." * 700, KEY * 4, "4 " * 60, in_place(rule.name)]
    for index, character in enumerate("".join(texts)):
        window.feed((index,), (character,))
        most = max(most, window.held_chars)
    assert 0 < most <= rule.chars_max


def test_an_endless_key_is_held_up_to_the_maximum_and_then_taken_out() -> None:
    text = in_place("private_key")[:40] + KEY * 50
    window, most, out = Window(RAIL), 0, ""
    pieces = [text[start : start + 50] for start in range(0, len(text), 50)]
    for index, piece in enumerate(pieces):
        out += "".join(window.feed((index,), (piece,)).texts)
        most = max(most, window.held_chars)
    assert 8192 < most <= 8732
    assert out.startswith("[private key]")
    assert text[:12] not in out


def test_the_placeholder_goes_to_the_first_token_and_what_is_beside_the_match_stays() -> None:
    ids, texts, _ = stream(RAIL, ["to b", "ob@", "", "x.com", ", b", "ye"])
    assert texts == ["to [e-mail]", "", "", "", ", b", "ye"]
    assert ids == [None, None, None, None, 4, 5]


def test_a_token_without_text_waits_for_its_character_and_loses_its_id_with_it() -> None:
    window = Window(RAIL)
    assert window.feed([0, 1], [" ", ""]) == Released((0,), (" ",))
    assert window.feed([2], ["é@x.io"]) == Released((), ())
    assert window.feed([3], [" "]).ids == (None, None, 3)
    assert window.feed([4], [""]) == Released((), ())
    assert window.close() == Released((4,), ("",))


def test_a_block_lets_out_what_is_before_the_match_and_then_nothing() -> None:
    rail = rail_for({"personal": "block", "secrets": "redact"})
    assert rail is not None
    ids, texts, answers = stream(rail, ["Hi ", "a1@b.io: ", "bye"])
    assert (ids, texts) == ([0], ["Hi "])
    ids, texts, answers = stream(rail, ["Hi a1@", "b.io: bye"])
    assert (ids, texts) == ([None], ["Hi "])
    assert answers[-1].blocked == Finding("email", 3, 10, "block", "[e-mail]")
    window = Window(rail)
    window.feed([0], ["a@b.io "])
    with pytest.raises(AssertionError):
        window.feed([1], ["more"])
    with pytest.raises(AssertionError):
        window.close()


def test_a_blocking_rail_does_not_wait_for_the_end_of_a_private_key() -> None:
    rail = rail_for({"secrets": "block"})
    assert rail is not None
    head = SAMPLES["private_key"].partition("\n")[0]
    blocked = Window(rail).feed([0, 1], ["Here:\n", head + "\n"]).blocked
    assert blocked is not None
    assert (blocked.rule, blocked.start) == ("private_key", 6)


def test_a_rule_that_raises_ends_the_stream_without_text_in_the_error() -> None:
    def broken(text: str) -> int:
        raise ValueError(text)

    rule = Rule("broken", "personal", "#", "a1", 2, "1", check=broken)
    window = Window(PatternRail([(rule, "redact")]))
    assert window.feed([0], ["ok "]).texts == ("ok ",)
    with pytest.raises(HeadraceError, match="broken: ValueError") as caught:
        window.feed([1], ["a1 "])
    assert caught.value.code == "internal"
    assert "a1" not in caught.value.message
    assert caught.value.__cause__ is None
    with pytest.raises(AssertionError):
        window.feed([2], ["more"])


@given(st.lists(FRAGMENTS, max_size=8).map("".join))
@settings(max_examples=200, deadline=None)
def test_text_without_any_sign_has_no_finding(text: str) -> None:
    blind = [(Rule(rule.name, rule.group, rule.placeholder, rule.body, rule.chars_max, "", rule.before, rule.after, rule.check))
             for rule in RULES]  # fmt: skip
    assert find_all(_unsigned(tuple(blind)), text) == find_all(RAIL, text)


_UNSIGNED: dict[int, PatternRail] = {}


def _unsigned(rules: tuple[Rule, ...]) -> PatternRail:
    if 0 not in _UNSIGNED:
        _UNSIGNED[0] = PatternRail([(rule, "redact") for rule in rules])
    return _UNSIGNED[0]


@pytest.mark.parametrize("unit", ["a", "a.a@", "4 ", "password=", "sk-", "DE89 "])
def test_hostile_streams_cost_under_two_milliseconds_a_token(unit: str) -> None:
    window, tokens = Window(RAIL), regex.findall(".{3}", unit * 1000)[:1000]
    start = time.process_time()
    for index, token in enumerate(tokens):
        window.feed((index,), (token,))
    assert (time.process_time() - start) / len(tokens) < 2e-3
