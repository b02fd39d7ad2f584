"""Text from tokens: as if all bytes had been decoded at once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.detokenizer import Detokenizer

_BYTES = st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode), st.just("añ€😀\u200d👩".encode()))


def _texts(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(pieces)
    return [*(detokenizer.feed(number) for number in range(len(pieces))), detokenizer.flush()]


def test_an_emoji_in_four_tokens_comes_with_the_last() -> None:
    assert _texts([b"\xf0", b"\x9f", b"\x98", b"\x80!"]) == ["", "", "", "😀!", ""]


def test_an_unfinished_character_comes_at_the_flush() -> None:
    assert _texts([b"ab\xe2", b"\x82"]) == ["ab", "", "\ufffd"]


def test_an_id_beyond_the_table_has_no_text() -> None:
    assert Detokenizer([b"a"]).feed(7) == ""


@given(st.lists(_BYTES, max_size=5).map(b"".join), st.lists(st.integers(0, 200), max_size=12))
def test_joined_texts_equal_one_decode_for_any_split(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(edges)]
    assert "".join(_texts(pieces)) == data.decode("utf-8", errors="replace")


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=20), st.data())
def test_rebuilt_from_the_same_ids_it_goes_on_the_same(pieces: list[bytes], data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(pieces) - 1))
    rebuilt = Detokenizer(pieces)
    for number in range(kept):
        rebuilt.feed(number)
    rest = [*(rebuilt.feed(number) for number in range(kept, len(pieces))), rebuilt.flush()]
    assert rest == _texts(pieces)[kept:]
