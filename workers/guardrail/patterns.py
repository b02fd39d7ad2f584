"""What the rails look for: one table of rules, each with the longest match it can make.

A rule is a pattern with a bounded length, what may not stand beside it (before, after), an optional check on the text it
matched, and the placeholder that takes its place. rails.py compiles and applies the table; window.py relies on chars_max.

Rules are written so that a stream can be decided early and in bounded time:
- every repeat has an upper limit, and no two neighbouring repeats can share a long run, so matching cost per position is
  bounded by chars_max;
- before is a look-behind of at most LOOK_BEHIND_CHARS; after is one character class; bodies look neither way;
- a check may shorten a match but sees nothing outside it.

Where the line is drawn between missing and crying wolf:
- keys with a published prefix need no check. `sk-` also starts CSS classes, so it needs a digit. AKIA and JWT need a boundary.
- credential (`password: ...`) needs eight characters with a letter, a digit and five different ones: plain words, `********`,
  `<your key>`, `$VARIABLE` and numbers pass. A password of letters only, or of digits only, is missed.
- cards need Luhn and a first digit of 2 to 6: one 16-digit number in twenty still looks like a card; time stamps do not.
- IBANs need the country's length and mod 97: no false alarm worth the name.
- phones need `+`, the North American 3-3-4 with a dash, dot or bracket (`256 512 1024` is no phone), or a leading zero with
  separators and 9 to 12 digits. Dates, times, versions, decimals and numbers in one piece pass.
- e-mail needs a dotted domain: `me@localhost` passes. Local parts may be of any script; scripts written without spaces are
  taken up to 12 characters and not mixed with others, so that prose beside an address stays.
Not seen: text hidden by spelling (`bob at x dot com`), zero-width characters, other encodings; what a secret has beyond the
longest match of its rule; a secret that ends before its shortest match, as when an answer is cut off inside it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.envelope import RuleGroup

LOOK_BEHIND_CHARS = 8  # left context that a decided position needs; no rule's before looks further back


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to find.

    body is a pattern in the syntax of the regex module; when it has a group, that group is what is removed, else all of it.
    chars_max: characters of the longest body. check gets the text to remove and returns how many of its characters, from the
    front, really are a match (0: none). sign is a short pattern found inside every match: text without any rule's sign is
    passed after one look. blocking, when set, replaces body where the rule blocks: enough of the beginning to be sure of, so
    that a block need not wait for the end.
    """

    name: str
    group: RuleGroup
    placeholder: str
    body: str
    chars_max: int
    sign: str
    before: str = ""
    after: str = ""
    check: Callable[[str], int] | None = None
    blocking: str | None = None


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    odd = [int(digit) for digit in digits[-1::-2]]
    even = [2 * int(digit) for digit in digits[-2::-2]]
    return (sum(odd) + sum(double - 9 * (double > 9) for double in even)) % 10 == 0


def whole_numbers(text: str, digits_min: int, digits_max: int) -> list[int]:
    """Ends, longest first, of the prefixes of text that end with a digit, before a separator, and hold that many digits."""
    ends, digits = [], 0
    for position, character in enumerate(text):
        digits += character.isdecimal()
        if digits > digits_max:
            break
        at_end = position + 1 == len(text) or not text[position + 1].isdecimal()
        if digits >= digits_min and character.isdecimal() and at_end:
            ends.append(position + 1)
    return ends[::-1]


def digits_of(text: str) -> str:
    """The decimal digits of text, of any script."""
    return "".join(filter(str.isdecimal, text))


def card_chars(text: str) -> int:
    """Characters of the longest prefix that is a card number, which may be followed by other numbers."""
    return next((end for end in whole_numbers(text, 13, 19) if luhn(digits_of(text[:end]))), 0)


# ISO 13616 registry: characters of an IBAN, and the countries whose IBANs have as many.
IBAN_COUNTRIES = {
    15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
}  # fmt: skip
IBAN_CHARS = {country: chars for chars, countries in IBAN_COUNTRIES.items() for country in countries.split()}


def iban_chars(text: str) -> int:
    """Characters of the IBAN that text begins with (ISO 13616: length by country, mod 97), or 0."""
    letters = [(position, letter) for position, letter in enumerate(text.upper()) if letter.isalnum()]
    count = IBAN_CHARS.get(text[:2].upper(), len(letters) + 1)
    if count > len(letters):
        return 0
    end = letters[count - 1][0] + 1
    iban = "".join(letter for _, letter in letters[:count])
    number = int("".join(str(int(letter, 36)) for letter in iban[4:] + iban[:4]))
    return end if number % 97 == 1 and not text[end : end + 1].isalnum() else 0


def phone_international_chars(text: str) -> int:
    """All of text, unless it reads like a signed number: few digits with no separator but a decimal point."""
    signed_number = text[1:].replace(".", "", 1).isdecimal()
    return 0 if signed_number and len(digits_of(text)) < 10 else len(text)


