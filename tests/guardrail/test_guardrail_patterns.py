"""The table of rules: what each finds, what each leaves alone, how long its matches and its matching can get."""

import re._parser as pattern_parser  # type: ignore[import-not-found]
import time

import pytest
import regex

from tests.guardrail.samples import KEY, SAMPLES, in_place, redacting
from workers.guardrail.patterns import IBAN_CHARS, LOOK_BEHIND_CHARS, RULES, Rule, iban_chars, luhn
from workers.guardrail.rails import find_all, redact

RAIL = redacting()


def redacted(text: str) -> str:
    return redact(text, find_all(RAIL, text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_finds_its_sample_and_nothing_beside_it(rule: Rule) -> None:
    text = f"Here: {in_place(rule.name)} ok."
    assert [finding.rule for finding in find_all(RAIL, text)] == [rule.name]
    assert redacted(text) == text.replace(SAMPLES[rule.name], rule.placeholder)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_stated_maximum_is_the_longest_match_and_look_behind_is_bounded(rule: Rule) -> None:
    assert pattern_parser.parse(rule.body).getwidth()[1] == rule.chars_max
    look_behinds = [inner for _, (_, inner) in pattern_parser.parse(rule.before)]
    assert all(inner.getwidth()[1] <= LOOK_BEHIND_CHARS for inner in look_behinds)
    assert rule.after == "" or pattern_parser.parse(rule.after).getwidth() == (1, 1)
    if rule.blocking:
        assert pattern_parser.parse(rule.blocking).getwidth()[1] <= rule.chars_max


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_sample_holds_its_rules_sign(rule: Rule) -> None:
    assert regex.search(rule.sign, in_place(rule.name))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail BOB@EXAMPLE.COM.", "mail [e-mail]."),
        ("<bob@x.io>, o'brien@x.ie", "<[e-mail]>, [e-mail]"),
        ("bob\uff20example.com bob%40example.com", "[e-mail] [e-mail]"),
        ("ask müller@bücher.example, почта@пример.рф or a@xn--bcher-kva.xn--p1ai!", "ask [e-mail], [e-mail] or [e-mail]!"),
        ("联系bob@x.com请", "联系[e-mail]请"),
        ("用户@例子.广告。", "[e-mail]。"),
        ("x" * 70 + "@x.com", "x" * 6 + "[e-mail]"),
        ("a@b.com-c@d.com", "[e-mail][e-mail]"),
        ("card 4111111111111111 12/28 then", "card [card number] 12/28 then"),
        ("12 5500 0000 0000 0004", "12 [card number]"),
        ("3782 822463 10005", "[card number]"),
        ("gb82west12345698765432, NO93 8601 1117 947", "[IBAN], [IBAN]"),
        ("DE89 3704 0044 0532 0130 00 BIC COBADEFF", "[IBAN] BIC COBADEFF"),
        ("+1-202-555-0143, +442079460958", "[phone], [phone]"),
        ("1-800-555-1234 or 202.555.0143", "[phone] or [phone]"),
        ("06 12 34 56 78; 030/1234567", "[phone]; [phone]"),
        ("-----BEGIN PRIVATE " + "KEY-----", "[private key]"),
        ("-----BEGIN EC PRIVATE " + "KEY-----\nProc-Type: 4,ENCRYPTED\n\nMHcC", "[private key]"),
        ('{"api_key": "' + KEY[:20] + '"}', '{"api_key": "[credential]"}'),
        ("**Password:** `tr0ub4dor&3`", "**Password:** `[credential]`"),
        ("my password is correct7horse.", "my password is [credential]."),
        ("token: " + SAMPLES["json_web_token"], "token: [JSON web token]"),
    ],
)
def test_what_is_found(text: str, expected: str) -> None:
    assert redacted(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3, 10.0.0.1, 192.168.100.200:8080",
        "on 2024-01-02 at 09:30:15, 01-02-2024 12:00, 01/02/2024, 2024-01-02T10:00:00.000Z",
        "sizes 256 512 1024 2048, 300 400 5000, 1,234,567,890, 3.141592653589793, +3.14159265, 0.4111111111111111",
        "1700000000000, 1700000000000000, 4111 1111 1111 1112, GB82 WEST 1234 5698 7654 33",
        "0101 1100 0011, 000-12-3456, 912-34-5678, order 123456789012",
        "me@localhost, @decorator, a @ b.c, x@y, foo@1.2.3.4",
        "password: ********, api_key = <your-api-key>, token = tokenizer.encode(x), max_tokens: 100000",
        "the password is important, secret: $SECRET_KEY_2024, pwd=letters",
        "sk-fading-circle-container-item, task-12345678901234567890, disk-1234567890123456789012",
        "-----BEGIN PUBLIC KEY-----, -----BEGIN CERTIFICATE-----",
        "https://example.com:8080/path?x=1, C++ and a+b+1, 5+5=10",
    ],
)
def test_what_is_left_alone(text: str) -> None:
    assert redacted(text) == text


def test_card_and_iban_checks_agree_with_published_examples() -> None:
    assert luhn("79927398713")
    assert not luhn("79927398710")
    assert iban_chars("MT84MALT011000012345MTLCAST001S") == 31
    assert iban_chars("GB82WEST12345698765432X") == 0
    assert min(IBAN_CHARS.values()) == 4 + 11
    assert max(IBAN_CHARS.values()) <= 4 + 30


HOSTILE = {
    "letters": "a",
    "addresses without an end": "a.a@",
    "long domains": "a" * 64 + "@" + "1." * 60,
    "apostrophes": "a'",
    "digits": "4",
    "spaced digits": "4 ",
    "phones": "+1 (",
    "zeros": "01 23 ",
    "keywords": "password=",
    "key prefixes": "sk-",
    "web tokens": "eyJ",
    "web tokens apart": ".eyJaaaaaaaaa",
    "key headers": "-----BEGIN PRIVATE " + "KEY-----",
    "urls": "://:",
    "bearers": "bearer aaaaaaaaaaaaaaaaaaaaaaaa ",
    "country codes": "DE89 ",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_100_kb_of_hostile_text_take_under_three_seconds(name: str) -> None:
    text = (HOSTILE[name] * 100_000)[:100_000] + "@"
    start = time.process_time()
    find_all(RAIL, text)
    assert time.process_time() - start < 3
