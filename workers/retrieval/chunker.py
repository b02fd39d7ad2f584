"""Cuts a document into passages: pure, no tokens, no vectors.

A document is read as units that tile it, white space aside (a heading, a code fence, a sentence), and neighbouring
units are packed into chunks of about `chunk_chars` characters, never over PASSAGE_CHARS_MAX. Nothing is lost: every
character that is not white space comes out, in order. What is added says where a chunk stands: the headings above it,
and the last sentence of the chunk before it. A unit is cut between words; only a word longer than UNIT_CHARS_MAX is cut
inside.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from schemas.limits import PASSAGE_CHARS_MAX

CHUNK_CHARS = 800  # about 200 tokens of English: whole inside the 256 tokens that the embedder reads
OVERLAP_CHARS_MAX = 240  # a longer last sentence is not repeated
HEADINGS_CHARS_MAX = 160
UNIT_CHARS_MAX = PASSAGE_CHARS_MAX - HEADINGS_CHARS_MAX - 2  # what one unit may be beside its headings and a blank line

assert CHUNK_CHARS + OVERLAP_CHARS_MAX < UNIT_CHARS_MAX

MARKDOWN_SUFFIXES = (".md", ".markdown")

_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*\n?")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# After a sentence's end, or before a line that starts a list item or a table row.
_SENTENCE_END = re.compile(
    r"""[.!?…][)\]"'\u201d\u2019»*_]*\s+|[\u3002\uff01\uff1f]\s*|\n(?=[ \t]*(?:[-*+]|\d+[.)]|\|)[ \t])"""
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One passage of a document.

    document is what is replaced as a whole when it is ingested again; position counts its chunks from 0; source is what
    a reader is shown: document#heading, or document:line (from 1) where there is no heading.
    """

    document: str
    position: int
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class _Unit:
    """text[begin:end), under the headings of path (a heading's own path ends with itself)."""

    begin: int
    end: int
    kind: Literal["heading", "code", "sentence"]
    path: tuple[str, ...]
    ends_block: bool  # a paragraph or a section may end here


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A document's text, its units, and where its newlines are."""

    document: str
    text: str
    units: list[_Unit]
    newlines: list[int]


def chunk_document(document: str, text: str, chunk_chars: int = CHUNK_CHARS) -> tuple[Chunk, ...]:
    """The chunks of a document: by headings and fences when its name ends as Markdown's does, else as plain text."""
    assert 0 < chunk_chars <= UNIT_CHARS_MAX, f"chunk_chars {chunk_chars} is not in 1..{UNIT_CHARS_MAX}"
    parsed = _parse(document, text.replace("\r\n", "\n").replace("\r", "\n"))
    chunks: list[Chunk] = []
    for begin, end in _packed(parsed.units, chunk_chars):
        chunk = _chunk(parsed, len(chunks), begin, end)
        if chunk is not None:
            chunks.append(chunk)
    return tuple(chunks)


def _parse(document: str, text: str) -> _Parsed:
    markdown = document.lower().endswith(MARKDOWN_SUFFIXES)
    whole = _markdown(text) if markdown else _prose(text, 0, len(text), ())
    units = [part for unit in whole for part in _cut(text, unit)]
    return _Parsed(document, text, units, [match.start() for match in re.finditer("\n", text)])


def _markdown(text: str) -> Iterator[_Unit]:
    """Headings, code fences and the sentences between them; the units tile all but white space."""
    headings: list[tuple[int, str]] = []
    prose = at = 0  # text[prose:at) is prose that is not yielded yet
    while at < len(text):
        path = tuple(title for _, title in headings)
        end = _line_end(text, at)
        fence = _FENCE.match(text, at, end)
        heading = _HEADING.fullmatch(text, at, end) if end - at <= HEADINGS_CHARS_MAX else None
        if fence or heading:
            yield from _prose(text, prose, at, path)
        if fence:
            end = _fence_end(text, end, fence[1])
            yield _Unit(at, end, "code", path, True)
        elif heading:
            level = len(heading[1])
            headings = [above for above in headings if above[0] < level] + [(level, heading[2] or "")]
            yield _Unit(at, end, "heading", tuple(title for _, title in headings), False)
        if fence or heading:
            prose = end
        at = end
    yield from _prose(text, prose, len(text), tuple(title for _, title in headings))


def _line_end(text: str, at: int) -> int:
    """The index after the line that at stands in, its newline included."""
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline + 1


def _fence_end(text: str, at: int, mark: str) -> int:
    """The index after the line that closes a fence opened by mark; the text's end when nothing closes it."""
    while at < len(text):
        end = _line_end(text, at)
        line = text[at:end].strip()
        at = end
        if len(line) >= len(mark) and set(line) == {mark[0]}:
            break
    return at


def _prose(text: str, begin: int, end: int, path: tuple[str, ...]) -> Iterator[_Unit]:
    """The sentences of text[begin:end), each with the white space after it."""
    for paragraph_begin, paragraph_end in _split(text, begin, end, re.compile(r"\n[ \t]*\n\s*")):
        for at, stop in _split(text, paragraph_begin, paragraph_end, _SENTENCE_END):
            if not text[at:stop].isspace():
                yield _Unit(at, stop, "sentence", path, stop == paragraph_end)


def _split(text: str, begin: int, end: int, boundary: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Half-open ranges that tile text[begin:end) and end after each match of boundary."""
    for match in boundary.finditer(text, begin, end):
        yield begin, match.end()
        begin = match.end()
    if begin < end:
        yield begin, end


def _cut(text: str, unit: _Unit) -> Iterator[_Unit]:
    """The unit in pieces of at most UNIT_CHARS_MAX: cut after a line of code, else after a word, else inside a word."""
    begin = unit.begin
    while unit.end - begin > UNIT_CHARS_MAX:
        limit = begin + UNIT_CHARS_MAX
        cut = text.rfind("\n", begin, limit) + 1 if unit.kind == "code" else 0
        if cut <= begin:
            cut = next((at for at in range(limit, begin, -1) if text[at - 1].isspace() or text[at].isspace()), limit)
        yield replace(unit, begin=begin, end=cut, ends_block=False)
        begin = cut
    yield replace(unit, begin=begin)


def _packed(units: list[_Unit], chunk_chars: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of units, one a chunk.

    A heading opens a chunk and is kept with what follows it. A chunk that is full ends at its last paragraph's end when
    that leaves it at least half full.
    """
    begin = 0
    while begin < len(units):
        end = begin + 1
        while end < len(units) and _joins(units, begin, end, chunk_chars):
            end += 1
        if end < len(units) and units[end].kind != "heading":
            end = _last_block_end(units, begin, end, chunk_chars // 2)
        yield begin, end
        begin = end


def _joins(units: list[_Unit], begin: int, end: int, chunk_chars: int) -> bool:
    """Whether units[end] goes into the chunk of units[begin:end)."""
    only_headings = units[end - 1].kind == "heading"  # nothing but headings stands before a heading in its chunk
    if units[end].kind == "heading" and not only_headings:
        return False
    return units[end].end - units[begin].begin <= (UNIT_CHARS_MAX if only_headings else chunk_chars)


def _last_block_end(units: list[_Unit], begin: int, end: int, chars_min: int) -> int:
    for cut in range(end, begin, -1):
        if units[cut - 1].end - units[begin].begin < chars_min:
            break
        if units[cut - 1].ends_block:
            return cut
    return end


def _chunk(parsed: _Parsed, position: int, begin: int, end: int) -> Chunk | None:
    """The chunk of units[begin:end); None when they are white space."""
    first, last = parsed.units[begin], parsed.units[end - 1]
    raw = parsed.text[first.begin : last.end]
    body = raw.strip()
    if not body:
        return None
    headings = _headings(first.path[:-1] if first.kind == "heading" else first.path)
    repeated = _overlap(parsed, begin, PASSAGE_CHARS_MAX - len(headings) - len(body))
    line = bisect_left(parsed.newlines, first.begin + raw.index(body)) + 1
    source = f"{parsed.document}#{last.path[-1]}" if last.path and last.path[-1] else f"{parsed.document}:{line}"
    passage = headings + repeated + body
    assert len(passage) <= PASSAGE_CHARS_MAX, f"passage of {len(passage)} characters, the bound is {PASSAGE_CHARS_MAX}"
    return Chunk(parsed.document, position, source, passage)


def _headings(path: tuple[str, ...]) -> str:
    """The headings above a chunk as a line and a blank line, HEADINGS_CHARS_MAX + 2 characters at most: the nearest."""
    line = " > ".join(title for title in path if title)
    if len(line) > HEADINGS_CHARS_MAX:
        line = "…" + line[-(HEADINGS_CHARS_MAX - 1) :]
    return f"{line}\n\n" if line else ""


def _overlap(parsed: _Parsed, begin: int, room_chars: int) -> str:
    """The sentence before units[begin] when it stands in the same section and fits; else nothing."""
    before = parsed.units[begin - 1] if begin else None
    if before is None or before.kind != "sentence" or parsed.units[begin].kind == "heading":
        return ""
    sentence = parsed.text[before.begin : before.end].lstrip()
    return sentence if len(sentence) <= min(OVERLAP_CHARS_MAX, room_chars) else ""