def phone_national_chars(text: str) -> int:
    """Characters of the longest prefix of 9 to 12 digits, unless it is a date or of zeros and ones only."""
    parts = text.replace("/", "-").split("-")
    if len(parts) > 2 and len(parts[0]) == 2 and len(parts[1]) == 2 and parts[2][:2] in {"19", "20"}:
        return 0
    ends = whole_numbers(text, 9, 12)
    return next((end for end in ends if set(digits_of(text[:end])) - {"0", "1"}), 0)


def ssn_chars(text: str) -> int:
    """All of text, unless the number was never issued (area 000, 666 or 9xx, group 00, serial 0000)."""
    area, middle, serial = text[:3], text[4:6], text[7:]
    issued = area not in {"000", "666"} and area[0] != "9" and middle != "00" and serial != "0000"
    return len(text) if issued else 0


def mixed_chars(text: str) -> int:
    """Characters of text without its closing punctuation, when they look drawn by chance; JSON web tokens have a rule."""
    value = text.rstrip(".,:!?")
    described = value.startswith(("eyJ", "$", "%")) or "://" in value
    random_looking = len(value) >= 8 and _DIGIT.search(value) and _LETTER.search(value) and len(set(value)) >= 5
    return len(value) if random_looking and not described else 0


def digit_chars(text: str) -> int:
    """All of text when it holds a digit."""
    return len(text) if _DIGIT.search(text) else 0


_DIGIT = re.compile(r"\d")
_LETTER = re.compile(r"[^\W\d_]")
_DASH = r"\-\u2010\u2011"
_SPACE = r" \u00a0\u202f"
_RUN = r"[A-Za-z0-9_\-]"

_PEM_HEAD = r"-----BEGIN [A-Z0-9 ]{0,24}PRIVATE KEY(?: BLOCK)?-----"
_PEM = (
    _PEM_HEAD + r"(?:\s{0,4}[A-Z][A-Za-z\-]{1,19}: [^\n]{1,80}\n){0,4}"
    r"[A-Za-z0-9+/=\s\\]{0,8192}(?:-----END [A-Z0-9 ]{0,24}PRIVATE KEY(?: BLOCK)?-----)?"
)

_QUOTED = r"[\s\"'`*\]]{0,4}"
_PASSWORD = rf"(?i:pass(?:word|wd|phrase|code)|pwd){_QUOTED}(?:=>|:=|==?|:|is\s)"
_SECRET = r"secret(?:[ _\-]?(?:access[ _\-]?)?key)?|token"
_KEY = r"(?:api|access|private|auth|client|encryption)[ _\-]?(?:key|token|secret)"
_CREDENTIAL = (
    rf"(?:{_PASSWORD}|(?i:{_SECRET}|{_KEY}){_QUOTED}(?:=>|:=|==?|:))"
    r"[\s\"'`*]{0,6}([^\s\"'`*,;<>(){}\[\]]{8,512})"
)

# Letters beside ASCII: of scripts whose words are set apart by spaces (Latin to Sinhala, Georgian to Canadian syllabics,
# Latin and Greek extensions, Hangul), and of those whose words are not (Thai to Myanmar, kana, Han).
_SPACED = r"\u00aa-\u0dff\u10a0-\u167f\u1e00-\u1fff\uac00-\ud7a3"
_UNSPACED = r"\u0e00-\u109f\u3041-\u3096\u30a1-\u30fa\u30fc\u3400-\u9fff"
_LOCAL = rf"A-Za-z0-9_+.\-{_SPACED}"
_LABEL = rf"[A-Za-z0-9\-{_SPACED}{_UNSPACED}]{{1,63}}+"
_EMAIL = (
    rf"(?:[{_LOCAL}]{{1,64}}+(?:['\u2019][{_LOCAL}]{{1,32}}+)?+|[{_UNSPACED}]{{1,12}}+)(?:[@\uff20\ufe6b]|%40)"
    rf"(?:{_LABEL}[.\uff0e]){{1,8}}(?:xn--[A-Za-z0-9\-]{{2,59}}|[A-Za-z]{{2,24}}|[A-Za-z{_SPACED}{_UNSPACED}]{{2,12}})"
)

_NOT_ALNUM_BEFORE = r"(?<![A-Za-z0-9])"
_GITHUB = r"(?:gh[pousr]_[A-Za-z0-9]{30,255}|github_pat_[A-Za-z0-9_]{22,255})"
_ANTHROPIC = rf"sk-ant-{_RUN}{{16,251}}"
_JSON_WEB_TOKEN = rf"eyJ{_RUN}{{8,1024}}\.eyJ{_RUN}{{8,4096}}(?:\.{_RUN}{{0,1024}})?"
_BEARER = r"(?i:bearer)[ \t]{1,3}([A-Za-z0-9._~+/=\-]{20,512})"


