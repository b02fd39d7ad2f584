"""Chunks hold the whole document, in order and in bounds, and say where they stand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.limits import PASSAGE_CHARS_MAX
from workers.retrieval.chunker import CHUNK_CHARS, HEADINGS_CHARS_MAX, UNIT_CHARS_MAX, chunk_document

PIECES = st.sampled_from(
    [
        *("word", "Sentence ends. ", "\n", "\n\n", "# Top\n", "## Under\n", "#### Deep #\n", "```\n", "~~~~py\n", "x = 1\n"),
        *(" ", "\t", "\r\n", "- item\n", "1. first\n", "| a | b |\n", "日本。", "é", "#", "`", "\x0c", "\u2028"),
        *("y" * 900, "z " * 700),
    ]
)
DOCUMENTS = st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=400)


def holds_in_order(inner: str, outer: str) -> bool:
    """Whether inner's characters, white space aside, stand in outer in the same order."""
    found = iter(outer)
    return all(character in found for character in inner if not character.isspace())


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS, st.sampled_from(["a.md", "a.txt"]), st.sampled_from([1, 40, CHUNK_CHARS]))
def test_nothing_is_lost_and_the_bound_is_kept(text: str, document: str, chunk_chars: int) -> None:
    chunks = chunk_document(document, text, chunk_chars)
    assert holds_in_order(text, "".join(chunk.text for chunk in chunks))
    assert all(0 < len(chunk.text) <= PASSAGE_CHARS_MAX for chunk in chunks)
    assert [chunk.position for chunk in chunks] == list(range(len(chunks)))
    assert all(chunk.text == chunk.text.strip() for chunk in chunks)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["alpha", "beta.", "δ!", "w" * 300]), max_size=300), st.sampled_from([" ", "\n"]))
def test_no_word_is_cut(words: list[str], space: str) -> None:
    for chunk in chunk_document("a.txt", space.join(words)):
        assert set(chunk.text.split()) <= set(words)


def test_a_word_longer_than_the_bound_is_cut_inside() -> None:
    chunks = chunk_document("a.txt", "x" * (2 * UNIT_CHARS_MAX + 5))
    assert [len(chunk.text) for chunk in chunks] == [UNIT_CHARS_MAX, UNIT_CHARS_MAX, 5]


@pytest.mark.parametrize("text", ["", "  \n\t\r\n ", "\x0c\u2028"])
def test_white_space_has_no_chunks(text: str) -> None:
    assert chunk_document("a.md", text) == chunk_document("a.txt", text) == ()


def test_a_chunk_names_its_heading_and_holds_the_headings_above_it() -> None:
    text = "Intro.\n\n# Guide\n\n## Install\n\nRun it.\n\n## Use\n\nCall it.\n\n# Annex\n\nMore.\n"
    chunks = chunk_document("docs/a.md", text)
    assert [(chunk.source, chunk.text) for chunk in chunks] == [
        ("docs/a.md:1", "Intro."),
        ("docs/a.md#Install", "# Guide\n\n## Install\n\nRun it."),
        ("docs/a.md#Use", "Guide\n\n## Use\n\nCall it."),
        ("docs/a.md#Annex", "# Annex\n\nMore."),
    ]


def test_a_later_chunk_of_a_section_holds_its_whole_heading_path() -> None:
    sentence = "This sentence is about forty characters. "
    chunks = chunk_document("a.md", "# Guide\n\n## Install\n\n" + sentence * 40)
    assert len(chunks) > 1
    assert all(chunk.text.startswith("Guide > Install\n\n") for chunk in chunks[1:])
    assert {chunk.source for chunk in chunks} == {"a.md#Install"}


def test_long_heading_paths_keep_their_nearest_end() -> None:
    titles = [f"{'long title ' * 6}{level}" for level in range(1, 6)]
    text = "".join(f"{'#' * level} {title}\n\nBody.\n\n" for level, title in enumerate(titles, 1))
    last = chunk_document("a.md", text)[-1].text
    heading = last.split("\n\n")[0]
    assert heading.startswith("…")
    assert heading.endswith("long title 4")
    assert len(heading) == HEADINGS_CHARS_MAX