def _secret(name: str, label: str, body: str, chars_max: int, sign: str, **more: Any) -> Rule:
    return Rule(name, "secrets", f"[{label}]", body, chars_max, sign, **more)


SECRETS = (
    _secret("private_key", "private key", _PEM, 8732, "-----", blocking=_PEM_HEAD),
    _secret("aws_access_key", "AWS key", r"A[KS]IA[A-Z0-9]{16}", 20, "A[KS]IA", before=_NOT_ALNUM_BEFORE, after="[A-Za-z0-9]"),
    _secret("github_token", "GitHub token", _GITHUB, 266, "gh._|github_"),
    _secret("gitlab_token", "GitLab token", rf"glpat-{_RUN}{{20,255}}", 261, "glpat-"),
    _secret("slack_token", "Slack token", r"(?:xox[abeoprs]|xapp)-[A-Za-z0-9\-]{10,250}", 255, "xox|xapp"),
    _secret("google_key", "Google key", rf"AIza{_RUN}{{35}}", 39, "AIza"),
    _secret("stripe_key", "Stripe key", r"(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{10,247}", 255, "k_|whsec"),
    _secret("anthropic_key", "Anthropic key", _ANTHROPIC, 258, r"\d", before=_NOT_ALNUM_BEFORE, check=digit_chars),
    _secret("openai_key", "OpenAI key", rf"sk-{_RUN}{{20,255}}", 258, r"\d", before=_NOT_ALNUM_BEFORE, check=digit_chars),
    _secret("huggingface_token", "Hugging Face token", r"hf_[A-Za-z0-9]{30,255}", 258, "hf_", before=_NOT_ALNUM_BEFORE),
    _secret("registry_token", "registry token", rf"(?:npm_[A-Za-z0-9]{{36}}|pypi-AgE{_RUN}{{32,255}})", 263, "npm_|pypi-"),
    _secret("json_web_token", "JSON web token", _JSON_WEB_TOKEN, 6152, "eyJ", before=r"(?<![A-Za-z0-9_\-])"),
    _secret("bearer_token", "bearer token", _BEARER, 521, r"\d", before=_NOT_ALNUM_BEFORE, check=mixed_chars),
    _secret("url_password", "password", r"://[^\s:@/]{0,64}:([^\s@/]{3,128})@", 197, "://"),
    _secret("credential", "credential", _CREDENTIAL, 541, r"\d", check=mixed_chars),
)

_GAP = rf"[{_SPACE}{_DASH}]"
_POINT = rf"[{_SPACE}{_DASH}.]"
_CARD = rf"[2-6](?:{_GAP}?\d){{12,18}}"
_IBAN = rf"[A-Za-z]{{2}}\d\d(?:{_GAP}?[A-Za-z0-9]){{11,30}}"
_PHONE_INTERNATIONAL = rf"[+\uff0b]\d(?:[{_SPACE}{_DASH}\u2013.()/]{{0,2}}\d){{7,14}}"
_PHONE_US = rf"(?:1{_POINT})?(?:\([2-9]\d\d\)[{_SPACE}]?[2-9]\d\d{_POINT}|[2-9]\d\d{_POINT}[2-9]\d\d[{_DASH}.])\d{{4}}"
_PHONE_NATIONAL = rf"\(?0[1-9]\d{{0,3}}\)?(?:[{_SPACE}{_DASH}/]{{1,2}}\d{{2,8}}){{1,4}}"
_SSN = rf"\d{{3}}[{_DASH}]\d\d[{_DASH}]\d{{4}}"


def _personal(name: str, label: str, body: str, chars_max: int, sign: str = r"\d", **more: Any) -> Rule:
    return Rule(name, "personal", f"[{label}]", body, chars_max, sign, **more)


PERSONAL = (
    _personal("email", "e-mail", _EMAIL, 675, r"[@\uff20\ufe6b]|%40"),
    _personal("card", "card number", _CARD, 37, before=r"(?<!\d)(?<!\d[.,])", after=r"\d", check=card_chars),
    _personal("iban", "IBAN", _IBAN, 64, before=_NOT_ALNUM_BEFORE, check=iban_chars),
    _personal(
        "phone_international", "phone", _PHONE_INTERNATIONAL, 44,
        before=r"(?<![\w+])", after=r"\d", check=phone_international_chars,
    ),
    _personal("phone_us", "phone", _PHONE_US, 16, before=r"(?<![\w.,\-])", after=r"\w"),
    _personal(
        "phone_national", "phone", _PHONE_NATIONAL, 47,
        before=r"(?<![\w.,+/:\-])", after=r"\d", check=phone_national_chars,
    ),
    _personal("us_ssn", "SSN", _SSN, 11, before=r"(?<![\w.\-])", after=r"[\w\-]", check=ssn_chars),
)  # fmt: skip

RULES = SECRETS + PERSONAL