def test_chunks_overlap_by_one_sentence() -> None:
    sentences = [f"Sentence number {number:02} stands here." for number in range(60)]
    chunks = chunk_document("a.txt", " ".join(sentences))
    for before, after in pairwise(chunks):
        assert before.text.endswith(after.text[: len(sentences[0])])
    assert all(CHUNK_CHARS // 2 <= len(chunk.text) <= CHUNK_CHARS + 40 for chunk in chunks[:-1])


def test_a_full_chunk_ends_at_a_paragraph_where_it_can() -> None:
    paragraph = "A sentence of the paragraph. " * 10
    chunks = chunk_document("a.txt", f"{paragraph}\n\n{paragraph}\n\n{paragraph}\n\n{paragraph}")
    assert chunks[0].text == f"{paragraph}\n\n{paragraph}".strip()


def test_a_plain_text_chunk_names_its_first_own_line() -> None:
    text = "\n\n" + "\n".join(f"Line {number} has a sentence on it." for number in range(3, 100))
    chunks = chunk_document("notes.txt", text)
    assert chunks[0].source == "notes.txt:3"
    for before, after in pairwise(chunks):
        last = int(before.text.rsplit("Line ", 1)[1].split()[0])
        assert after.source == f"notes.txt:{last + 1}"


def test_headings_count_only_in_markdown_and_outside_fences() -> None:
    assert chunk_document("a.txt", "# Not a heading\n\nBody.")[0].source == "a.txt:1"
    text = "# Real\n\n```sh\n# comment\n```\n\nAfter.\n#hashtag\n####### seven\n"
    assert {chunk.source for chunk in chunk_document("a.md", text)} == {"a.md#Real"}


@pytest.mark.parametrize("fence", ["```", "~~~", "`````python"])
def test_a_code_fence_is_whole_if_it_fits(fence: str) -> None:
    mark = fence.removesuffix("python")
    code = f"{fence}\n" + "line one. Two! Three?\n\n# four\n" * 45 + f"{mark}\n"
    assert CHUNK_CHARS < len(code) < UNIT_CHARS_MAX
    chunks = chunk_document("a.md", f"Before it. And before.\n\n{code}\nAfter it.\n")
    assert sum(code.strip() in chunk.text for chunk in chunks) == 1


@pytest.mark.parametrize("chars", [UNIT_CHARS_MAX - 7, UNIT_CHARS_MAX - 6, UNIT_CHARS_MAX, UNIT_CHARS_MAX + 1])
def test_a_heading_is_kept_with_a_long_unit_only_within_the_bound(chars: int) -> None:
    chunks = chunk_document("a.md", "# One\n" + "x" * chars)
    assert max(len(chunk.text) for chunk in chunks) <= UNIT_CHARS_MAX + len("One\n\n")
    assert (len(chunks) == 1) == (chars <= UNIT_CHARS_MAX - len("# One\n"))


def test_a_fence_is_closed_only_by_a_mark_of_its_kind_and_length() -> None:
    text = "````\n```\n# in the fence\n~~~~\n# still in it\n`````\n\n# Out\n\nBody.\n"
    assert [chunk.source for chunk in chunk_document("a.md", text)] == ["a.md:1", "a.md#Out"]


def test_a_fence_that_nothing_closes_goes_to_the_end() -> None:
    assert [chunk.source for chunk in chunk_document("a.md", "# Top\n\n```\n# code\n\n# more\n")] == ["a.md#Top"]


def test_a_code_fence_too_long_is_cut_between_lines() -> None:
    lines = [f"call_number({number}, 'an argument that is here')" for number in range(200)]
    chunks = chunk_document("a.md", "```\n" + "\n".join(lines) + "\n```\n")
    assert {line for chunk in chunks for line in chunk.text.split("\n")} == {"```", *lines}


def test_a_megabyte_without_a_full_stop_is_cut_in_linear_time() -> None:
    assert len(chunk_document("a.md", "# " + " " * 500_000 + "word " * 100_000)) > 250
